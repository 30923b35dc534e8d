"""An archive is complete, minimal, and the same whenever it is built."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from optimize.measure.chosen_executions import wanted_executions
from optimize.store.sources import closure
from serve.archive.archive_file import MANIFEST_FILE, check_archive, serving_in
from serve.common.options import ServingOptions
from serve.runtime.card.budget import SERVING, Budget
from serve.runtime.card.card import load_card, sha256_file, write_card
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.errors import CardError, EngineError, UserError
from serve.runtime.service.predictor import Predictor
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts


def test_two_builds_are_byte_identical(folders: dict[str, Path], tmp_path: Path) -> None:
    first = build_archive(folders["int8"], tmp_path / "a" / "x.mar", model_name="small-int8")
    os.utime(folders["int8"] / "model.pt", (1_000_000_000, 1_000_000_000))
    second = build_archive(folders["int8"], tmp_path / "b" / "x.mar", model_name="small-int8")
    assert first.read_bytes() == second.read_bytes()


def test_an_archive_holds_what_is_needed_to_serve_and_nothing_else(folders: dict[str, Path], tmp_path: Path) -> None:
    path = build_archive(folders["script"], tmp_path / "x.mar", model_name="small-script")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
        assert json.loads(archive.read("index_to_name.json")) == {str(i): c for i, c in enumerate(artifacts.CLASSES)}
    assert {"card.json", "model.pt", "handler.py", "model-config.yaml", "serve/__init__.py"} <= names
    assert "serve/runtime/service/predictor.py" in names
    assert "weights.safetensors" not in names
    assert not any(name.startswith(("serve/cli", "optimize", "/")) for name in names)
    assert manifest["model"] == {
        "modelName": "small-script",
        "serializedFile": "model.pt",
        "handler": "handler.py",
        "modelVersion": "1.0",
        "configFile": "model-config.yaml",
    }


def test_all_that_the_handler_and_the_runtime_import_of_the_project_travels(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    path = build_archive(folders["script"], tmp_path / "x.mar", model_name="small-script")
    with zipfile.ZipFile(path) as archive:
        modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in archive.namelist()}
    needed = closure("serve.torchserve.handler", "serve.runtime.service.predictor", "serve.runtime.engines.torchscript")
    tasks = {name for name in modules if name.startswith("serve.runtime.tasks.")}
    assert tasks == {"serve.runtime.tasks.base", "serve.runtime.tasks.classification"}
    others = {name for name in needed if name.startswith("serve.runtime.tasks.")} - tasks
    assert needed - others - {"serve.torchserve.handler"} <= modules


def test_an_unpacked_archive_is_a_whole_artifact(folders: dict[str, Path], tmp_path: Path) -> None:
    path = build_archive(folders["script"], tmp_path / "x.mar", model_name="small-script")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unpacked")
    card = load_card(tmp_path / "unpacked")
    assert card.files == {"model.pt": sha256_file(folders["script"] / "model.pt")}
    assert card == check_archive(path)
    assert len(Predictor(tmp_path / "unpacked").predict([artifacts.jpeg()], 2)[0]) == 2  # type: ignore[arg-type]


def test_onnx_weights_kept_beside_the_graph_travel(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "artifact")
    (folder / "model.onnx.data").write_bytes(b"weights")
    artifacts.write_artifact(folder, "onnx", "onnx", "model.onnx", extra=("model.onnx.data",))
    path = build_archive(folder, tmp_path / "x.mar", model_name="x")
    assert "model.onnx.data" in zipfile.ZipFile(path).namelist()


def packed_with(folder: Path, target: Path, **options: Any) -> dict[str, Any]:
    """An archive's ``serving.json`` and ``model-config.yaml``."""
    path = build_archive(folder, target / "x.mar", model_name="x", options=ServingOptions(**options))
    with zipfile.ZipFile(path) as archive:
        return {
            "serving": json.loads(archive.read("serving.json")),
            "torchserve": yaml.safe_load(archive.read("model-config.yaml")),
        }


def test_the_options_are_written_where_torchserve_and_the_handler_read_them(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "artifact", device="cpu")
    found = packed_with(
        folder,
        tmp_path,
        batch_size=4,
        max_batch_delay_ms=7,
        decode_threads=3,
        decoder="reduced",
        workers=2,
        k=1,
        threads=1,
        budget=Budget(1000),
        engines=["onnxruntime"],
        options={"openvino": {"precision": "bf16"}},
        buckets=[1, 4],
        strict=True,
        instance_limit=9,
        response_timeout_s=8,
    )
    usual = {"device": "cpu", "threads": 1, "buckets": [1, 4]}
    assert found["serving"] == {
        "schema": 1,
        "evidence": [],
        "executions": [
            {"engine": "onnxruntime", "options": {}, **usual},
            {"engine": "openvino", "options": {"precision": "bf16"}, **usual},
        ],
        "strict": True,
        "workers": 2,
        "batch_size": 4,
        "max_batch_delay_ms": 7,
        "decode_threads": 3,
        "queue_limit": 256,
        "decoder": "reduced",
        "response_timeout_s": 8,
        "startup_timeout_s": 600,
        "k": 1,
        "accept": "",
        "instance_limit": 9,
        "budget": {
            "image_pixels": 1000,
            "jpeg_scans": 100,
            "image_seconds": 5.0,
            "request_pixels": None,
            "batch_pixels": None,
            "request_seconds": None,
            "batch_seconds": None,
        },
    }
    assert found["torchserve"] == {
        "minWorkers": 2,
        "maxWorkers": 2,
        "batchSize": 8,  # two of the network's
        "maxBatchDelay": 7,
        "responseTimeout": 8,
        "startupTimeout": 600,
        "deviceType": "cpu",
    }


