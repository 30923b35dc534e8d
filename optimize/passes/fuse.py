"""``fuse``: fold batch norms into the convolution or linear layer before them, and remove dropout.

The result is not for training: it computes what the parent computes in eval mode, and only that.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field

from optimize.context import Context
from optimize.export.program import write_program, write_weights
from optimize.passes.base import Pass, register
from optimize.store.artifact import Artifact, Product
from optimize.tracing.equivalence import require_alike
from optimize.tracing.folding import fuse_module
from optimize.tracing.trace import LEFT, without_autocast
from serve.common.config import Config


class Fuse(Config):
    """Settings of ``fuse``."""

    tolerance: float = Field(
        default=1e-3,
        gt=0,
        description="largest allowed difference of any logit to the parent's, relative to the parent's largest logit",
    )


def _apply(parent: Artifact, config: Fuse, context: Context, folder: Path) -> Product:
    module = parent.module()
    example = context.example(16)
    fused = fuse_module(parent.module(), example)
    with torch.no_grad(), without_autocast():
        expected, actual = module(example), fused(example)
    difference = require_alike(actual, expected, config.tolerance, "fuse")
    write_weights(fused, folder)
    file, file_format = write_program(fused, example, folder)
    left = fused.meta[LEFT].values()
    for note in left:
        context.listener.said(f"fuse: {note}")
    notes = (f"folding changed logits by {difference:.1e} of the largest", *left)
    return Product(file, file_format, parent.card.precision, notes=notes)


FUSE = register(
    Pass(
        name="fuse",
        summary="fold batch norms into convolutions and linear layers, remove dropout",
        config=Fuse,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        rebuild=fuse_module,
    )
)
