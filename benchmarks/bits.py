"""What one bit less costs where a CPU has no VNNI, in weights or in activations: as a table.

``python -m benchmarks.bits MODEL --data imagefolder:DIR --checkpoint FILE``: the network after ``fuse``, calibrated and
simulated, against its float logits.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from benchmarks.commands import command
from benchmarks.here import begun, here
from optimize.context import Context
from optimize.listener import SILENT
from optimize.passes.fuse import Fuse
from optimize.quantization.calibration import calibrate
from optimize.quantization.convert import prepare, trace_calls
from optimize.quantization.gate import sqnr
from optimize.quantization.simulate import simulated
from optimize.quantization.targets import target_named
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from serve.runtime.device.cpu_integers import ANY_X86, VNNI_X86
from serve.runtime.images.image_preprocessing import normalise

#: What has how many bits, and the target that is simulated.
WAYS: Final = {
    "8, 8 bits (`x86-vnni`)": target_named(VNNI_X86),
    "8, 7 bits (`x86`)": target_named(ANY_X86),
    "7, 8 bits (torch's `reduce_range`)": target_named(VNNI_X86).fewer(7),
}
OBSERVERS: Final[tuple[Literal["minmax", "histogram"], ...]] = ("minmax", "histogram")


@dataclass(frozen=True)
class Cost:
    """Of a simulated network's logits: their SQNR against the float ones in dB, and shares of images."""

    sqnr_db: float
    same_top1: float
    top1: float


def measured(module: torch.nn.Module, context: Context, images: int) -> tuple[float, dict[tuple[str, str], Cost]]:
    """The float network's top-1, and what each way of `WAYS` costs by each of `OBSERVERS`.

    Args:
        module: in eval mode, its norms folded.
        context: preprocessing, data and device.
        images: to calibrate on.
    """
    example = context.example()
    expected, labels = _logits(module, context)
    found: dict[tuple[str, str], Cost] = {}
    for way, target in WAYS.items():
        for observer in OBSERVERS:
            prepared = prepare(trace_calls(module, example), target.post_training(observer), example, target)
            calibrate(prepared, context, context.calibration(images))
            logits, _ = _logits(simulated(prepared), context)
            found[way, observer] = Cost(
                sqnr(expected, logits),
                _share(logits.argmax(1) == expected.argmax(1)),
                _share(logits.argmax(1) == labels),
            )
    return _share(expected.argmax(1) == labels), found


def table(found: dict[tuple[str, str], Cost]) -> Iterator[str]:
    """Lines of a page: a row a way, columns by observer."""
    titles: tuple[tuple[str, Callable[[Cost], str]], ...] = (
        ("SQNR", lambda cost: f"{cost.sqnr_db:.1f} dB"),
        ("same top-1", lambda cost: f"{cost.same_top1:.2%}"),
        ("top-1", lambda cost: f"{cost.top1:.2%}"),
    )
    columns = [(title, cell, observer) for title, cell in titles for observer in OBSERVERS]
    yield f"| activations, weights | {' | '.join(f'{title}, {observer}' for title, _, observer in columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for way in WAYS:
        yield f"| {way} | {' | '.join(cell(found[way, observer]) for _, cell, observer in columns)} |"


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    began = begun()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bits", description=__doc__)
    parser.add_argument("model", help="as of `python -m optimize run`")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--val-images", type=int, default=None, help="images to compare on; all by default")
    parser.add_argument("--images", type=int, default=256, help="images to calibrate on")
    parser.add_argument("--store", type=Path, default=Path("model_store"))
    given = [*sys.argv[1:]] if words is None else [*words]
    options = parser.parse_args(given)
    job = Job(
        model=options.model,
        data=options.data,
        checkpoint=options.checkpoint,
        val_images=options.val_images,
        store=options.store,
    )
    opened = open_job(job, SILENT)
    with contextlib.closing(opened.session) as session:
        fused = session.apply(session.baseline(None, opened.checkpoint, opened.origin).artifact, Fuse()).artifact
        top1, found = measured(fused.module(), session.context, options.images)
    made = f"Made by `{command('benchmarks.bits', given)}` on {began}: {here('torch')}."
    sys.stdout.write(f"{made} The float network's top-1 is {top1:.2%}.\n\n" + "\n".join([*table(found), ""]))


def _logits(module: torch.nn.Module, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = [], []
    with torch.no_grad():
        for pixels, wanted in context.evaluation(100, context.device):
            images = normalise(pixels, context.preprocessing, context.device, torch.float32)
            logits.append(module(images).cpu())
            labels.append(wanted.cpu())
    return torch.cat(logits), torch.cat(labels)


def _share(hits: torch.Tensor) -> float:
    return float(hits.double().mean())


if __name__ == "__main__":
    main()
