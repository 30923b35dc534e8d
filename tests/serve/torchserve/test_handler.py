"""The handler in process, with TorchServe's own context: which execution it opens, and what it refuses."""

from __future__ import annotations

import io
import json
import logging
import os
import struct
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image, UnidentifiedImageError
from ts.context import Context, RequestProcessor
from ts.protocol.otf_message_handler import create_predict_response

from benchmarks.hostile.pictures import encoded
from serve.common.options import ServingOptions
from serve.runtime.device.device_faults import is_lost, lacks_memory
from serve.runtime.errors import CardError, EngineError
from serve.runtime.outputs import Outputs
from serve.runtime.service.observation import Observation
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.handler import ImageClassifierHandler
from tests.programs import Programs
from tests.serve import artifacts

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def context_of(artifact: Path, tmp_path: Path, gpu: int | None, **options: Any) -> Context:
    """TorchServe's context for an unpacked archive of ``artifact``."""
    archive = build_archive(artifact, tmp_path / "x.mar", model_name="x", options=ServingOptions(**options))
    folder = tmp_path / "models" / "x"
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    config = yaml.safe_load((folder / "model-config.yaml").read_text())
    manifest = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_text())
    return Context("x", str(folder), manifest, config["batchSize"], gpu, "0.12.0", True, None, config)


class Metrics:
    """What the handler gives TorchServe to show, by name; and what was refused, by its kind."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.kinds: dict[str, float] = {}

    def add_metric(self, name: str, value: float, unit: str, dimensions: Any, metric_type: Any) -> None:
        assert unit in ("ms", "count")
        self.values[name] = self.values.get(name, 0) + value
        for dimension in dimensions:
            if dimension.name == "Kind":
                self.kinds[dimension.value] = value


def ask(handler: ImageClassifierHandler, context: Context, *bodies: Any, header: str = "body") -> list[tuple[int, Any]]:
    """A batch as TorchServe gives it, and what would be sent: statuses, and bodies as a client reads them."""
    context.request_processor = [RequestProcessor({header: {"content-type": "text/plain"}}) for _ in bodies]
    context.metrics = Metrics()
    context.stopping_criteria = None
    answers = handler.handle([{header: body} for body in bodies], context)
    handler.tell_metrics()
    sent = create_predict_response(answers, dict(enumerate("abcdefgh"[: len(bodies)])), "", 200, context=context)
    assert len(sent) > 0
    statuses = [context.get_response_status(index)[0] for index in range(len(bodies))]
    return [(status, json.loads(body)) for status, body in zip(statuses, answers, strict=True)]


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
        (None, r"onnxruntime-\w+: it needs a GPU, and none was assigned to this worker"),
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


class Told:
    """Labels of metrics as the handler writes them: by the metric's name."""

    def __init__(self) -> None:
        self.labels: dict[str, list[dict[str, str]]] = {}

    def add_metric(self, name: str, value: float, unit: str, dimensions: Any, metric_type: Any) -> None:
        found = {dimension.name: dimension.value for dimension in dimensions}
        self.labels.setdefault(name, []).append(found)


def test_no_label_of_a_metric_has_what_torchserve_parts_a_line_at(tmp_path: Path) -> None:
    context = context_of(
        artifacts.onnx(tmp_path / "artifact", device="cpu"),
        tmp_path,
        None,
        threads=1,
        buckets=(1, 2),
        options={"openvino": {"precision": "f33"}},
    )
    context.metrics = told = Told()
    handler = opened(context)
    (passed,) = told.labels["PassedOver"]
    assert list(passed) == ["ModelName", "ModelVersion", "Level", "Execution", "Reason"]  # in the order of metrics.yaml
    assert passed["Execution"] == "openvino[threads=1 buckets=1+2 precision=f33]"
    assert "Wrong value f33" in passed["Reason"]
    context.request_processor = [RequestProcessor({"body": {"content-type": "text/plain"}})]
    handler.handle([{"body": "{"}], context)
    handler.tell_metrics()
    (refused,) = told.labels["Refused"]
    assert refused["Execution"] == "onnxruntime[threads=1 buckets=1+2]"
    for labels in (passed, refused):
        assert not set("|,:\n") & set("".join(labels.values()))
        assert max(map(len, labels.values())) <= 200


