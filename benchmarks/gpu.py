"""Every way to run a network on a GPU: images a second, latencies, and whether the answers are still right.

``make bench-gpu`` runs it and writes ``docs/benchmarks/gpu.md``. It needs torch, torchvision and numpy, and skips by
name what else is not there. Each figure is kept in a file as soon as it is taken: ``--resume`` goes on from there.
``python -m benchmarks.gpu --device cpu --models tiny`` tries the script out where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.commands import command
from benchmarks.gpu_jpeg import PLACES, measure_jpeg
from benchmarks.gpu_page import page
from benchmarks.gpu_subjects import MODELS, Subject, jpeg_files, make_subject
from benchmarks.gpu_ways import WAYS, Run, Unavailable, Way
from serve.runtime.decoders.base import CPU, decoders
from serve.runtime.errors import first_line

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CLIENTS = (1, 32, 256)
DECODERS = (CPU, *sorted(decoders()))
LIBRARIES = (
    *("torch", "torchvision", "numpy", "triton", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu"),
    *("tensorrt", "tensorrt-cu13", "torchcodec", "nvidia-nvimgcodec-cu13", "pillow"),
)
_WARM_UPS = 3
_LEAST_CALLS = 10


@dataclass(frozen=True)
class Speed:
    """What one way does with one batch size: throughput of calls one after the other, latency of calls one by one."""

    images_s: float
    p50_ms: float
    p99_ms: float
    calls: int


def time_calls(call: Run, inputs: Sequence[torch.Tensor], seconds: float) -> Speed:
    """Time a network on inputs that lie on its device.

    Args:
        call: the network.
        inputs: batches of one size, taken in turns so that no cache holds the input of the next call.
        seconds: for latencies, and again for throughput.
    """
    device, size = inputs[0].device, len(inputs[0])
    for number in range(_WARM_UPS):
        call(inputs[number % len(inputs)])
    timed = _event_ms if device.type == "cuda" else _host_ms
    latencies: list[float] = []
    begun = time.perf_counter()
    while len(latencies) < _LEAST_CALLS or time.perf_counter() - begun < seconds:
        latencies.append(timed(call, inputs[len(latencies) % len(inputs)]))
    # A number of calls, and not a time: calls that are only launched return at once.
    p50 = float(np.percentile(latencies, 50))
    calls = max(3, math.ceil(seconds * 1e3 / p50))
    _synchronise(device)
    begun = time.perf_counter()
    for number in range(calls):
        call(inputs[number % len(inputs)])
    _synchronise(device)
    elapsed = time.perf_counter() - begun
    return Speed(calls * size / elapsed, p50, float(np.percentile(latencies, 99)), len(latencies) + calls)


def _event_ms(call: Run, batch: torch.Tensor) -> float:
    stream = torch.cuda.current_stream(batch.device)
    start: Any
    end: Any
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record(stream)
    call(batch)
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end))


def _host_ms(call: Run, batch: torch.Tensor) -> float:
    begun = time.perf_counter()
    call(batch)
    return (time.perf_counter() - begun) * 1e3


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Answers:
    """How answers compare with FP32 on the CPU: share of equal top-1 classes, and signal to noise of the logits.

    ``sqnr_db`` is 10 log10(sum of squared logits / sum of squared differences); None: not one bit differs.
    """

    top1: float
    sqnr_db: float | None


def compare(found: torch.Tensor, wanted: torch.Tensor) -> Answers:
    """Compare logits ``(N, classes)`` with those of the reference, both on the CPU."""
    found, wanted = found.double(), wanted.double()
    top1 = float((found.argmax(1) == wanted.argmax(1)).double().mean())
    noise = float((found - wanted).square().sum())
    if math.isnan(noise):
        return Answers(top1, -math.inf)
    return Answers(top1, 10 * math.log10(float(wanted.square().sum()) / noise) if noise else None)


def answers_of(call: Run, images: torch.Tensor, batch: int) -> torch.Tensor:
    """Logits of all images on the CPU, in batches of exactly ``batch``: the last ones are filled from the front."""
    rows = []
    for start in range(0, len(images), batch):
        index = torch.arange(start, start + batch, device=images.device) % len(images)
        rows.append(call(images[index])[: len(images) - start].float().cpu())
    return torch.cat(rows)


class State:
    """What was measured so far, kept in a file after every figure."""

    def __init__(self, path: Path, facts: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.body: dict[str, Any] = {"facts": facts, "commands": [], "weights": {}, "cells": {}, "jpeg": {}}
        if resume and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["facts"] != facts:
                changed = sorted(name for name in facts if found["facts"].get(name) != facts[name])
                raise SystemExit(f"{path}: was measured with other {', '.join(changed)}; begin anew without --resume")
            self.body = found

    def put(self, part: str, key: str, value: object) -> None:
        """Add a figure, and write all of them."""
        self.body[part][key] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(self.body, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)

    def has(self, part: str, key: str) -> bool:
        """Whether a figure was taken, in this call or one that it resumes."""
        return key in self.body[part]


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on: the device, the processor and the versions of the libraries."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    found["processor"] = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its build
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["cuda"], found["cudnn"] = torch.version.cuda, str(cudnn.version())
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
            found["driver"] = said.splitlines()[0].strip()
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
    else:
        found["device"] = "the processor"
    return found


def measure_cell(
    call: Run, subject: Subject, way: Way, *, batch: int, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Speed and answers of one way with one batch size, as JSON values."""
    images = subject.inputs(device, way.dtype(device))
    answers = compare(answers_of(call, images, batch), subject.wanted)
    sets = [images[torch.arange(shift, shift + batch, device=device) % len(images)] for shift in range(0, 40, 10)]
    return {**asdict(time_calls(call, sets, seconds)), **asdict(answers)}


