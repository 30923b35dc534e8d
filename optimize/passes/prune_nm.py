"""``prune-nm``: sets two of every four input channels' weights to zero, the pattern of sparse tensor cores; simulated.

On a CPU the network is 1.0 times as fast. On a GPU only wide layers could gain, in an engine that is built for it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic import Field, model_validator

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.passes.base import Pass, register
from optimize.pruning.masks import n_of_m, weighted
from optimize.pruning.settings import Pruning, check_keep, kept_by
from optimize.pruning.simulated_zeros import write_zeroed
from optimize.store.artifact import Artifact, Product
from serve.runtime.errors import listed


class PruneNm(Pruning):
    """Settings of ``prune-nm``."""

    n: int = Field(default=2, ge=1, description="number of weights to keep of every m")
    m: int = Field(default=4, ge=2, description="size of a group of neighbouring input channels")

    @model_validator(mode="after")
    def _fewer(self) -> PruneNm:
        if self.n >= self.m:
            raise ValueError(f"n={self.n} of m={self.m} removes nothing; n must be smaller than m, such as 2 of 4")
        return self


def _apply(parent: Artifact, config: PruneNm, context: Context, folder: Path) -> Product:
    module = parent.module()
    weights = weighted(module, kept_by(module, config))
    masks = n_of_m(weights, config.n, config.m)
    if not masks:
        raise NotApplicableError(f"no layer of this model has a multiple of {config.m} input channels in a group")
    product = write_zeroed(module, [lambda: masks], config.train, context, folder)
    others = [name for name in weights if name not in masks]
    if not others:
        return product
    note = f"whole, because they read no multiple of {config.m} channels in a group: {listed(others, 4)}"
    return dataclasses.replace(product, notes=(*product.notes, note))


PRUNE_NM = register(
    Pass(
        name="prune-nm",
        summary="keep 2 of every 4 weights along the input channels and train them (simulated, as prune-magnitude)",
        config=PruneNm,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        data="training",
        rebuild=lambda module, example: module,
        leaves_zeros=True,
        check=check_keep,
    )
)
