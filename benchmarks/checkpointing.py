"""What activation checkpointing saves and costs: a training step with it and without, each in a process of its own.

``python -m benchmarks.checkpointing --write docs/explanations/training.md``. Memory is the peak of a step above what
the process holds before it (resident; of a GPU what torch has allocated), time the median of the steps, of a CPU that
of all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.below import add_option, tell

#: Of the step that is measured: model of torchvision, whether prepared for QAT, images.
CASES: Final = (
    ("resnet50", False, 16),
    ("resnet50", True, 16),
    ("efficientnet_b0", False, 16),
    ("vit_b_16", False, 8),
)
SIDE: Final = 224
_TIME: Final = {"cpu": "CPU time", "cuda": "time"}


def measure(model: str, *, qat: bool, images: int, wanted: bool, steps: int) -> dict[str, float]:
    """Bytes and seconds of a training step, in this process."""
    import torch
    import torchvision

    from optimize import noise
    from optimize.quantization.convert import prepare, trace_calls
    from optimize.quantization.targets import x86_target
    from optimize.training.recompute import checkpointed

    noise.silence()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    module = torchvision.models.get_model(model).train()
    if qat:
        example, target = torch.randn(2, 3, SIDE, SIDE), x86_target()
        traced = trace_calls(module.eval(), example).train()
        module = prepare(traced, target.quantization_aware(100), example, target)
    module.to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    batch, labels = (
        torch.randn(images, 3, SIDE, SIDE, device=device),
        torch.zeros(images, dtype=torch.int64, device=device),
    )
    # Of a CPU the time of all its cores, which other programs hardly change.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    taken, peaks = [], []
    around = (
        checkpointed(module, lambda: torch.randn(4, 3, SIDE, SIDE), images, device)
        if wanted
        else contextlib.nullcontext()
    )
    with around:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            before = _held(device)
            _forget_peak(device)
            started = clock()
            torch.nn.functional.cross_entropy(module(batch), labels).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(clock() - started)
            peaks.append(_peak(device) - before)
            optimizer.step()
    return {"bytes": max(peaks), "seconds": statistics.median(taken[1:])}


def _held(device: Any) -> int:
    import torch

    return torch.cuda.memory_allocated() if device.type == "cuda" else _status("VmRSS")


def _peak(device: Any) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _forget_peak(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def page(steps: int) -> Iterator[str]:
    """The table, and the facts that it depends on."""
    import torch
    import torchvision

    from optimize.measure.machine import machine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = machine(device)
    where = here["gpu"]["name"] if here["gpu"] else f"{here['cpu']}, {here['cores']} cores"
    yield (
        f"Made by `python -m benchmarks.checkpointing` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}: {where}, "
        f"torch {torch.__version__}, torchvision {torchvision.__version__}; forward and backward at {SIDE}², peak "
        "above what the process holds before it (gradients are in it, weights are not), median "
        f"{_TIME[device.type]} of {steps - 1} steps."
    )
    yield ""
    yield f"| step | memory without | with | | {_TIME[device.type]} without | with | |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for model, qat, images in CASES:
        without, lighter = (_alone(model, qat, images, wanted, steps) for wanted in (False, True))
        yield (
            f"| {model}{', `qat`' if qat else ''}, {images} images | {without['bytes'] / 1e6:,.0f} MB "
            f"| {lighter['bytes'] / 1e6:,.0f} MB | {lighter['bytes'] / without['bytes']:.0%} "
            f"| {without['seconds']:.2f} s | {lighter['seconds']:.2f} s "
            f"| {lighter['seconds'] / without['seconds']:.2f}× |"
        )


def _alone(model: str, qat: bool, images: int, wanted: bool, steps: int) -> Mapping[str, float]:
    """`measure` in a process of its own."""
    case = json.dumps({"model": model, "qat": qat, "images": images, "wanted": wanted, "steps": steps})
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpointing", "--case", case],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases and write the table below the mark of the file, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="of each case; the first is not timed")
    add_option(parser)
    parser.add_argument("--case", help="measure one here, and print it as JSON")
    options = parser.parse_args(arguments)
    if options.case:
        sys.stdout.write(json.dumps(measure(**json.loads(options.case))) + "\n")
        return 0
    tell("\n".join([*page(options.steps), ""]), options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