def measure_way(
    way: Way, subject: Subject, device: torch.device, state: State, *, options: argparse.Namespace, deadline: float
) -> bool:
    """All batch sizes of one way and model; False: the time is up."""
    opened: Run | None = None
    failed = ""
    for batch in options.batches:
        key = f"{subject.name}|{way.name}|{batch}"
        if state.has("cells", key):
            continue
        if time.perf_counter() > deadline:
            return False
        cell: dict[str, Any]
        try:
            if failed and not way.per_batch:
                raise Unavailable(failed)
            if opened is None or way.per_batch:
                begun = time.perf_counter()
                opened = None  # what the last one holds on the device goes first
                opened = way.open(subject, device, (batch,) if way.per_batch else tuple(options.batches))
                print(f"{subject.name}, {way.name}: opened in {time.perf_counter() - begun:.1f} s", flush=True)
            with torch.no_grad():
                cell = measure_cell(opened, subject, way, batch=batch, device=device, seconds=options.seconds)
            print(f"{key}: {cell['images_s']:,.0f} images/s, p50 {cell['p50_ms']:.3f} ms", flush=True)
        except Exception as error:  # noqa: BLE001 - whatever one way does, the others are measured
            failed = failed or (str(error) if isinstance(error, Unavailable) else _said(error))
            opened = None if way.per_batch else opened
            cell = {"failed": failed if isinstance(error, Unavailable) else _said(error)}
            print(f"{key}: {cell['failed']}", flush=True)
        state.put("cells", key, cell)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if not numbers or min(numbers) < 1 or sorted(set(numbers)) != list(numbers):
        raise argparse.ArgumentTypeError("batch sizes must be positive and ascend, such as 1,8,64")
    return numbers


def _processes(text: str) -> int:
    cores = len(os.sched_getaffinity(0))
    if not text.isdecimal() or not 1 <= int(text) <= cores:  # or the server ends, after all else was measured
        raise argparse.ArgumentTypeError(f"must be between 1 and {cores}, the number of cores, got {text}")
    return int(text)


def _words(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
        return words

    return parse


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    shown = tuple(name for name in MODELS if name != "tiny")
    found.add_argument("--models", type=_words(tuple(MODELS)), default=shown, help=f"of {', '.join(MODELS)}")
    found.add_argument("--ways", type=_words([way.name for way in WAYS]), help="what to measure; default: everything")
    found.add_argument("--batches", type=_numbers, default=BATCHES, help="batch sizes, such as 1,8,64")
    found.add_argument("--seconds", type=float, default=0.5, help="for latencies, and again for throughput")
    found.add_argument("--limit", type=float, default=math.inf, help="begin nothing new after so many seconds")
    found.add_argument("--images", type=int, default=256, help="images that answers are compared on")
    found.add_argument("--photos", type=Path, help="a folder of JPEG files, instead of drawn pictures")
    found.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script out")
    found.add_argument("--clients", type=_numbers, default=CLIENTS, help="requests at once of the JPEG part")
    found.add_argument("--decoders", type=_words(DECODERS), default=DECODERS, help=f"of {', '.join(DECODERS)}")
    found.add_argument("--where", type=_words(PLACES), default=PLACES, help=f"of {', '.join(PLACES)}")
    found.add_argument("--processes", type=_processes, default=1, help="of our own server in the JPEG part")
    found.add_argument("--jpeg-seconds", type=float, default=2.0, help="for each figure of the JPEG part")
    parts = found.add_mutually_exclusive_group()
    parts.add_argument("--no-networks", action="store_true", help="measure the part that begins with JPEG bytes alone")
    parts.add_argument("--no-jpeg", action="store_true", help="leave out the part that begins with JPEG bytes")
    found.add_argument("--state", type=Path, default=Path("build/bench-gpu.json"), help="where figures are kept")
    found.add_argument("--resume", action="store_true", help="go on with what --state holds")
    found.add_argument("--write", type=Path, help="write the page there, besides printing it")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the page; the exit code is 2 where there is no such device."""
    options = parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: this machine has no usable CUDA device (--device cpu tries the script out)", file=sys.stderr)
        return 2
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    begun = time.perf_counter()
    asked = {name: getattr(options, name) for name in ("images", "seconds", "jpeg_seconds")}
    if options.photos:
        asked["images"] = min(options.images, len(jpeg_files(options.photos)))
    facts = {**machine(device), **asked, "photos": bool(options.photos)}
    state = State(options.state, facts, resume=options.resume)
    made = command("benchmarks.gpu", sys.argv[1:] if arguments is None else arguments, without=("--resume",))
    state.body["commands"] = list(dict.fromkeys((*state.body["commands"], made)))
    chosen = [] if options.no_networks else [way for way in WAYS if options.ways is None or way.name in options.ways]
    whole = True
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as work:
        subjects = [make_subject(name, Path(work), options.images, options.photos) for name in options.models]
        for subject in subjects:
            state.put("weights", subject.name, "trained" if subject.trained else "random")
        # What opens quickly first, for every model: a run that is cut short has something of everything.
        for way in chosen:
            for subject in subjects:
                deadline = begun + options.limit
                whole = whole and measure_way(way, subject, device, state, options=options, deadline=deadline)
        if not options.no_jpeg and whole:
            for subject in subjects[:1]:
                for key, row in measure_jpeg(
                    subject,
                    device,
                    clients=options.clients,
                    seconds=options.jpeg_seconds,
                    names=options.decoders,
                    processes=options.processes,
                    places=options.where,
                    done=partial(state.has, "jpeg"),
                ):
                    state.put("jpeg", key, row)
    document = page(state.body, whole=whole)
    print(document)
    if options.write:
        options.write.write_text(document, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
