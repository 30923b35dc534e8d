"""What a store holds of a run for serving: what was left by a server goes, and nothing else."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from serve.archive.archive_file import check_archive, with_version
from serve.common import layout
from serve.common.options import ServingOptions
from serve.packing.pack import repacking
from serve.runs import stored_runs
from serve.runs.sealed_files import faults, names, seal
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.errors import UserError
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts


def left_by_a_server(store: Path) -> Path:
    """A run of ``fuse`` alone, with the archive of an artifact that it had before; returns the archives' folder."""
    (store / ".store" / "locks").mkdir(parents=True)
    folder = store / "small" / "archives"
    folder.mkdir(parents=True)
    for name in ("small-fuse.mar", "small-onnx.mar"):
        (folder / name).write_bytes(b"an archive")
    rows = [{"name": "fuse", "archive": {"path": "x"}}, {"name": "ptq", "archive": None}]
    (store / "small" / "report.json").write_text(json.dumps({"rows": rows, "recommended": "fuse"}))
    seal(store / "small")
    return folder


def test_archives_that_were_kept_for_a_server_go_when_it_has_stopped(tmp_path: Path) -> None:
    folder = left_by_a_server(tmp_path)
    stored_runs.remove_left(tmp_path, "small")
    assert [path.name for path in folder.iterdir()] == ["small-fuse.mar"]
    assert faults(folder.parent, names(folder.parent)) == [], "the list has them no more"


def test_nothing_goes_while_the_run_is_being_made_again(tmp_path: Path) -> None:
    folder = left_by_a_server(tmp_path)
    with FileLock(tmp_path / ".store" / "locks" / "run-small"):
        stored_runs.remove_left(tmp_path, "small")
    assert len(list(folder.iterdir())) == 2


def test_without_a_report_nothing_is_known_to_be_left(tmp_path: Path) -> None:
    folder = left_by_a_server(tmp_path)
    (tmp_path / "small" / "report.json").write_text("{}")
    stored_runs.remove_left(tmp_path, "small")
    assert len(list(folder.iterdir())) == 2


def test_who_asks_for_cuda_is_served_by_it_first_and_who_asks_for_nothing_as_it_was_packed(tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "small" / "artifacts" / "script")
    (folder / "serving.json").write_text(Serving((Execution("torchscript"), Execution("torchscript", "cuda"))).text)
    selection = stored_runs.Selection({"small-script": tmp_path / "small" / "archives" / "small-script.mar"}, {}, "")
    assert repacking(tmp_path, selection, ServingOptions()) is None
    pack = repacking(tmp_path, selection, ServingOptions(k=2), "cuda")
    assert pack is not None
    pack("small-script", tmp_path / "own.mar")
    with zipfile.ZipFile(tmp_path / "own.mar") as archive:
        served = json.loads(archive.read("serving.json"))
    assert [entry["device"] for entry in served["executions"]] == ["cuda", "cpu"]
    assert served["k"] == 2


# --- what is served


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """Runs ``a`` (of which ``b-c`` is recommended) and ``a-b``, whose archives would have one name."""
    for run, artifact, device in (("a", "b-c", "any"), ("a", "gpu", "cuda"), ("a", "x", "any"), ("a-b", "c", "any")):
        folder = artifacts.torchscript(layout.artifact_folder(tmp_path, run, artifact), artifact, device)  # type: ignore[arg-type]
        path = layout.archive_path(tmp_path, run, artifact)
        build_archive(folder, path, model_name=path.stem)
    rows: list[dict[str, object]] = [{"name": name, "archive": {}} for name in ("b-c", "gpu", "x")]
    layout.report_path(tmp_path, "a").write_text(json.dumps({"rows": rows, "recommended": "b-c"}))
    seal(tmp_path / "a")
    return tmp_path


def chosen(store: Path, *words: str, artifacts: tuple[str, ...] = (), strict: bool = False) -> list[str]:
    targets = [stored_runs.find_target(word) for word in words]
    return list(stored_runs.select(store, targets, artifacts, "cpu", strict=strict).archives)


