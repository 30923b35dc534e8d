"""``merge``: folds parallel convolutions of one tensor, as in RepVGG's and ACNet's blocks, into one convolution.

The result computes the same as its parent in eval mode, with fewer layers. See `optimize.tracing.branches`.
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
from optimize.quantization.recovery.equalization import FIGURE, spread
from optimize.store.artifact import Artifact, Product
from optimize.store.layer_effects import Effect, write_effects
from optimize.tracing.branches import Block, merge_blocks
from optimize.tracing.equivalence import require_alike
from optimize.tracing.trace import trace
from serve.common.config import Config

PEAKED = "largest weight of a channel to their root mean square, worst channel"


class Merge(Config):
    """Settings of ``merge``."""

    tolerance: float = Field(
        default=1e-4,
        gt=0,
        description="largest allowed difference of any logit to the parent's, relative to the parent's largest logit",
    )


def merge_module(module: nn.Module, example: torch.Tensor) -> fx.GraphModule:
    """Return the traced module with every block folded."""
    return _merged(module, example)[0]


def _merged(
    module: nn.Module, example: torch.Tensor
) -> tuple[fx.GraphModule, Sequence[tuple[Block, nn.Conv2d, nn.Conv2d]]]:
    traced = trace(module, example)
    return traced.eval(), merge_blocks(traced)


def _apply(parent: Artifact, config: Merge, context: Context, folder: Path) -> Product:
    example = context.example(16)
    module, merged = _merged(parent.module(), example)
    if not merged:
        raise NotApplicableError(
            "merge found no parallel convolutions to merge: they must read one tensor with the same stride, groups "
            "and channels, each with its own norm, under the largest kernel"
        )
    with torch.no_grad():
        expected, actual = parent.module()(example), module(example)
    difference = require_alike(actual, expected, config.tolerance, "merge")
    write_weights(module, folder)
    effects = [effect for block, alone, whole in merged for effect in _effects(block.name, alone, whole)]
    write_effects(effects, folder)
    file, file_format = write_program(module, example, folder)
    branches = sum(len(block.branches) for block, _, _ in merged)
    worst = max((effect for effect in effects if effect.figure == PEAKED), key=lambda effect: effect.after)
    note = (
        f"{branches} branches became {len(merged)} convolutions; logits changed by {difference:.1e} of the largest; a "
        f"channel's largest weight reaches {worst.after:.1f} times their root mean square in the worst of them "
        f"({worst.layer}; {worst.before:.1f} in its largest branch)"
    )
    return Product(file, file_format, parent.card.precision, notes=(note,))


def _effects(name: str, alone: nn.Conv2d, whole: nn.Conv2d) -> tuple[Effect, Effect]:
    """Return two figures that show how int8 suffers from a merge.

    With one scale per tensor, different channels hurt. With one scale per channel, peaked channels hurt.
    """
    return (
        Effect(name, FIGURE, before=spread(alone), after=spread(whole)),
        Effect(name, PEAKED, before=peaked(alone), after=peaked(whole)),
    )


def peaked(layer: nn.Conv2d) -> float:
    """Return the largest ratio of a channel's largest weight to the root mean square of its weights.

    With a scale for each channel, the largest weight sets the scale. The other weights use the inverse share of its 127
    steps. The ratio of n weights is at most sqrt(n).
    """
    weight = layer.weight.detach().double().flatten(1)
    mean = weight.square().mean(1).sqrt()
    alive = mean > 0
    return float((weight.abs().amax(1)[alive] / mean[alive]).max()) if bool(alive.any()) else 1.0


MERGE = register(
    Pass(
        name="merge",
        summary="merge parallel convolutions of one tensor (RepVGG, ACNet) into one",
        config=Merge,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        rebuild=merge_module,
    )
)
