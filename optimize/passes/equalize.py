"""``equalize``: scales channels of neighbouring layers to similar ranges, so that one scale per tensor fits them all.

The tensors that a concatenation joins get similar ranges, too.

The result computes the same as its parent, and helps a later ``ptq``. Norms must be folded first (``fuse``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from torch import fx, nn

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.export.program import write_program, write_weights
from optimize.passes.base import Pass, register
from optimize.quantization.recovery.concatenations import level
from optimize.quantization.recovery.equalization import Pair, bound_channels, equalize, pairs
from optimize.store.artifact import Artifact, Product
from optimize.store.layer_effects import Effect, write_effects
from optimize.tracing.equivalence import require_alike
from optimize.tracing.trace import trace
from serve.common.config import Config


class Equalize(Config):
    """Settings of ``equalize``."""

    tolerance: float = Field(
        default=1e-3,
        gt=0,
        description="largest allowed difference of any logit to the parent's, relative to the parent's largest logit",
    )


def _bounded(module: nn.Module, example: torch.Tensor | None = None) -> tuple[fx.GraphModule, list[Pair]]:
    """Return the traced module and its pairs of layers. Their ReLU6 get bounds of their own."""
    traced = trace(module, example)
    found = bound_channels(traced, pairs(traced))
    return traced.eval(), found


def _rebuild(module: nn.Module, example: torch.Tensor) -> nn.Module:
    return _bounded(module, example)[0]


def _apply(parent: Artifact, config: Equalize, context: Context, folder: Path) -> Product:
    example = context.example(16)
    module, found = _bounded(parent.module(), example)
    levelled = level(module, example)
    if not found and not levelled:
        raise NotApplicableError(
            "equalize found no two layers with only a ReLU between them, and no concatenation of very different "
            "ranges; run fuse first to fold batch norms"
        )
    effects = equalize(module, found)
    with torch.no_grad():
        expected, actual = parent.module()(example), module(example)
    difference = require_alike(actual, expected, config.tolerance, "equalize")
    write_weights(module, folder)
    write_effects([*effects, *levelled], folder)
    file, file_format = write_program(module, example, folder)
    bounded = sum(pair.bound is not None for pair in found)
    notes = []
    if effects:
        before, after = _worst(effects)
        notes.append(
            f"{len(found)} pairs of layers equalized: the largest channel's weights reach {after:.1f} times as far as "
            f"the median's in the worst layer, {before:.1f} before; logits changed by {difference:.1e} of the largest"
        )
    if levelled:
        before, after = _worst(levelled)
        notes.append(
            f"{len(levelled)} concatenation{'s' * (len(levelled) > 1)} levelled: the tensors that the worst one joins "
            f"reach {after:.1f} times as far as each other, {before:.1f} before"
        )
    if bounded:
        notes.append(f"{bounded} ReLU6 have a bound for each channel; quantized, they have the largest of a layer's")
    return Product(file, file_format, parent.card.precision, notes=tuple(notes))


def _worst(effects: Sequence[Effect]) -> tuple[float, float]:
    return max(effect.before for effect in effects), max(effect.after for effect in effects)


EQUALIZE = register(
    Pass(
        name="equalize",
        summary="scale the channels of neighbouring layers to similar ranges, for int8 with one scale per tensor",
        config=Equalize,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        rebuild=_rebuild,
    )
)
