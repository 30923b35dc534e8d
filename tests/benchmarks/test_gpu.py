"""The benchmark of GPUs, on the processor: the same path from end to end, with what the machine lacks named."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_http import ask_over_http
from benchmarks.gpu_jpeg import Pixels, difference, in_process, served
from benchmarks.gpu_page import page
from benchmarks.gpu_subjects import draw, jpegs, make_subject
from serve.runtime.card.budget import Budget
from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution
from serve.runtime.decoders.base import open_decoder
from serve.runtime.engines.base import open_engine
from serve.runtime.errors import PipelineError
from serve.runtime.images.headers import read_header
from serve.runtime.images.image_preprocessing import load, normalise

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

# As on a machine that has torch, torchvision and numpy only. Pillow comes with torchvision.
BARE = """
import sys
for name in (
    *("pydantic", "onnx", "onnxscript", "onnxruntime", "openvino", "safetensors", "sklearn", "pandas", "yaml"),
    *("httpx", "psutil", "uvicorn", "starlette", "typer", "prometheus_client", "grpc"),
):
    sys.modules[name] = None
from benchmarks.gpu import main
status = main(sys.argv[1:])
assert not [name for name in sys.modules if name.startswith("optimize")]
sys.exit(status)
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page and the state of one whole call, in a process without what need not be there."""
    folder = tmp_path_factory.mktemp("bench")
    ways = "eager FP32,exported FP16,torch-cudagraph FP16,onnxruntime-cuda FP16"
    options = ["--device", "cpu", "--models", "tiny", "--batches", "1,3", "--images", "10", "--seconds", "0.01"]
    options += ["--jpeg-seconds", "0.01"]
    options += ["--clients", "1,2", "--ways", ways, "--state", str(folder / "state.json")]
    command = [sys.executable, "-c", BARE, *options, "--write", str(folder / "page.md")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_cell_has_its_speed_and_its_answers(measured: Path) -> None:
    cells = json.loads((measured / "state.json").read_text())["cells"]
    for way in ("eager FP32", "exported FP16"):
        for batch in (1, 3):
            cell = cells[f"tiny|{way}|{batch}"]
            assert cell["images_s"] > 0
            assert 0 < cell["p50_ms"] <= cell["p99_ms"]
            assert cell["calls"] >= 13
            assert cell["top1"] == 1.0
            assert cell["sqnr_db"] is None or cell["sqnr_db"] > 80


@pytest.mark.slow
def test_what_is_missing_is_skipped_by_name(measured: Path) -> None:
    state, text = json.loads((measured / "state.json").read_text()), (measured / "page.md").read_text()
    assert state["cells"]["tiny|torch-cudagraph FP16|1"] == {"failed": "torch-cudagraph runs on cuda, not on cpu"}
    assert "- torch-cudagraph FP16: torch-cudagraph runs on cuda, not on cpu\n" in text
    assert "- in process, nvimgcodec: the decoder nvimgcodec needs cuda, but the engine runs on cpu\n" in text
    assert "- own server, cpu: import of httpx halted; None in sys.modules\n" in text
    assert "- TorchServe, cpu: import of httpx halted; None in sys.modules\n" in text
    assert "say nothing of a GPU" in text
    assert "| eager FP32 |" in text
    assert "| in process, cpu | 2 |" in text


@pytest.mark.slow
def test_what_is_served_is_measured_in_process_with_each_decoder(measured: Path) -> None:
    rows = json.loads((measured / "state.json").read_text())["jpeg"]
    for clients in (1, 2):
        own, reduced = rows[f"in process, cpu|{clients}"], rows[f"in process, reduced|{clients}"]
        assert own["top1"] == 1.0
        assert own["pixels_mean"] == own["pixels_max"] == 0
        assert reduced["pixels_max"] > 0, "drawn pictures are large enough for it, and a tiny network's input small"
        for row in (own, reduced):
            assert row["images_s"] > 0
            assert 0 < row["p50_ms"] <= row["p99_ms"]
            assert row["network"] == "exported, float32, batches to 2"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["own server"])
def test_a_server_is_asked_over_http_by_the_same_functions(where: str, tmp_path: Path) -> None:
    subject = make_subject("tiny", tmp_path, 4, None)
    files = jpegs(subject, 6)
    folder, _ = served(subject, CPU, "reduced", 4, tmp_path / "served")
    with in_process(folder, CPU) as (_, classes):
        wanted = classes(files)
    with ask_over_http(where, folder, CPU) as (ask, classes):
        assert classes(files) == wanted
        row = ask(files, 4, 1.0)
    assert row["images_s"] > 0
    assert 0 < row["p50_ms"] <= row["p99_ms"]


def test_classes_are_those_of_the_network_on_the_decoders_pixels(tmp_path: Path) -> None:
    subject = make_subject("tiny", tmp_path, 8, None)
    files = jpegs(subject, 8)
    folder, execution = served(subject, CPU, "cpu", 3, tmp_path / "served")
    assert execution == "exported, float32, batches to 4"
    batch = normalise(
        torch.stack([load(data, subject.preprocessing) for data in files]), subject.preprocessing, CPU, torch.float32
    )
    with torch.no_grad():
        wanted = subject.module(batch).argmax(1).tolist()
    with in_process(folder, CPU) as (ask, classes):
        assert classes(files) == wanted
        with pytest.raises(PipelineError, match=r"requests failed, 4\d\d: "):
            ask([*files, b"no image"], 2, 0.01)


def test_pixels_are_compared_level_by_level(tmp_path: Path) -> None:
    subject = make_subject("tiny", tmp_path, 2, None)
    files = jpegs(subject, 3)
    decoder = open_decoder("reduced", CPU)
    assert decoder is not None
    assert difference(files, None, subject.preprocessing) == Pixels(0.0, 0)
    headers = [read_header(data, Budget()) for data in files]
    placed = decoder.load(files, headers, subject.preprocessing)
    there = np.stack([image.pixels.numpy() for image in placed if image is not None])
    own = np.stack([load(data, subject.preprocessing).numpy() for data in files])
    apart = np.abs(there.astype(float) - own.astype(float))
    found = difference(files, decoder, subject.preprocessing)
    assert found.mean == pytest.approx(apart.mean())
    assert found.most == apart.max() > 0


def test_the_page_says_how_each_decoder_serves() -> None:
    row = {"images_s": 3210.4, "p50_ms": 7.254, "p99_ms": 19.996, "network": "torch-cudagraph, float16"}
    row |= {"top1": 0.984375, "pixels_mean": 0.4321, "pixels_max": 17}
    rows = {
        "in process, nvimgcodec|32": row,
        "own server, nvimgcodec|32": {**row, "images_s": 2999.6},
        "TorchServe, nvimgcodec|32": {"failed": "java is not installed"},
    }
    facts = {"device": "a GPU", "processor": "p", "torch": "2.14"}
    text = page({"facts": facts, "commands": ["command"], "weights": {}, "cells": {}, "jpeg": rows}, whole=True)
    assert "## From JPEG bytes to JSON\n" in text
    assert "| in process, nvimgcodec | 32 | 3,210 | 7.25 ms | 20.00 ms | 98.44% | 0.432 | 17 |\n" in text
    assert "| own server, nvimgcodec | 32 | 3,000 |" in text
    assert "- TorchServe, nvimgcodec: java is not installed\n" in text
    assert "run as torch-cudagraph, float16." in text


def resume(state: Path, *more: str) -> int:
    options = ["--device", "cpu", "--models", "tiny", "--images", "10", "--seconds", "0.01", "--no-jpeg"]
    return gpu.main([*options, "--state", str(state), "--resume", *more])


def test_a_call_that_was_cut_short_is_resumed(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    assert resume(state, "--ways", "eager FP32", "--batches", "1", "--limit", "0") == 0
    assert json.loads(state.read_text())["cells"] == {}  # nothing was begun
    assert resume(state, "--ways", "eager FP32", "--batches", "1") == 0
    first = json.loads(state.read_text())["cells"]
    assert resume(state, "--ways", "eager FP32", "--batches", "1,2") == 0
    second = json.loads(state.read_text())["cells"]
    assert second["tiny|eager FP32|1"] == first["tiny|eager FP32|1"]
    assert set(second) == {"tiny|eager FP32|1", "tiny|eager FP32|2"}


def test_figures_of_another_machine_are_not_resumed(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    resume(state, "--ways", "eager FP32", "--batches", "1")
    body = json.loads(state.read_text())
    state.write_text(json.dumps({**body, "facts": {**body["facts"], "torch": "2.0"}}))
    with pytest.raises(SystemExit, match="was measured with other torch"):
        resume(state, "--ways", "eager FP32", "--batches", "1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "no usable CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "4096", "two"])
def test_processes_that_no_server_starts_are_refused_before_anything_is_measured(
    count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--device", "cpu", "--state", str(tmp_path / "state.json"), "--processes", count])
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "argument --processes: must be between 1 and " in told
    assert told.endswith(f"got {count}")


def test_answers_are_compared_by_class_and_by_noise() -> None:
    wanted = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert gpu.compare(wanted, wanted) == gpu.Answers(1.0, None)
    found = gpu.compare(torch.tensor([[3.0, 0.0], [4.5, 4.0]]), wanted)
    assert found.top1 == 0.5
    assert found.sqnr_db == pytest.approx(10 * math.log10(25 / 20.25))
    assert gpu.compare(torch.tensor([[3.0, math.nan], [0.0, 4.0]]), wanted).sqnr_db == -math.inf


@pytest.mark.parametrize("batch", [1, 3, 7, 20])
def test_answers_are_asked_for_in_batches_of_exactly_one_size(batch: int) -> None:
    sizes = []

    def call(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        return images * 2

    images = torch.arange(7.0)[:, None]
    assert torch.equal(gpu.answers_of(call, images, batch), images * 2)
    assert set(sizes) == {batch}


def test_throughput_counts_images_and_latency_calls() -> None:
    calls = []

    def call(batch: torch.Tensor) -> torch.Tensor:
        calls.append(batch)
        return batch

    inputs = [torch.full((4, 1), float(number)) for number in range(3)]
    speed = gpu.time_calls(call, inputs, 0.01)
    assert speed.calls == len(calls) - 3  # the first three warm up
    assert [float(batch[0]) for batch in calls[3:9]] == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
    assert speed.images_s == pytest.approx(4000 / speed.p50_ms, rel=20)


def test_pictures_have_the_spectrum_of_photographs() -> None:
    pictures = draw(20, 64, 64).float().mean(1)
    power = np.abs(np.fft.fft2(np.asarray(pictures - pictures.mean((1, 2), keepdim=True)))).mean(0)
    low, high = power[1:4, 1:4].mean(), power[20:32, 20:32].mean()
    assert low > 10 * high > 0
    assert 60 < float(pictures.mean()) < 180
    assert 20 < float(pictures.std()) < 90


def test_a_random_network_answers_by_the_image(tmp_path: Path) -> None:
    subject = make_subject("tiny", tmp_path, 40, None)
    assert not subject.trained
    assert len(set(subject.wanted.argmax(1).tolist())) >= 3
    assert subject.wanted.mean(0).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_its_artifacts_are_opened_by_the_engines(dtype: torch.dtype, tmp_path: Path) -> None:
    subject = make_subject("tiny", tmp_path, 5, None)
    for kind, engine in (("exported_program", "exported"), ("onnx", "onnxruntime")):
        folder = subject.artifact(kind, dtype)
        assert subject.artifact(kind, dtype) == folder
        images: Any = subject.inputs(CPU, dtype)
        with torch.no_grad():
            (found,) = open_engine(folder, load_card(folder), Execution(engine)).run(images)
        assert found.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 0.02 * float(subject.wanted.abs().max())
        torch.testing.assert_close(found.float(), subject.wanted, rtol=0, atol=tolerance)


def test_one_reason_for_every_batch_is_told_once() -> None:
    facts = {"device": "a GPU", "processor": "p", "torch": "2.14"}
    cells = {f"{model}|way|{batch}": {"failed": "not there"} for model in "ab" for batch in (1, 2)}
    cells["a|other|1"] = {"failed": "out of memory"}
    cells["a|other|2"] = {"images_s": 1.0, "p50_ms": 1.0, "p99_ms": 1.0, "top1": 1.0, "sqnr_db": 40.0}  # type: ignore[dict-item]
    body = {"facts": facts, "weights": {"a": "random", "b": "trained"}, "cells": cells, "jpeg": {}}
    text = page({**body, "commands": ["first", "then"]}, whole=False)
    assert "Made by `first`, `then` on " in text
    assert text.count("- way: not there\n") == 1
    assert "- other (batch of a 1): out of memory\n" in text
    assert "the time was up" in text
    assert "## a, random weights\n" in text
    assert "tells images apart by little" in text
    assert "| other | 1<br>1.00 / 1.00 | 100.00% | 40.0 dB |" in text
