"""The handler in process, with TorchServe's own context: which execution it opens, and what it refuses."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ts.context import Context

from serve.options import ServingOptions
from serve.runtime.errors import CardError, EngineError
from serve.torchserve.archive import build_archive
from serve.torchserve.handler import ImageClassifierHandler
from tests.serve import artifacts

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def context_of(artifact: Path, tmp_path: Path, gpu: int | None, **options: Any) -> Context:
    """TorchServe's context for an unpacked archive of ``artifact``."""
    archive = build_archive(artifact, tmp_path / "x.mar", model_name="x", options=ServingOptions(**options))
    folder = tmp_path / "models" / "x"
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    config = yaml.safe_load((folder / "model-config.yaml").read_text())
    return Context("x", str(folder), {}, config["batchSize"], gpu, "0.12.0", True, None, config)


def opened(context: Context) -> ImageClassifierHandler:
    handler = ImageClassifierHandler()
    handler.initialize(context)
    return handler


@without_cuda
def test_on_a_machine_without_a_gpu_the_cpu_is_taken_and_nothing_is_said_of_the_gpu(tmp_path: Path) -> None:
    described = opened(context_of(artifacts.onnx(tmp_path / "artifact"), tmp_path, None)).describe_handle()
    assert (described["execution"], described["device"], described["passed_over"]) == ("openvino", "cpu", [])
    assert described["threads"] == len(os.sched_getaffinity(0))


@without_cuda
def test_a_gpu_that_is_assigned_and_does_not_work_is_passed_over_and_told(tmp_path: Path) -> None:
    described = opened(context_of(artifacts.onnx(tmp_path / "artifact"), tmp_path, 0)).describe_handle()
    assert (described["execution"], described["device"]) == ("openvino", "cpu")
    passed = {entry["execution"]: entry["reason"] for entry in described["passed_over"]}
    assert set(passed) >= {"onnxruntime-cuda"}
    assert set(passed.values()) == {"this machine has no usable CUDA device"}


@without_cuda
@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (0, r"onnxruntime-\w+: this machine has no usable CUDA device"),
        (None, r"onnxruntime-\w+: it runs on a GPU, and none was assigned here"),
    ],
)
def test_what_only_runs_on_a_gpu_fails_at_load_with_the_reason(gpu: int | None, reason: str, tmp_path: Path) -> None:
    for number, artifact in enumerate(
        (artifacts.onnx(tmp_path / "for-cuda", device="cuda"), artifacts.onnx(tmp_path / "any"))
    ):
        context = context_of(artifact, tmp_path / str(number), gpu, strict=True)
        with pytest.raises(EngineError, match=reason) as caught:
            opened(context)
        assert "openvino" not in str(caught.value)


def test_the_handler_obeys_serving_json_and_not_what_torchserve_says(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact", device="cpu")
    context = context_of(artifact, tmp_path, None, threads=1, engines=["onnxruntime"], batch_size=3)
    context.system_properties["batch_size"] = 7
    context.model_yaml_config = {"handler": {"threads": 2}}
    handler = opened(context)
    described = handler.describe_handle()
    assert (described["execution"], described["threads"], described["max_batch"]) == ("onnxruntime[threads=1]", 1, 3)
    assert described["provider"] == "onnxruntime/CPUExecutionProvider"


@pytest.mark.parametrize("name", ["model.pt", "handler.py", "serve/runtime/images.py", "model-config.yaml"])
def test_an_archive_whose_files_were_changed_is_refused(name: str, tmp_path: Path) -> None:
    context = context_of(artifacts.torchscript(tmp_path / "artifact"), tmp_path, None)
    changed = Path(context.system_properties["model_dir"]) / name
    changed.write_bytes(changed.read_bytes() + b"\n# changed\n")
    with pytest.raises(CardError, match=f"{name}: corrupted"):
        opened(context)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [artifacts.torchscript, artifacts.exported])
def test_an_assigned_gpu_is_used_and_answers_as_the_cpu_does(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions in full float32
    artifact = make(tmp_path / "artifact")
    on_gpu = opened(context_of(artifact, tmp_path / "gpu", 0))
    on_cpu = opened(context_of(artifact, tmp_path / "cpu", None))
    assert on_gpu.describe_handle()["device"] == "cuda:0"
    (here,), (there,) = (handler._opened().predict([artifacts.jpeg(1)]) for handler in (on_gpu, on_cpu))
    assert isinstance(here, list)
    assert isinstance(there, list)
    assert [label.index for label in here] == [label.index for label in there]
    assert [label.probability for label in here] == pytest.approx([label.probability for label in there], abs=1e-3)
