"""``fine-tune``: trains a float module further, with its own architecture.

It adapts a checkpoint to other images than it was trained on. It is also the control for passes that train with less
than float: the same epochs at the same rate, with nothing quantized or removed.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict

from optimize.context import Context
from optimize.export.program import write_program, write_weights
from optimize.passes.base import Pass, gradients_lost, register, zeros_are_meant
from optimize.store.artifact import Artifact, Product
from optimize.training.config import Retraining
from optimize.training.loop import train


class FineTune(Retraining):
    """Settings of ``fine-tune``."""

    model_config = ConfigDict(title="FineTune")


def _apply(parent: Artifact, config: FineTune, context: Context, folder: Path) -> Product:
    module = parent.module()
    result = train(module, context, config, from_start=True, keep_zeros=zeros_are_meant(parent))
    module.cpu().eval()
    write_weights(module, folder)
    file, file_format = write_program(module, context.example(), folder)
    notes = (f"fine-tuned: {result.kept}", *result.notes, *gradients_lost(parent, module, context.example()))
    return Product(file, file_format, parent.card.precision, notes=notes, training=(result.history,))


FINE_TUNE = register(
    Pass(
        name="fine-tune",
        summary="continue to train a float network, such as a checkpoint from other images",
        config=FineTune,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        data="training",
        libraries=("torch", "torchvision"),
        rebuild=lambda module, example: module,
    )
)
