"""No archive asks more of a server than its operator allows, whatever was packed into it."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from serve.archive.ceilings import Ceilings
from serve.archive.verification import Policy, policy_of
from serve.asgi.process.model_loader import load
from serve.asgi.process.serving_plan import Wanted
from serve.common.options import ServingOptions
from serve.runtime.card.budget import SERVING, Budget
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import SERVING_FILE, Serving, parse_serving
from serve.runtime.errors import CardError, UserError
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.staging import stage
from serve.torchserve.state import ServedModel
from tests.programs import Programs
from tests.serve import artifacts

#: What an archive may ask for that no server has: by its field, and the ceiling that it breaks.
GREEDY: dict[str, tuple[dict[str, Any], str]] = {
    "pixels": ({"budget": {"image_pixels": 201_000_000}}, "image_pixels 201_000_000, .* at most 200_000_000"),
    "unlimited pixels": ({"budget": {"request_pixels": None}}, "request_pixels any amount, .* at most 1_000_000_000"),
    "unlimited seconds": ({"budget": {"batch_seconds": None}}, "batch_seconds any amount, .* at most 300.0"),
    "scans": ({"budget": {"jpeg_scans": 100_000}}, "jpeg_scans 100_000, .* at most 1_000"),
    "seconds of an image": ({"budget": {"image_seconds": 600.0}}, r"image_seconds 600\.0, .* at most 30.0"),
    "processes": ({"workers": 100_000}, "workers 100_000, .* at most 64"),
    "threads": ({"decode_threads": 1000}, "decode_threads 1_000, .* at most 64"),
    "engine threads": ({"executions": [{"engine": "torchscript", "threads": 1000}]}, "threads 1_000, .* at most 256"),
    "queue": ({"queue_limit": 1 << 20}, "queue_limit 1_048_576, .* at most 65_536"),
    "images": ({"instance_limit": 1 << 20}, "instance_limit 1_048_576, .* at most 4_096"),
    "waiting": ({"max_batch_delay_ms": 1 << 20}, "max_batch_delay_ms 1_048_576, .* at most 10_000"),
    "a week": ({"response_timeout_s": 7 * 24 * 3600}, "response_timeout_s 604_800, .* at most 3_600"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.torchscript(tmp_path_factory.mktemp("ceilings") / "script")


def packed(folder: Path, target: Path, changes: dict[str, Any]) -> Path:
    """An archive, whole and sealed, that asks for something."""
    plain = json.loads(Serving((Execution("torchscript"),)).text)
    budget = {**plain["budget"], **changes.get("budget", {})}
    (folder / SERVING_FILE).write_text(json.dumps({**plain, **changes, "budget": budget}))
    try:
        return build_archive(folder, target / "greedy.mar", model_name="greedy")
    finally:
        (folder / SERVING_FILE).unlink()


@pytest.mark.parametrize("digits", [16, 400, 4000])
def test_a_limit_that_no_machine_has_is_refused_where_it_is_read(digits: int) -> None:
    body = json.loads(Serving((Execution("torchscript"),)).text)
    body["budget"]["image_pixels"] = 10**digits
    with pytest.raises(CardError, match=r"x/serving\.json: budget: image_pixels must be at most \d+, got 10") as caught:
        parse_serving(json.dumps(body), Path("x/serving.json"))
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(("changes", "message"), GREEDY.values(), ids=GREEDY)
def test_what_asks_for_more_than_a_ceiling_is_refused_by_both_starters(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    archive = packed(folder, tmp_path, changes)
    said = f"greedy.mar: asks for {message}: pack it with less, or raise .* under .ceilings. in the store's serve.toml"
    if "workers" not in changes:  # our own server has no more processes than cores
        with pytest.raises(CardError, match=said):
            load(Wanted("greedy", "1.0", archive), gpu=None, queue=None, policy=Policy())
    with pytest.raises(CardError, match=said):
        stage(tmp_path / "server", ServedModel.of("greedy", archive), archive)


def test_the_usual_limits_and_all_defaults_are_below_the_ceilings(folder: Path, tmp_path: Path) -> None:
    archive = packed(folder, tmp_path, {})
    served = load(Wanted("plain", "1.0", archive), gpu=None, queue=None, policy=Policy())
    served.service.close()
    assert served.serving.budget == SERVING
    ceilings = Ceilings()
    for entry in dataclasses.fields(Budget):
        assert getattr(SERVING, entry.name) < getattr(ceilings, entry.name)


def test_the_store_raises_and_lowers_its_ceilings(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("[ceilings]\nworkers = 128\nimage_pixels = 20_000_000\n")
    ceilings = policy_of(tmp_path).ceilings
    many = Serving((Execution("torchscript"),), workers=100, budget=dataclasses.replace(SERVING, image_pixels=10**7))
    ceilings.check(Path("a.mar"), many)
    with pytest.raises(CardError, match=r"image_pixels 50_000_000, .* at most 20_000_000"):
        ceilings.check(Path("a.mar"), Serving((Execution("torchscript"),)))
    (tmp_path / "serve.toml").write_text("[ceilings]\nworker = 3\n")
    with pytest.raises(UserError, match=r"serve\.toml: \[ceilings\]: worker: unknown .did you mean workers"):
        policy_of(tmp_path)


def test_an_operator_who_asks_for_more_on_the_command_line_gets_it(folder: Path, tmp_path: Path) -> None:
    archive = packed(folder, tmp_path, {"budget": {"request_pixels": None}})
    options = ServingOptions(workers=80, budget={"image_pixels": 300_000_000})
    policy = policy_of(tmp_path, options=options)
    asked = {"image_pixels": 300_000_000, "workers": 80}
    assert policy.ceilings == Ceilings(**asked)

    def pack(model: str, destination: Path) -> Path:
        return build_archive(folder, destination, model_name=model, options=options)

    told = stage(tmp_path / "server", ServedModel.of("greedy", archive), archive, pack, policy)
    assert (told.serving.workers, told.serving.budget.image_pixels) == (80, 300_000_000)
    with pytest.raises(CardError, match=r"workers 80, .* at most 64"):
        stage(tmp_path / "server", ServedModel.of("greedy", archive), archive, pack, Policy())


def test_the_command_refuses_in_one_line_and_starts_nothing(folder: Path, tmp_path: Path, programs: Programs) -> None:
    archive = packed(folder, tmp_path, {"budget": {"image_pixels": 1 << 40}})
    with zipfile.ZipFile(archive) as opened:
        assert json.loads(opened.read(SERVING_FILE))["budget"]["image_pixels"] == 1 << 40
    found = programs.run("serve", "run", str(archive), "--port", "0", "--store", str(tmp_path / "store"))
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert "asks for image_pixels 1_099_511_627_776, but this server allows at most 200_000_000" in found.stderr
