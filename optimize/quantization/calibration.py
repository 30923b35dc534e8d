"""Which range each activation has: what training images show.

A mean is a mean over batches in which each batch weighs the same. torch's moving averages start from the first batch:
with their constant of 0.01 it would still hold 93 % of the range after eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.ao.quantization import disable_fake_quant, enable_fake_quant

from optimize.context import Context
from optimize.quantization.observers import MeanMinMaxObserver, activations, observe
from serve.runtime.images import normalise


def calibrate(prepared: nn.Module, context: Context, images: int) -> None:
    """Show an observed model ``images`` training images, and settle the observers that take means.

    Args:
        prepared: with observers, on ``context.device``, in eval mode.
        context: data, preprocessing and device; its listener is told how far it is.
        images: how many; fewer where there are not so many.
    """
    means = [layer for layer in prepared.modules() if isinstance(layer, MeanMinMaxObserver)]
    _show(prepared, context, images, means)


def start_ranges(prepared: nn.Module, context: Context, images: int) -> None:
    """Give each activation of a model prepared for QAT the range that it has in the float network.

    The range goes from the mean of the batches' least values to the mean of their largest.

    Args:
        prepared: with fake-quantize modules, on ``context.device``, in eval mode.
        context: as for `calibrate`.
        images: how many training images to look at.
    """
    fakes = activations(prepared)
    means = [MeanMinMaxObserver(dtype=fake.dtype).to(context.device) for fake in fakes]
    handles = [fake.register_forward_pre_hook(_seen_by(mean)) for fake, mean in zip(fakes, means, strict=True)]
    observe(fakes, False)
    prepared.apply(disable_fake_quant)
    try:
        _show(prepared, context, images, means)
    finally:
        for handle in handles:
            handle.remove()
        prepared.apply(enable_fake_quant)
        observe(fakes, True)
    for fake, mean in zip(fakes, means, strict=True):
        observer = fake.activation_post_process
        observer.min_val.copy_(mean.min_val)
        observer.max_val.copy_(mean.max_val)
        scale, zero_point = fake.calculate_qparams()
        fake.scale.copy_(scale)
        fake.zero_point.copy_(zero_point)


def _seen_by(mean: MeanMinMaxObserver) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        mean(given[0])

    return hook


def _show(prepared: nn.Module, context: Context, images: int, means: Sequence[MeanMinMaxObserver]) -> None:
    batches = context.calibration(images)
    with torch.no_grad():
        for done, (batch, _) in enumerate(batches, start=1):
            prepared(normalise(batch, context.preprocessing, context.device, torch.float32))
            for mean in means:
                mean.end_batch()
            context.listener.progressed(done / len(batches), "calibrating")
    for mean in means:
        mean.settle()