def test_the_handler_obeys_serving_json_and_not_what_torchserve_says(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact", device="cpu")
    context = context_of(artifact, tmp_path, None, threads=1, engines=["onnxruntime"], batch_size=3)
    context.system_properties["batch_size"] = 7
    context.model_yaml_config = {"handler": {"threads": 2}}
    handler = opened(context)
    described = handler.describe_handle()
    assert (described["execution"], described["threads"], described["max_batch"]) == ("onnxruntime[threads=1]", 1, 3)
    assert described["provider"] == "onnxruntime/CPUExecutionProvider"


@pytest.mark.parametrize(
    "name", ["model.pt", "handler.py", "serve/runtime/images/image_preprocessing.py", "model-config.yaml"]
)
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
    (here,), (there,) = (handler._opened().predictor.predict([artifacts.jpeg(1)]) for handler in (on_gpu, on_cpu))
    assert isinstance(here, list)
    assert isinstance(there, list)
    assert [label.index for label in here] == [label.index for label in there]
    assert [label.probability for label in here] == pytest.approx([label.probability for label in there], abs=1e-3)


@pytest.fixture(scope="module")
def handler_and_context(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageClassifierHandler, Context]:
    folder = tmp_path_factory.mktemp("handler")
    context = context_of(artifacts.torchscript(folder / "artifact", device="cpu"), folder, None, k=2)
    return opened(context), context


def test_text_with_an_unpaired_surrogate_is_a_400_of_its_request_alone(
    handler_and_context: tuple[ImageClassifierHandler, Context],
) -> None:
    # A stock TorchServe decodes a body of JSON, which may be but a text.
    answers = ask(*handler_and_context, artifacts.jpeg(1), json.loads('"\\ud800"'), artifacts.jpeg(2))
    assert [status for status, _ in answers] == [200, 400, 200]
    assert "unpaired surrogate" in answers[1][1]["error"]


def test_a_field_named_by_an_unpaired_surrogate_is_a_400(
    handler_and_context: tuple[ImageClassifierHandler, Context],
) -> None:
    ((status, body),) = ask(*handler_and_context, artifacts.jpeg(1), header="\ud800")
    assert status == 400
    assert "web form" in body["error"]


def test_what_is_wrong_with_an_image_is_told_to_its_client_and_not_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = struct.Struct("<HHIH")  # of a pixel: tag 277, one short
    image = encoded(Image.new("RGB", (12, 9)), "TIFF").replace(samples.pack(277, 3, 1, 3), samples.pack(277, 3, 1, 515))
    with caplog.at_level(logging.WARNING, "PIL"):
        with pytest.raises(UnidentifiedImageError):
            Image.open(io.BytesIO(image))
        assert "samples per pixel" in caplog.text
        caplog.clear()
        context = context_of(artifacts.torchscript(tmp_path / "artifact", device="cpu"), tmp_path, None)
        ((status, _),) = ask(opened(context), context, image)
    assert status == 415
    assert "samples per pixel" not in caplog.text


def test_refused_requests_are_counted_in_a_batch_without_a_single_image(
    handler_and_context: tuple[ImageClassifierHandler, Context],
) -> None:
    handler, context = handler_and_context
    assert [status for status, _ in ask(handler, context, "{", "{}", "{")] == [400] * 3
    assert context.metrics.values == {"Images": 0, "Refused": 3}
    assert context.metrics.kinds == {"request-400": 3}
    ask(handler, context, b"no image", "{", artifacts.jpeg(1))
    values = context.metrics.values
    assert (values["Images"], values["Refused"], values["BatchSize"]) == (2, 2, 2)
    assert context.metrics.kinds == {"request-400": 1, "item-415": 1}
    stages = ("WaitTime", "DecodeTime", "PreprocessTime", "InferenceTime", "PostprocessTime")
    assert set(values) == {"Images", "Refused", "BatchSize", *stages}
    assert all(values[stage] > 0 for stage in stages[1:])


def test_a_part_of_a_form_that_is_named_as_what_the_frontend_says_costs_nobody_an_answer(
    handler_and_context: tuple[ImageClassifierHandler, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, context = handler_and_context
    ask(handler, context, "{")  # which sets the context up
    lines: list[Observation] = []
    monkeypatch.setattr(handler, "_log", lines.append)
    part, form = {"content-type": "image/jpeg"}, {"content-type": None}
    # A stock TorchServe puts parts among a request's headers; ours says the milliseconds there, as a text.
    given: list[dict[str, Any]] = [{}, {"serve:frontend-ms": form}, {"serve:frontend-ms": "12.5"}]
    context.request_processor = [RequestProcessor({"data": part, "x-request-id": "mine", **more}) for more in given]
    handler.handle([{"data": artifacts.jpeg(1), "serve:frontend-ms": b"x"} for _ in given], context)
    assert [context.get_response_status(index)[0] for index in range(3)] == [200] * 3
    assert [line.frontend_ms for line in lines] == [None, None, 12.5]


KINDS = {"item-415": 1, "request-400": 1}


def test_metrics_are_told_behind_the_answers_and_those_of_several_batches_together(
    handler_and_context: tuple[ImageClassifierHandler, Context],
) -> None:
    handler, context = handler_and_context
    ask(handler, context, "{")  # which sets the context up, and tells what came before
    context.metrics = Metrics()
    for bodies in ([artifacts.jpeg(1), b"no image", artifacts.jpeg(2)], [artifacts.jpeg(3), "{"]):
        context.request_processor = [RequestProcessor({"body": {"content-type": "text/plain"}}) for _ in bodies]
        handler.handle([{"body": body} for body in bodies], context)
    deadline = time.monotonic() + 20
    told = context.metrics.values
    while (told.get("Images"), told.get("Refused")) != (4, 2) or context.metrics.kinds != KINDS:
        assert time.monotonic() < deadline, told
        time.sleep(0.01)


def test_a_network_that_gives_no_number_is_a_500_of_that_image_that_says_so(tmp_path: Path) -> None:
    context = context_of(artifacts.torchscript(tmp_path / "artifact", device="cpu"), tmp_path, None)
    handler = opened(context)
    engine = handler._opened().predictor.engine

    class Overflowing:
        device, provider = engine.device, engine.provider

        def run(self, batch: torch.Tensor) -> Outputs:
            logits = engine.run(batch)[0].clone()
            dark = batch.flatten(1).std(dim=1) < 0.3
            logits[dark, 1] = float("nan")
            return (logits,)

    handler._opened().predictor.engine = Overflowing()
    black = encoded(Image.new("RGB", (40, 40)), "PNG")
    answers = ask(handler, context, artifacts.jpeg(1), black, artifacts.jpeg(2))
    assert [status for status, _ in answers] == [200, 500, 200]
    assert "NaN or infinity" in answers[1][1]["error"]
    assert context.metrics.values["Refused"] == 1


#: A worker's process, whose engine fails as CUDA does once it is asked for the second time.
BREAKING = """
import sys
from pathlib import Path
import torch
from serve.runtime.engines.base import EngineType, register
from serve.runtime.engines.torchscript import TORCHSCRIPT

error = {error}

class Engine:
    def __init__(self, engine):
        self.engine, self.device, self.provider = engine, engine.device, engine.provider
        self.asked = 0

    def run(self, batch):
        if served is not None:
            raise error
        return self.engine.run(batch)

def open_(folder, card, execution):
    return Engine(TORCHSCRIPT.open(folder, card, execution))

served = None
register(EngineType("breaking", formats=("torchscript",), open=open_, probe=lambda device: None, rank=1))

from tests.serve import artifacts
from tests.serve.torchserve.test_handler import ask, context_of, opened

folder = Path(sys.argv[1])
context = context_of(artifacts.torchscript(folder / "artifact", device="cpu"), folder, None, engines=["breaking"])
served = opened(context)
for _ in range(2):
    for status, body in ask(served, context, artifacts.jpeg(1), artifacts.jpeg(2)):
        print(status, body.get("error"), flush=True)
print("alive", flush=True)
"""


def run_breaking(programs: Programs, error: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "breaking_engine.py"  # a file, because an engine travels in the archive
    script.write_text(BREAKING.format(error=error))
    return programs.run(script, tmp_path, environment=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])})


def test_a_worker_whose_cuda_context_is_broken_ends(torch_begun: Programs, tmp_path: Path) -> None:
    said = "CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously reported"
    ended = run_breaking(torch_begun, f"RuntimeError('{said}')", tmp_path)
    assert ended.returncode == 1
    assert "alive" not in ended.stdout
    assert (
        "cpu can no longer be used by this process: RuntimeError: CUDA error: device-side assert triggered"
        in ended.stderr
    )
    assert "this worker stops" in ended.stderr


def test_a_worker_that_lacks_memory_says_so_and_lives(torch_begun: Programs, tmp_path: Path) -> None:
    lacking = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    ended = run_breaking(torch_begun, lacking, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("503 the server does not have enough memory") == 4
    assert "alive" in ended.stdout


# In the words of torch 2.14, ONNX Runtime 1.31 and TensorRT 10.
LOST = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=x ; file=y ; line=1",
    "CUDA failure 719: unspecified launch failure",
    "[TensorRT EP] IExecutionContext::enqueueV3: Cuda Runtime (an illegal memory access was encountered)",
    "cudaErrorIllegalAddress",
    "CUDA_ERROR_LAUNCH_FAILED",
]
NOT_LOST = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.00 GiB",
    "CUDA error: out of memory",
    "CUDA failure 2: out of memory ; GPU=0",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: invalid device ordinal",
    "shape mismatch: 7 and 700",
    "ECC",
]


@pytest.mark.parametrize("message", [*LOST, *NOT_LOST])
def test_errors_of_cuda_after_which_nothing_works_are_told_from_those_that_pass(message: str) -> None:
    assert is_lost(RuntimeError(message)) == (message in LOST)
    assert lacks_memory(RuntimeError(message)) == (message in NOT_LOST[:4])


def test_warming_up_costs_what_its_buckets_cost(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact", device="cpu")
    for name, options, sizes in (
        ("any", {"batch_size": 24}, [1, 2, 4, 8, 16, 24]),
        ("one", {"batch_size": 1}, [1]),
        ("buckets", {"batch_size": 6, "buckets": (1, 3, 6)}, [1, 3, 6]),
    ):
        context = context_of(artifact, tmp_path / name, None, engines=["onnxruntime"], **options)
        assert sorted(opened(context)._opened().predictor.seconds) == sizes