def test_where_nothing_was_measured_every_execution_is_named_and_those_on_a_gpu_come_first(tmp_path: Path) -> None:
    found = packed_with(artifacts.torchscript(tmp_path / "artifact"), tmp_path)
    order = [(entry["engine"], entry["device"]) for entry in found["serving"]["executions"]]
    assert order == [("torchscript", "cuda"), ("torchscript", "cpu")]
    assert "deviceType" not in found["torchserve"], "TorchServe assigns a GPU where there is one"


def test_an_archive_that_only_its_first_execution_may_run_asks_for_that_device(tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "artifact")
    on_gpu = packed_with(folder, tmp_path, strict=True)
    assert on_gpu["torchserve"]["deviceType"] == "gpu"
    on_cpu = packed_with(folder, tmp_path, strict=True, engines=["torchscript[cpu]"])
    assert on_cpu["torchserve"]["deviceType"] == "cpu"


def test_what_lies_beside_the_card_is_served_so_and_options_change_what_they_name(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "artifact", device="cpu")
    kept = Serving((Execution("onnxruntime", threads=2), Execution("openvino")), k=2, workers=3)
    (folder / "serving.json").write_text(kept.text)
    assert packed_with(folder, tmp_path)["serving"] == json.loads(kept.text)
    changed = packed_with(folder, tmp_path, k=4, threads=None)["serving"]
    assert changed["executions"][0] == {
        "engine": "onnxruntime",
        "device": "cpu",
        "threads": None,
        "buckets": [],
        "options": {},
    }
    assert (changed["k"], changed["workers"]) == (4, 3)


def test_how_an_artifact_is_served_changes_its_archive_and_is_answered_for_by_the_card(tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "artifact", device="cpu")
    one = build_archive(folder, tmp_path / "1.mar", model_name="x")
    other = build_archive(folder, tmp_path / "2.mar", model_name="x", options=ServingOptions(threads=1))
    differing = {name for name, content in contents(one).items() if contents(other)[name] != content}
    assert differing == {"serving.json", "card.json"}
    assert check_archive(other).packed["serving.json"] == hashlib.sha256(contents(other)["serving.json"]).hexdigest()


def test_what_this_machine_cannot_run_is_packed_for_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifacts.int8(tmp_path / "artifact")
    write_card(folder, dataclasses.replace(load_card(folder), target="x86-vnni"))
    monkeypatch.setattr("serve.runtime.device.cpu_integers.has_vnni", lambda: False)
    for refused in (Predictor, lambda folder: wanted_executions(load_card(folder), ["cpu"], None, needed=False)):
        with pytest.raises(EngineError, match="this CPU has none"):
            refused(folder)
    found = packed_with(folder, tmp_path, threads=1)["serving"]["executions"]
    assert [(entry["engine"], entry["threads"]) for entry in found] == [("torchscript", 1)]


@pytest.mark.parametrize(
    ("execution", "said"),
    [
        (
            Execution("openvino"),
            "cannot be served by openvino: openvino opens onnx and openvino files, not torchscript",
        ),
        (Execution("torchscript", "cuda"), r"cannot be served by torchscript\[cuda\]: this artifact runs on cpu only"),
        (Execution("torchscript", options={"speed": 2}), "torchscript has no option 'speed'"),
        (Execution("torchscrip"), "unknown engine 'torchscrip' .did you mean torchscript"),
    ],
)
def test_an_execution_that_cannot_be_of_the_artifact_is_not_packed(
    execution: Execution, said: str, tmp_path: Path
) -> None:
    folder = artifacts.torchscript(tmp_path / "artifact", device="cpu")
    (folder / "serving.json").write_text(Serving((execution,)).text)
    with pytest.raises(UserError, match=said):
        build_archive(folder, tmp_path / "x.mar", model_name="x")
    assert not (tmp_path / "x.mar").exists()


def test_a_budget_that_names_one_limit_keeps_the_other_defaults() -> None:
    options = ServingOptions.model_validate({"budget": {"image_pixels": 5}})
    assert options.budget == dataclasses.replace(SERVING, image_pixels=5)


