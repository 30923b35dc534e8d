"""``reestimate``: measures the statistics of batch norms again on training images, for the current weights.

Use it for weights that changed after the norms saw them (averaged, rounded, pruned), and for a checkpoint whose images
were preprocessed differently. It must run before ``fuse``, which folds the norms away.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.export.program import write_program, write_weights
from optimize.passes.base import Pass, register
from optimize.store.artifact import Artifact, Product
from optimize.store.layer_effects import Effect, write_effects
from serve.common.config import Config
from serve.runtime.images.image_preprocessing import normalise

MEAN = "running mean of the norm (RMS over channels)"
DEVIATION = "running deviation of the norm (mean over channels)"


class Reestimate(Config):
    """Settings of ``reestimate``."""

    images: int = Field(default=1024, ge=2, description="number of training images to use, stratified by class")


def reestimate(module: nn.Module, context: Context, images: int) -> tuple[list[Effect], int]:
    """Set each norm's statistics to the mean over batches of their means and variances, in place.

    Args:
        module: in eval mode. Only its norms are put into training mode, and back.
        context: data, preprocessing, device.
        images: number of images to use, if there are as many.

    Returns:
        The changes, and the number of images used.
    """
    norms = {name: layer for name, layer in module.named_modules() if _counts(layer)}
    before = {name: _figures(norm) for name, norm in norms.items()}
    momenta = {name: norm.momentum for name, norm in norms.items()}
    module.to(context.device)
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # in torch, None means the mean over all batches
        norm.train()
    batches, seen = context.calibration(images, batch_size=64), 0
    with torch.no_grad():
        for done, (batch, _) in enumerate(batches, start=1):
            if len(batch) > 1:  # one image has no deviation
                module(normalise(batch, context.preprocessing, context.device, torch.float32))
                seen += len(batch)
            context.listener.progressed(done / len(batches), "measuring norms")
    for name, norm in norms.items():
        norm.momentum = momenta[name]
        norm.eval()
    module.cpu()
    effects = [
        Effect(name, figure, was, now)
        for name, norm in norms.items()
        for figure, was, now in zip((MEAN, DEVIATION), before[name], _figures(norm), strict=True)
    ]
    return effects, seen


def _counts(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.running_mean is not None


def _figures(norm: nn.Module) -> tuple[float, float]:
    mean, variance = norm.running_mean, norm.running_var
    return float(mean.square().mean().sqrt()), float(variance.sqrt().mean())  # type: ignore[operator]


def _apply(parent: Artifact, config: Reestimate, context: Context, folder: Path) -> Product:
    module = parent.module()
    if not any(_counts(layer) for layer in module.modules()):
        raise NotApplicableError("this model has no batch norm with statistics; put reestimate before fuse")
    effects, seen = reestimate(module, context, config.images)
    write_weights(module, folder)
    write_effects(effects, folder)
    file, file_format = write_program(module, context.example(), folder)
    norms = len(effects) // 2
    note = f"statistics of {norms} batch norms measured again on {seen} training images"
    return Product(file, file_format, parent.card.precision, notes=(note,))


REESTIMATE = register(
    Pass(
        name="reestimate",
        summary="measure the statistics of batch norms again on training images",
        config=Reestimate,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        data="calibration",
        rebuild=lambda module, example: module,
    )
)
