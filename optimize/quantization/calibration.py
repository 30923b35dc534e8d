"""Calibration: finds the range of each activation from training images.

A mean over batches gives each batch the same weight. Torch's moving averages start from the first batch. With their
constant of 0.01, the first batch would still make up 93 % of the range after eight batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.ao.quantization import disable_fake_quant, enable_fake_quant
from torch.ao.quantization.observer import MinMaxObserver, ObserverBase

from optimize.context import Context
from optimize.quantization.observers import MeanMinMaxObserver, activations, observe, watched
from optimize.quantization.pixel_ties import part_from_ties
from optimize.quantization.ranges import CountingObserver
from serve.runtime.images.image_preprocessing import normalise


class Batches(Iterable[tuple[torch.Tensor, torch.Tensor]], Protocol):
    """Batches of ``uint8 (N, C, H, W)`` pixels with their labels, such as a loader or a list."""

    def __len__(self) -> int:
        """Return the number of batches."""


def calibrate(prepared: fx.GraphModule, context: Context, batches: Batches) -> None:
    """Run training images through an observed model. Settle observers that take means, and the image's quantizer.

    Args:
        prepared: with observers, on ``context.device``, in eval mode.
        context: preprocessing and device. Its listener receives the progress.
        batches: such as ``context.calibration(256)``.
    """
    means = [layer for layer in prepared.modules() if isinstance(layer, MeanMinMaxObserver)]
    part_from_ties(prepared, _show(prepared, context, batches, means))


def start_ranges(
    prepared: fx.GraphModule, context: Context, images: int, observer_of: Callable[[str], ObserverBase]
) -> None:
    """Give each activation of a model prepared for QAT the range that it has in the float network.

    Args:
        prepared: with fake-quantize modules, on ``context.device``, in eval mode.
        context: as for `calibrate`.
        images: number of training images.
        observer_of: makes a new observer for the output of the named layer. The name is empty for functions.
    """
    fakes, names = activations(prepared), watched(prepared)
    seeing = [observer_of(names.get(fake, "")).to(context.device) for fake in fakes]
    handles = [fake.register_forward_pre_hook(_seen_by(twin)) for fake, twin in zip(fakes, seeing, strict=True)]
    observe(fakes, False)
    prepared.apply(disable_fake_quant)
    try:
        batches = context.calibration(images)
        _show(prepared, context, batches, [twin for twin in seeing if isinstance(twin, MeanMinMaxObserver)])
    finally:
        for handle in handles:
            handle.remove()
        prepared.apply(enable_fake_quant)
        observe(fakes, True)
    for fake, twin in zip(fakes, seeing, strict=True):
        low, high = _range(twin)
        fake.activation_post_process.min_val.copy_(low)
        fake.activation_post_process.max_val.copy_(high)
        scale, zero_point = fake.calculate_qparams()
        fake.scale.copy_(scale)
        fake.zero_point.copy_(zero_point)


def _seen_by(twin: ObserverBase) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        twin(given[0])

    return hook


def _range(observer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest value that an observer's integers represent, or that it saw."""
    if isinstance(observer, CountingObserver):
        return observer.range()
    if type(observer) in (MinMaxObserver, MeanMinMaxObserver):
        return observer.min_val, observer.max_val
    scale, zero_point = observer.calculate_qparams()
    return ((observer.quant_min - zero_point) * scale).squeeze(), ((observer.quant_max - zero_point) * scale).squeeze()


def _show(prepared: nn.Module, context: Context, batches: Batches, means: Sequence[MeanMinMaxObserver]) -> torch.Tensor:
    """Run all batches through the model, and return the last of them, normalised."""
    images = torch.empty(0)
    with torch.no_grad():
        for done, (batch, _) in enumerate(batches, start=1):
            images = normalise(batch, context.preprocessing, context.device, torch.float32)
            prepared(images)
            for mean in means:
                mean.end_batch()
            context.listener.progressed(done / len(batches), "calibrating")
    for mean in means:
        mean.settle()
    return images
