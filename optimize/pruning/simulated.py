"""Zeros among the weights as an artifact: simulated, because every engine here multiplies with them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from optimize.context import Context
from optimize.export.program import write_program, write_weights
from optimize.pruning.masks import Masks, held, zeros
from optimize.pruning.settings import FineTuning, fine_tune
from optimize.store.artifact import Product
from optimize.store.effects import write_effects

SIMULATED = (
    "simulated: every engine here multiplies with the zeros, at 1.0 times the speed, and the file is as large as before"
)


def write_zeroed(module: nn.Module, masks: Masks, train: FineTuning, context: Context, folder: Path) -> Product:
    """Set what is masked to zero, train the rest, and write the artifact.

    Args:
        module: of float32; changed in place.
        masks: see `optimize.pruning.masks`.
        train: how the rest is trained.
        context: of the run.
        folder: where to write.
    """
    effects = zeros(masks, module)
    with held(module, masks):
        trained = fine_tune(module, context, train)
    write_weights(module, folder)
    write_effects(effects, folder)
    file, file_format = write_program(module, context.example(), folder)
    count = sum(mask.numel() for mask in masks.values())
    gone = sum(int((~mask).sum()) for mask in masks.values())
    note = f"{gone / count:.1%} of the weights of {len(masks)} layers are zero; {SIMULATED}"
    return Product(file, file_format, "float32", notes=(note, *trained.notes), training=trained.training)
