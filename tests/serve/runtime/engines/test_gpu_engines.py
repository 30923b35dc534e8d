"""The engines on a GPU: what they answer, what they refuse, and what they leave behind. All of it needs one."""

from __future__ import annotations

import gc
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution
from serve.runtime.device.buckets import StaticBatches
from serve.runtime.device.cuda_graphs import CudaGraphs
from serve.runtime.device.device_turns import turn_at
from serve.runtime.engines.base import Engine, executions_for, open_engine, unavailable
from serve.runtime.errors import EngineError
from serve.runtime.model_files.onnx_session import assignment
from serve.runtime.model_files.program_file import load_program
from serve.runtime.service.predictor import Predictor
from tests.serve import artifacts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
SHAPE = (3, 32, 32)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Convolutions of float32 in full, as products are, so that one bound holds; a cache of the test's own."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    gc.collect()
    torch.cuda.empty_cache()


def folder_of(tmp_path: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    return artifacts.exported(tmp_path / f"exported-{seed}-{dtype}", seed=seed, dtype=dtype)


def opened(folder: Path, engine: str, *buckets: int, **options: Any) -> Engine:
    return open_engine(folder, load_card(folder), Execution(engine, "cuda", buckets=buckets, options=options))


def wanted(batch: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """In float64 on the CPU, from the module that the artifacts were made of."""
    with torch.no_grad():
        logits: torch.Tensor = artifacts.small_network(seed).double()(batch.double())
    return logits


def close(found: torch.Tensor, batch: torch.Tensor, bound: float = 1e-4, seed: int = 0) -> None:
    expected = wanted(batch, seed)
    assert found.device.type == "cuda"
    assert found.shape == expected.shape
    assert (found.double().cpu() - expected).abs().max() <= bound * expected.abs().max()


def needs(engine: str) -> None:
    if (reason := unavailable(engine, "cuda")) is not None:
        pytest.skip(reason)


def test_torchs_own_engines_work_here_by_their_probes() -> None:
    assert [unavailable(name, "cuda") for name in ("torchscript", "exported", "torch-cudagraph")] == [None] * 3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Inductor needs Triton")
def test_inductor_works_here_by_its_probe() -> None:
    assert unavailable("inductor", "cuda") is None


# --- torch-cudagraph


def test_a_graph_is_captured_in_a_turn_of_its_own(tmp_path: Path) -> None:
    folder, found = folder_of(tmp_path), []
    opening = threading.Thread(target=lambda: found.append(opened(folder, "torch-cudagraph", 1)))
    with turn_at(CUDA):
        opening.start()
        opening.join(5)
        assert found == []
    opening.join(60)
    assert len(found) == 1


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("search", [True, False])
def test_a_replay_is_the_network_for_every_batch(channels_last: bool, search: bool, tmp_path: Path) -> None:
    engine = opened(folder_of(tmp_path), "torch-cudagraph", 1, 2, 4, 8, channels_last=channels_last, search=search)
    assert engine.provider == ("cudagraph/channels_last" if channels_last else "cudagraph/contiguous_format")
    batches = [torch.randn(count, *SHAPE) for count in (*range(1, 10), 16, 17, 3, 1)]
    with torch.inference_mode():
        found = [engine.run(batch.cuda()) for batch in batches]
    # Looked at after all of them: an answer that the next replay overwrote would be another's.
    for batch, (logits,) in zip(batches, found, strict=True):
        close(logits, batch)


def test_answers_outside_of_inference_mode_and_on_another_stream_are_the_same(tmp_path: Path) -> None:
    with torch.inference_mode():
        engine = opened(folder_of(tmp_path), "torch-cudagraph", 2)
    batch = torch.randn(3, *SHAPE)
    close(engine.run(batch.cuda())[0], batch)
    stream: Any = torch.cuda.Stream()
    on_device = batch.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        (logits,) = engine.run(on_device)
    stream.synchronize()
    close(logits, batch)


def test_two_engines_in_one_process_do_not_share_memory(tmp_path: Path) -> None:
    engines = [opened(folder_of(tmp_path, seed), "torch-cudagraph", 1, 4) for seed in (0, 1)]
    for count in (1, 3, 4, 6):
        batch = torch.randn(count, *SHAPE)
        with torch.inference_mode():
            found = [engine.run(batch.cuda()) for engine in (*engines, *engines)]
        for index, (logits,) in enumerate(found):
            close(logits, batch, seed=index % 2)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.01), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("engine", ["exported", "torch-cudagraph", "inductor"])
def test_sixteen_bits_agree_with_float32(engine: str, dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    needs(engine)
    found = opened(folder_of(tmp_path, dtype=dtype), engine)
    batch = torch.rand(64, *SHAPE)
    with torch.inference_mode():
        (logits,) = found.run(batch.to(CUDA, dtype))
    assert logits.dtype == dtype
    close(logits, batch, bound)
    expected = wanted(batch)
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * bound * expected.abs().max()
    assert clear.any()
    assert torch.equal(logits.float().cpu().argmax(1)[clear], expected.argmax(1)[clear])


def capture(call: Callable[[torch.Tensor], torch.Tensor]) -> CudaGraphs:
    return CudaGraphs(call, StaticBatches((1, 2), SHAPE, torch.float32, CUDA), CUDA, "net")


def test_what_cannot_be_captured_is_refused_and_the_device_still_works() -> None:
    with pytest.raises(EngineError, match="net: cannot be captured as a CUDA graph at batch 2: "):
        capture(lambda x: x.flatten(1) * float(x.sum()))  # looks at the data on the host
    batch = torch.randn(2, *SHAPE, device=CUDA)
    assert torch.equal(capture(lambda x: x.flatten(1) * 2).run(batch)[0], batch.flatten(1) * 2)


def test_what_does_not_run_on_the_device_is_told_apart_from_what_cannot_be_captured() -> None:
    with pytest.raises(EngineError, match=r"net: does not run on cuda.* at batch 2: "):
        capture(lambda x: x.flatten(1) @ torch.zeros(7, 7, device=CUDA))


def test_what_a_graph_does_not_record_is_seen() -> None:
    calls = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.flatten(1) * len(calls)

    with pytest.raises(EngineError, match="gives other outputs than the network itself"):
        capture(counting)


# --- inductor


@pytest.mark.slow
@pytest.mark.parametrize(("buckets", "graphs"), [((), False), ((1, 4), False), ((1, 4), True)])
def test_compiled_code_answers_as_the_network(buckets: tuple[int, ...], graphs: bool, tmp_path: Path) -> None:
    needs("inductor")
    folder = folder_of(tmp_path)
    engine = opened(folder, "inductor", *buckets, cudagraph=graphs)
    assert engine.provider == ("aotinductor/cuda/cudagraph" if graphs else "aotinductor/cuda")
    for count in (1, 2, 4, 5, 9):
        batch = torch.randn(count, *SHAPE)
        with torch.inference_mode():
            close(engine.run(batch.cuda())[0], batch, 1e-3)
            last = batch.cuda().contiguous(memory_format=torch.channels_last)
            close(engine.run(last)[0], batch, 1e-3)
    assert {path.name for path in folder.iterdir()} == {"model.pt2", "card.json"}


# --- ONNX Runtime


@pytest.mark.parametrize("options", [{}, {"channels_last": True}, {"search": False}])
def test_the_cuda_provider_runs_the_whole_graph(options: dict[str, bool], tmp_path: Path) -> None:
    needs("onnxruntime-cuda")
    engine: Any = opened(artifacts.onnx(tmp_path / "onnx"), "onnxruntime-cuda", tf32=False, **options)
    assert engine.provider == "onnxruntime/CUDAExecutionProvider"
    assert set(assignment(engine._bound._session)) == {"CUDAExecutionProvider"}
    batches = [torch.randn(count, *SHAPE) for count in (1, 2, 3, 8, 1)]
    with torch.inference_mode():
        found = [engine.run(batch.cuda()) for batch in batches]
    for batch, (logits,) in zip(batches, found, strict=True):
        close(logits, batch)


def test_it_waits_for_what_torch_is_still_writing(tmp_path: Path) -> None:
    needs("onnxruntime-cuda")
    engine = opened(artifacts.onnx(tmp_path / "onnx"), "onnxruntime-cuda", tf32=False)
    batch = torch.randn(4, *SHAPE)
    matrix = torch.randn(4096, 4096, device=CUDA)
    with torch.inference_mode():
        engine.run(batch.cuda())
        late = batch.cuda()
        for _ in range(20):
            matrix = matrix @ matrix / 64  # milliseconds of work that the input waits behind
        late = late + 0 * matrix.flatten()[: late.numel()].view_as(late).nan_to_num(0, 0, 0)
        close(engine.run(late)[0], batch)


@pytest.mark.slow
def test_tensorrt_compiles_once_and_outside_of_the_artifact(tmp_path: Path) -> None:
    needs("onnxruntime-tensorrt")
    folder = artifacts.onnx(tmp_path / "onnx")
    before = {path.name for path in folder.iterdir()}
    engine = opened(folder, "onnxruntime-tensorrt", 1, 4)
    assert engine.provider == "onnxruntime/TensorrtExecutionProvider"
    for count in (1, 2, 4, 5, 9):  # above the largest bucket: split
        batch = torch.randn(count, *SHAPE)
        with torch.inference_mode():
            close(engine.run(batch.cuda())[0], batch, 2e-3)  # TensorRT may use TF32; ONNX Runtime cannot forbid it
    assert {path.name for path in folder.iterdir()} == before
    compiled = tmp_path / "cache" / "optimize-and-serve-compiled"
    (first,) = compiled.glob("tensorrt/*/*.engine")
    assert any(compiled.glob("tensorrt-timings/*/*.timing"))
    written = first.stat().st_mtime_ns
    opened(folder, "onnxruntime-tensorrt", 1, 4)
    assert [path.stat().st_mtime_ns for path in compiled.glob("tensorrt/*/*.engine")] == [written]


# --- all of them


@pytest.mark.slow
@pytest.mark.parametrize("make", [artifacts.torchscript, artifacts.exported, artifacts.onnx])
def test_every_engine_that_works_here_classifies_as_the_cpu_does(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path / "artifact")
    images = [artifacts.jpeg(seed) for seed in range(5)]
    on_cpu = Predictor(folder).predict(images)
    executions = [entry for entry in executions_for(load_card(folder), "cuda") if not unavailable(entry.engine, "cuda")]
    assert executions or make is artifacts.onnx
    for execution in executions:
        predictor = Predictor(folder, execution)
        assert predictor.describe()["device"].startswith("cuda")
        for here, there in zip(predictor.predict(images), on_cpu, strict=True):
            assert isinstance(here, list)
            assert isinstance(there, list)
            assert [label.index for label in here] == [label.index for label in there], execution.engine
            assert [label.probability for label in here] == pytest.approx(
                [label.probability for label in there], abs=0.01
            )


def test_the_device_may_be_named_by_its_number(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    engine = open_engine(folder, load_card(folder), Execution("torch-cudagraph", "cuda:0", buckets=(2,)))
    batch = torch.randn(2, *SHAPE)
    close(engine.run(batch.to("cuda:0"))[0], batch)
    assert load_program(folder / "model.pt2") is not None


@pytest.mark.slow
def test_the_benchmark_measures_torchs_ways(tmp_path: Path) -> None:
    ways = ["eager FP32", "eager FP16", "eager FP16 channels-last", "exported FP16", "torch-cudagraph FP16"]
    ways += ["torch-cudagraph FP32", "torch.compile FP16 max-autotune"]
    state = tmp_path / "state.json"
    options = ["--models", "tiny", "--batches", "1,3", "--seconds", "0.05", "--images", "20", "--clients", "1,2"]
    options += ["--jpeg-seconds", "0.05"]
    assert gpu.main([*options, "--ways", ",".join(ways), "--state", str(state)]) == 0
    body = json.loads(state.read_text())
    assert {key: cell["failed"] for key, cell in body["cells"].items() if "failed" in cell} == {}
    assert len(body["cells"]) == 2 * len(ways)
    assert min(cell["top1"] for cell in body["cells"].values()) >= 0.9
    row = body["jpeg"]["in process, cpu|2"]
    assert row["top1"] == 1.0
    assert row["network"].startswith("torch-cudagraph, float16")
