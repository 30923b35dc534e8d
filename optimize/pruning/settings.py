"""The settings that all pruning passes share: what stays, and how the rest is trained by the one training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field
from torch import nn

from optimize.context import Context
from optimize.models.module_patterns import classes, matching, unmatched
from optimize.store.training_history import History
from optimize.training.config import Retraining, TrainingConfig
from optimize.training.loop import train
from serve.common.config import Config
from serve.runtime.errors import UserError


class FineTuning(Retraining):
    """Settings of the training after a pruning: those of any training. With 0 epochs there is none."""

    model_config = ConfigDict(title="FineTuning")

    epochs: int = Field(default=3, ge=0, description="number of passes over the training images; 0: none")


def _as_fine_tuning(given: object) -> object:
    """Turn settings of a training into those of a fine-tuning. Other values stay as they are."""
    if isinstance(given, TrainingConfig) and not isinstance(given, FineTuning):
        return FineTuning(**{name: getattr(given, name) for name in given.model_fields_set})
    return given


class Pruning(Config):
    """The settings that all pruning passes share.

    A pattern is a module's name (``layer4``, ``features.*.conv``) or its class's (``SqueezeExcitation``). ``*`` matches
    anything. It also covers everything inside the module.
    """

    keep: tuple[str, ...] = Field(
        default=(), description="modules whose layers are not pruned, as patterns of their names or classes"
    )
    train: Annotated[FineTuning, BeforeValidator(_as_fine_tuning)] = Field(
        default=FineTuning(),
        description="training after pruning, as settings of a training (epochs, learning_rate …); epochs: 0 means none",
    )


def check_keep(build: Callable[[], nn.Module], config: Pruning) -> None:
    """Refuse patterns that match nothing in the model that ``build`` makes.

    Raises:
        UserError: a line for each, with the nearest names.
    """
    if config.keep and (wrong := unmatched(classes(build()), "keep", config.keep)):
        raise UserError("\n".join(wrong))


def kept_by(module: nn.Module, config: Pruning) -> frozenset[str]:
    """Return the names of the modules that stay whole."""
    kinds = classes(module)
    return frozenset(name for pattern in config.keep for name in matching(kinds, pattern))


@dataclass(frozen=True)
class FineTuned:
    """The result of fine-tuning: its notes and its history. Empty if there was none."""

    notes: tuple[str, ...] = ()
    training: tuple[History, ...] = ()

    def __add__(self, later: FineTuned) -> FineTuned:
        return FineTuned((*self.notes, *later.notes), (*self.training, *later.training))


def fine_tune(module: nn.Module, context: Context, config: FineTuning, *, keep_zeros: bool) -> FineTuned:
    """Train ``module`` in place, and leave it on the CPU in eval mode, at its best epoch or as it was."""
    if not config.epochs:
        return FineTuned()
    result = train(module, context, config, from_start=True, keep_zeros=keep_zeros)
    module.cpu().eval()
    return FineTuned((f"fine-tuned: {result.kept}", *result.notes), (result.history,))