@pytest.mark.parametrize(
    "budget", [{"image_pixels": 0}, {"pixels": 1}, {"image_pixels": "many"}, {"batch_seconds": -1}]
)
def test_a_budget_that_means_nothing_is_refused(budget: dict[str, object]) -> None:
    with pytest.raises((ValidationError, UserError), match=next(iter(budget))):
        ServingOptions.model_validate({"budget": budget})


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "naïve", "a=b", "a,b"])
def test_a_name_that_torchserve_would_refuse_is_refused(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot name a served model"):
        build_archive(folders["script"], tmp_path / "x.mar", model_name=name)


def test_a_corrupted_artifact_is_not_packed_and_leaves_nothing(tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "artifact")
    (folder / "model.pt").write_bytes(b"other")
    with pytest.raises(CardError, match="corrupted"):
        build_archive(folder, tmp_path / "out" / "x.mar", model_name="x")
    assert not (tmp_path / "out").exists()


def test_an_archive_is_replaced_at_once_and_no_temporary_file_stays(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    path.write_bytes(b"old")
    build_archive(folders["script"], path, model_name="x")
    assert zipfile.is_zipfile(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.mar"]


def test_a_destination_that_cannot_be_written_is_a_users_mistake(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        build_archive(folders["script"], tmp_path / "file" / "x.mar", model_name="x")


# --- what the card of an archive answers for


@pytest.fixture
def packed(folders: dict[str, Path], tmp_path: Path) -> Path:
    return build_archive(folders["script"], tmp_path / "x.mar", model_name="x")


def contents(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def rewritten(entries: dict[str, bytes], tmp_path: Path) -> tuple[Path, Path]:
    """An archive of these entries, and the folder that it is unpacked to."""
    archive, folder = tmp_path / "changed.mar", tmp_path / "changed"
    with zipfile.ZipFile(archive, "w") as opened:
        for name, content in entries.items():
            opened.writestr(name, content)
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    return archive, folder


def test_a_whole_archive_passes_its_own_check(packed: Path, tmp_path: Path) -> None:
    card = check_archive(packed)
    assert set(contents(packed)) == {"card.json", *card.files, *card.packed}
    assert {"handler.py", "serve/runtime/service/predictor.py", "model-config.yaml"} <= set(card.packed)
    _, folder = rewritten(contents(packed), tmp_path)
    (folder / "serve" / "__pycache__").mkdir()
    (folder / "serve" / "__pycache__" / "x.pyc").write_bytes(b"")  # as Python leaves it
    assert load_card(folder) == card


def test_one_changed_byte_of_any_packed_file_is_found_and_named(packed: Path, tmp_path: Path) -> None:
    entries = contents(packed)
    assert len(entries) > 15
    for name, content in entries.items():
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else b" "
        archive, folder = rewritten({**entries, name: changed}, tmp_path)
        with pytest.raises(CardError, match=re.escape(name)):
            check_archive(archive)
        with pytest.raises(CardError, match=re.escape(name)):
            Predictor(folder)


@pytest.mark.parametrize("name", ["torch.py", "serve/runtime/json.py", "MAR-INF/x", "../x", "serve/__pycache__/x.pyc"])
def test_a_file_that_was_added_to_an_archive_is_found_and_named(name: str, packed: Path, tmp_path: Path) -> None:
    """A module beside the handler is imported in the place of the library of that name."""
    archive, folder = rewritten({**contents(packed), name: b""}, tmp_path)
    with pytest.raises(CardError, match=re.escape(name)):
        check_archive(archive)
    if "__pycache__" not in name and ".." not in name:
        with pytest.raises(CardError, match=re.escape(name)):
            load_card(folder)


def test_a_file_that_was_removed_or_doubled_is_found_and_named(packed: Path, tmp_path: Path) -> None:
    entries = contents(packed)
    archive, folder = rewritten(
        {k: v for k, v in entries.items() if k != "serve/runtime/images/image_preprocessing.py"}, tmp_path
    )
    with pytest.raises(CardError, match=r"serve/runtime/images/image_preprocessing\.py"):
        check_archive(archive)
    with pytest.raises(CardError, match=r"serve/runtime/images/image_preprocessing\.py"):
        load_card(folder)
    with zipfile.ZipFile(packed, "a") as opened, pytest.warns(UserWarning, match="Duplicate"):
        opened.writestr("handler.py", entries["handler.py"])
    with pytest.raises(CardError, match=r"handler\.py twice"):
        check_archive(packed)


def test_instructions_that_unpack_to_more_than_they_may_have_are_not_read(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.mar"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as opened, opened.open("serving.json", "w") as stream:
        for _ in range(64):
            stream.write(b" " * (1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CardError, match=r"serving\.json has 67108864 bytes"):
            serving_in(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_damaged_archive_is_a_card_error(packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    for position in range(0, len(data), len(data) // 150):
        packed.write_bytes(bytes(data[:position]) + bytes([data[position] ^ 0xFF]) + bytes(data[position + 1 :]))
        with contextlib.suppress(CardError):
            check_archive(packed)
    with zipfile.ZipFile(packed, "w") as opened:
        opened.writestr(MANIFEST_FILE, "[]")
    for damaged in (packed.read_bytes(), b""):
        packed.write_bytes(damaged)
        with pytest.raises(CardError, match="not an archive of this project"):
            check_archive(packed)