def test_a_run_is_served_by_what_it_recommends_and_by_others_where_they_are_named(two_runs: Path) -> None:
    assert chosen(two_runs, "a") == ["a-b-c"]
    assert chosen(two_runs, "a/x") == ["a-x"]
    assert chosen(two_runs, "a", artifacts=("x", "b-c")) == ["a-x", "a-b-c"]
    assert chosen(two_runs, "a", artifacts=("all",)) == ["a-b-c", "a-x"]
    assert chosen(two_runs, "a-b") == ["a-b-c"], "it has one only"
    assert chosen(two_runs, "a", "a/x", "mine=a-b/c", artifacts=("b-c",)) == ["a-b-c", "a-x", "mine"]
    found = stored_runs.select(two_runs, [stored_runs.find_target("a/x"), stored_runs.find_target("a")], device="cpu")
    assert found.default_model == "a-b-c", "the recommended one"


def test_what_this_machine_cannot_run_is_left_out_and_named_unless_nothing_else_is_asked_for(two_runs: Path) -> None:
    found = stored_runs.select(two_runs, [stored_runs.find_target("a")], ["gpu", "x"], "cpu")
    assert (list(found.archives), found.left_out) == (["a-x"], {"a-gpu": "it runs on CUDA only"})
    layout.archive_path(two_runs, "a", "b-c").write_bytes(b"no archive")
    found = stored_runs.select(two_runs, [stored_runs.find_target("a")], ["all"], "cpu")
    assert list(found.archives) == ["a-x"]
    assert "not an archive of this project" in found.left_out["a-b-c"]
    with pytest.raises(UserError, match=r"the models cannot be served here \(a/gpu: it runs on CUDA only\)"):
        chosen(two_runs, "a/gpu")
    with pytest.raises(UserError, match=r"some models cannot be served here \(a/gpu: it runs on CUDA only\)"):
        chosen(two_runs, "a/gpu", "a/x", strict=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "a-b"), "a/b-c and a-b/c would both be called a-b-c: give one another name, as in NAME=a-b/c"),
        (("a/y",), "there is no such archive; the archives of a are b-c, gpu, x"),
        (("mine=a-c",), "there is no run 'a-c' (did you mean a or a-b?)"),
    ],
)
def test_models_have_one_name_each_and_what_is_not_there_is_named(
    words: tuple[str, ...], message: str, two_runs: Path
) -> None:
    with pytest.raises(UserError) as caught:
        chosen(two_runs, *words)
    assert message in str(caught.value)


def test_a_run_that_recommends_nothing_asks_for_a_name(two_runs: Path) -> None:
    layout.report_path(two_runs, "a").unlink()
    (two_runs / "a" / layout.SEAL_FILE).unlink()
    with pytest.raises(UserError, match=r"choose one, such as a/b-c, or all with --artifact all; it has b-c, gpu, x"):
        chosen(two_runs, "a")


@pytest.mark.parametrize(
    ("word", "data", "target"),
    [
        ("resnet18", None, ("resnet18", None, None)),
        ("resnet18/onnx-int8", None, ("resnet18", "onnx-int8", None)),
        ("photos=resnet18/onnx-int8", None, ("resnet18", "onnx-int8", "photos")),
        ("path/to/net.py:build", None, ("net-build", None, None)),
        ("path/to/net.py:build/ptq", None, ("net-build", "ptq", None)),
        ("mine=net.py:build/ptq", "cifar10", ("net-build-cifar10", "ptq", "mine")),
        ("resnet18/ptq", "cifar10", ("resnet18-cifar10", "ptq", None)),
    ],
)
def test_a_word_of_the_command_line_names_a_run_its_artifact_and_the_model(
    word: str, data: str | None, target: tuple[str, str | None, str | None]
) -> None:
    assert stored_runs.find_target(word, data) == stored_runs.Target(*target)


def test_another_version_of_an_archive_differs_from_it_by_that_alone(two_runs: Path, tmp_path: Path) -> None:
    original = layout.archive_path(two_runs, "a", "x")
    second = with_version(original, "7.0", tmp_path / "second.mar")
    assert check_archive(second).files == check_archive(original).files
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(second) as new:
        assert sorted(old.namelist()) == sorted(new.namelist())
        differing = {name for name in old.namelist() if old.read(name) != new.read(name)}
        assert differing == {"MAR-INF/MANIFEST.json", "card.json"}
        assert json.loads(new.read("MAR-INF/MANIFEST.json"))["model"]["modelVersion"] == "7.0"
