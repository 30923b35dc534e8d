"""``observer: auto``: tries each observer on calibration images and judges it on others of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx, nn

from optimize.context import Context
from optimize.quantization.calibration import Batches, calibrate
from optimize.quantization.gate import sqnr
from optimize.quantization.observer_choice import Observer
from optimize.quantization.ranges import OBSERVERS
from optimize.quantization.simulate import simulated
from serve.runtime.images.image_preprocessing import normalise
from serve.runtime.outputs import Outputs, as_outputs, joined

#: One of this many images is kept to judge by.
_JUDGED = 4
_BATCH = 32


def best_observer(
    prepared: Callable[[Observer], fx.GraphModule],
    module: nn.Module,
    context: Context,
    batches: Batches,
    simulate: Callable[[fx.GraphModule], fx.GraphModule] = simulated,
) -> tuple[Observer, str]:
    """Return the observer with which the quantized model's outputs are nearest to the float model's.

    Of several outputs the one that loses most counts.

    Args:
        prepared: makes a new model with observers of a name, in eval mode.
        module: the float model, in eval mode.
        context: preprocessing and device.
        batches: calibration images. Every fourth one is used for judging, not for calibration.
        simulate: turns a calibrated model into one that rounds as its integers will.

    Returns:
        Its name, and a note with the figures of all observers.
    """
    pixels, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    judging = torch.arange(len(pixels)) % _JUDGED == _JUDGED - 1
    if not judging.any():
        judging[-1] = True
    shown = list(zip(_batched(pixels[~judging]), _batched(labels[~judging]), strict=True)) or list(batches)
    judges = [
        normalise(batch, context.preprocessing, context.device, torch.float32) for batch in _batched(pixels[judging])
    ]
    expected = _answers(module.to(context.device), judges)
    found: dict[Observer, float] = {}
    for name in OBSERVERS:
        candidate = prepared(name).to(context.device)
        calibrate(candidate, context, shown)
        found[name] = sqnr(expected, _answers(simulate(candidate), judges))
    chosen = max(found, key=lambda name: found[name])
    of = "SQNR of the logits" if len(expected) == 1 else "least SQNR of an output"
    return chosen, _note(chosen, found, of, int(judging.sum()))


def _batched(rows: torch.Tensor) -> list[torch.Tensor]:
    return [rows[first : first + _BATCH] for first in range(0, len(rows), _BATCH)]


def _answers(module: nn.Module, batches: Sequence[torch.Tensor]) -> Outputs:
    with torch.no_grad():
        return tuple(output.cpu() for output in joined(as_outputs(module(batch)) for batch in batches))


def _note(chosen: Observer, found: Mapping[Observer, float], of: str, images: int) -> str:
    others = ", ".join(f"{name} {ratio:.1f}" for name, ratio in found.items() if name != chosen)
    return (
        f"observer auto: {chosen}, {of} {found[chosen]:.1f} dB against the float network's on "
        f"{images} calibration images not used for the ranges ({others})"
    )
