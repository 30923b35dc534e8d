"""Writes an artifact with zeros among its weights. It is simulated: every engine here multiplies with the zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from optimize.context import Context
from optimize.export.program import write_program, write_weights
from optimize.pruning.masks import Masks, set_to_zero, weighted, zeros
from optimize.pruning.settings import FineTuned, FineTuning, fine_tune
from optimize.store.artifact import Product
from optimize.store.layer_effects import write_effects
from optimize.training.tensorboard_events import part

SIMULATED = (
    "simulated: every engine here multiplies with the zeros, at 1.0 times the speed, and the file is as large as before"
)


def write_zeroed(
    module: nn.Module, rounds: Sequence[Callable[[], Masks]], train: FineTuning, context: Context, folder: Path
) -> Product:
    """Set masked weights to zero, train the rest, and write the artifact.

    Args:
        module: float32. Changed in place.
        rounds: functions that return masks of the current weights, see `optimize.pruning.masks`. A training follows
            each. All masks are for the same layers, and later masks include earlier ones.
        train: how the rest is trained.
        context: of the run.
        folder: where to write.
    """
    before = {name: weight.detach() == 0 for name, weight in weighted(module, frozenset()).items()}
    trained = FineTuned()
    masks: Masks = {}
    for number, masked in enumerate(rounds, start=1):
        masks = masked()
        set_to_zero(module, masks)
        own = dataclasses.replace(context, tensorboard=part(context.tensorboard, number, len(rounds)))
        trained += fine_tune(module, own, train, keep_zeros=True)
    write_weights(module, folder)
    write_effects(zeros(masks, before), folder)
    file, file_format = write_program(module, context.example(), folder)
    count = sum(mask.numel() for mask in masks.values())
    gone = sum(int((~mask).sum()) for mask in masks.values())
    note = f"{gone / count:.1%} of the weights of {len(masks)} layers are zero; {SIMULATED}"
    return Product(file, file_format, "float32", notes=(note, *trained.notes), training=trained.training)
