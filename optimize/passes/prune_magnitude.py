"""``prune-magnitude``: sets the smallest weights to zero, wherever they are; simulated.

No engine here computes less for it. It shows how many weights a network can do without, at 1.0 times the speed.
"""

from __future__ import annotations

import functools
from pathlib import Path

from pydantic import Field

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.passes.base import Pass, register
from optimize.pruning.masks import Scope, smallest, weighted
from optimize.pruning.settings import Pruning, check_keep, kept_by
from optimize.pruning.simulated_zeros import write_zeroed
from optimize.store.artifact import Artifact, Product


class PruneMagnitude(Pruning):
    """Settings of ``prune-magnitude``."""

    sparsity: float = Field(
        default=0.7, gt=0, lt=1, description="share of the weights of convolutions and linear layers that become zero"
    )
    scope: Scope = Field(
        default="global", description="scope in which the smallest weights are chosen: global (all layers) or layer"
    )
    steps: int = Field(
        default=1,
        ge=1,
        description="number of pruning steps, each followed by a training; each removes the same share of the "
        "remaining weights",
    )


def _apply(parent: Artifact, config: PruneMagnitude, context: Context, folder: Path) -> Product:
    module = parent.module()
    weights = weighted(module, kept_by(module, config))
    if not weights:
        raise NotApplicableError("this model has no convolution or linear layer that may be pruned")
    shares = (1 - (1 - config.sparsity) ** (step / config.steps) for step in range(1, config.steps + 1))
    rounds = [functools.partial(smallest, weights, share, config.scope) for share in shares]
    return write_zeroed(module, rounds, config.train, context, folder)


PRUNE_MAGNITUDE = register(
    Pass(
        name="prune-magnitude",
        summary="set the smallest weights to zero and train the others (simulated: no engine is faster for it)",
        config=PruneMagnitude,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        data="training",
        rebuild=lambda module, example: module,
        leaves_zeros=True,
        check=check_keep,
    )
)
