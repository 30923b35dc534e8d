"""Which of an archive's executions is opened where the first one does not work, by the packed runtime alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from serve.common.options import ServingOptions
from serve.runtime.card.execution import ENVIRONMENT
from serve.torchserve.archive_builder import build_archive
from tests.programs import Programs, begun
from tests.serve import artifacts
from tests.test_extension import install

#: As TorchServe starts a worker: only what lies in the archive, and of the libraries not those that are named.
SERVE_UNPACKED = """
import json, logging, os, sys
folder, missing = sys.argv[1], sys.argv[2].split(",")
assert not {name.partition(".")[0] for name in sys.modules} & {"serve", *missing}

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
sys.path.insert(0, folder)
logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)
from types import SimpleNamespace
import handler as archived
import torch

served = archived.ImageClassifierHandler()
served.initialize(SimpleNamespace(system_properties={"model_dir": folder, "gpu_id": None}, metrics=None))
import serve
assert serve.__file__.startswith(folder), serve.__file__
labels = served._opened().predictor.predict([open(sys.argv[3], "rb").read()], 5)[0]
answer = {label.label: label.probability for label in labels}
print(json.dumps(served.describe_handle() | {"answer": answer, "torch_threads": torch.get_num_threads()}))
"""


class Opening(Protocol):
    """What a process says of an unpacked archive, and its log; ``code`` is the one that it ends with."""

    def __call__(self, archive: Path, missing: str, code: int = 0) -> tuple[dict[str, Any], str]: ...


def opening(programs: Programs) -> Opening:
    def opened(archive: Path, missing: str, code: int = 0) -> tuple[dict[str, Any], str]:
        folder = archive.with_suffix("")
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder / "x")
        image = folder / "image.jpg"
        image.write_bytes(artifacts.jpeg(1))
        ended = programs.run("-c", SERVE_UNPACKED, folder / "x", missing, image, cwd=folder, environment=stock())
        assert ended.returncode == code, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1]) if code == 0 else {}, ended.stderr

    return opened


def stock() -> dict[str, str]:
    """The variables of a process that knows nothing of this project."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", *ENVIRONMENT}}


@pytest.fixture(scope="module")
def opened() -> Iterator[Opening]:
    """By a process that was forked from one with torch in it: its import is most of what a process takes to begin."""
    with begun("torch", environment=stock(), isolated=True) as programs:
        yield opening(programs)


@pytest.fixture
def opened_afresh() -> Iterator[Opening]:
    """By a process that imports everything itself: torch has the threads that it finds when it is imported."""
    with begun(environment=stock(), isolated=True) as programs:
        yield opening(programs)


def archived(tmp_path: Path, **options: Any) -> Path:
    folder = artifacts.onnx(tmp_path / "artifact", device="cpu")
    return build_archive(folder, tmp_path / "x.mar", model_name="x", options=ServingOptions(**options))


def test_where_the_first_engine_is_not_installed_the_next_one_answers_the_same_and_says_why(
    opened: Opening, tmp_path: Path
) -> None:
    archive = archived(tmp_path)
    usual, log = opened(archive, "")
    assert (usual["execution"], usual["passed_over"]) == ("openvino", [])
    assert "runs with openvino (openvino/CPU" in log
    # What a stock TorchServe has of ours is torch, torchvision and onnxruntime.
    told, log = opened(archive, "openvino,pydantic,typer,onnx,optimize,yaml")
    assert told["execution"] == "onnxruntime"
    assert told["provider"] == "onnxruntime/CPUExecutionProvider"
    reason = "openvino does not run here: ModuleNotFoundError: No module named 'openvino'"
    assert told["passed_over"] == [{"execution": "openvino", "reason": reason}]
    assert f"passed over openvino: {reason}" in log
    assert told["answer"] == pytest.approx(usual["answer"], abs=1e-4)


def test_a_strict_archive_fails_at_load_where_its_first_engine_is_not_installed(
    opened: Opening, tmp_path: Path
) -> None:
    archive = archived(tmp_path, strict=True)
    assert opened(archive, "")[0]["execution"] == "openvino"
    _, log = opened(archive, "openvino", code=1)
    last = log.strip().splitlines()[-1]
    assert "EngineError" in last
    assert "serving.json is strict" in last
    assert "openvino does not run here: ModuleNotFoundError: No module named 'openvino'" in last


def test_where_none_works_each_is_named_with_its_reason(opened: Opening, tmp_path: Path) -> None:
    _, log = opened(archived(tmp_path), "openvino,onnxruntime", code=1)
    last = log.strip().splitlines()[-1]
    assert "openvino: openvino does not run here" in last
    assert "onnxruntime: onnxruntime does not run here: ModuleNotFoundError: No module named 'onnxruntime'" in last


def test_an_engine_that_is_installed_and_does_not_run_is_passed_over_like_one_that_is_not(
    opened: Opening, tmp_path: Path
) -> None:
    told, _ = opened(archived(tmp_path, options={"openvino": {"precision": "f33"}}), "")
    assert told["execution"] == "onnxruntime"
    (passed,) = told["passed_over"]
    assert passed["execution"] == "openvino[precision=f33]"
    assert "Wrong value f33 for property key INFERENCE_PRECISION_HINT" in passed["reason"]


def test_torchs_threads_are_those_of_the_engine_that_was_opened(opened_afresh: Opening, tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "artifact", device="cpu")
    archive = build_archive(folder, tmp_path / "x.mar", model_name="x", options=ServingOptions(threads=3))
    told, log = opened_afresh(archive, "")
    assert (told["execution"], told["threads"], told["torch_threads"]) == ("torchscript[threads=3]", 3, 3)
    # As a stock TorchServe starts it; see `unset`.
    assert "script: speeds were measured with GOMP_SPINCOUNT=10000, which is not set here" in log
    on_openvino, log = opened_afresh(archived(tmp_path / "onnx", threads=2), "")
    assert (on_openvino["threads"], on_openvino["torch_threads"]) == (2, 1)
    assert "GOMP_SPINCOUNT" not in log


SPECIAL_ENGINE = """
import special_library

from serve.runtime.engines.base import EngineType, register
from serve.runtime.engines.torchscript import TORCHSCRIPT


def _open(folder, card, execution):
    return TORCHSCRIPT.open(folder, card, execution)


register(EngineType("special", formats=("torchscript",), open=_open, probe=lambda device: None, rank=1))
"""


def test_an_engine_from_outside_whose_library_is_not_installed_is_passed_over(opened: Opening, tmp_path: Path) -> None:
    artifact = artifacts.torchscript(tmp_path / "artifact", device="cpu")
    there = install(tmp_path, "special_engine", "serve.engines", SPECIAL_ENGINE)
    (tmp_path / "special_library.py").write_text("")
    pack = "import sys; from pathlib import Path; from serve.torchserve.archive_builder import build_archive as build; "
    pack += "build(Path(sys.argv[1]), Path(sys.argv[2]), model_name='x')"
    archive = tmp_path / "x.mar"
    subprocess.run([sys.executable, "-c", pack, artifact, archive], env=there, check=True, timeout=120)
    told, _ = opened(archive, "")
    assert told["execution"] == "torchscript"
    (passed,) = told["passed_over"]
    assert passed["execution"] == "special"
    assert "special_engine.py needs special_library" in passed["reason"]
