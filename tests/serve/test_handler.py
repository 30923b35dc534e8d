"""The handler in process, with TorchServe's own context: devices, providers and fall-backs."""

from __future__ import annotations

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
from serve.torchserve.handler import ImageClassifierHandler, assigned_device
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


@pytest.mark.parametrize(
    ("gpu", "runs_on", "device"),
    [(None, "any", "cpu"), (None, "cpu", "cpu"), (None, "cuda", "cuda"), (0, "any", "cuda:0"), (3, "cuda", "cuda:3")],
)
def test_the_device_is_the_one_that_torchserve_assigns(gpu: int | None, runs_on: str, device: str) -> None:
    assert assigned_device(gpu, runs_on) == torch.device(device)


@without_cuda
@pytest.mark.parametrize(("gpu", "device"), [(0, "any"), (None, "cuda")])
def test_an_onnx_artifact_without_its_provider_fails_with_the_reason(
    gpu: int | None, device: Any, tmp_path: Path
) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact", device=device)
    with pytest.raises(EngineError, match="no usable CUDA device"):
        opened(context_of(artifact, tmp_path, gpu))


@without_cuda
def test_a_fallback_that_is_allowed_is_taken_and_told(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact")
    handler = opened(context_of(artifact, tmp_path, 0, allow_fallback=True))
    described = handler.describe_handle()
    assert described["execution"] == "openvino"
    assert described["device"] == "cpu"


@without_cuda
def test_a_fallback_is_no_way_to_run_what_is_for_cuda_only(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact", device="cuda")
    with pytest.raises(EngineError, match="runs on cuda only"):
        opened(context_of(artifact, tmp_path, None, allow_fallback=True))


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
def test_an_assigned_gpu_is_used_and_answers_as_the_cpu_does(make: Any, tmp_path: Path) -> None:
    artifact = make(tmp_path / "artifact")
    on_gpu = opened(context_of(artifact, tmp_path / "gpu", 0))
    on_cpu = opened(context_of(artifact, tmp_path / "cpu", None))
    assert on_gpu.describe_handle()["device"] == "cuda:0"
    (here,), (there,) = (handler._opened().predict([artifacts.jpeg(1)]) for handler in (on_gpu, on_cpu))
    assert isinstance(here, list)
    assert isinstance(there, list)
    assert [label.index for label in here] == [label.index for label in there]
    assert [label.probability for label in here] == pytest.approx([label.probability for label in there], abs=1e-3)
