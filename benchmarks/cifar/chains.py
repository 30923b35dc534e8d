"""From a recipe to what is carried out for a cell, and for its control: the same training, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from optimize.passes.base import pass_of
from optimize.passes.fine_tune import FineTune
from optimize.passes.fuse import Fuse
from optimize.passes.onnx import Onnx
from optimize.pruning.latency_budget import Latency
from optimize.run.recipe import Recipe
from optimize.run.session import BASELINE
from optimize.store.artifact import Artifact
from optimize.training.config import TrainingConfig
from optimize.training.distil import SELF, Distil
from serve.common.config import Config, defaults

#: Passes that compute what their parent does, and that a control has, too.
_KEPT: Final = (Fuse, Onnx)

#: A run of seconds, which shows that all works: how it trains, and at most so much work of other kinds.
_QUICK: Final = {"epochs": 1, "max_steps": 2, "batch_size": 8}
_MOST: Final = {"images": 16, "rounding_steps": 2}
#: How candidates are timed then, and what share of the time may stay: one that a disturbed turn does not miss.
_BRIEF: Final = {"share": 0.95, "batch": 1, "rounds": 1, "seconds": 0.01}
#: Nothing is refused for what that makes of a network.
_LENIENT: Final = {"min_sqnr": -100.0, "min_agreement": 0.0}


@dataclass(frozen=True)
class Link:
    """A stage as it is carried out: the name of what it makes, and its settings."""

    name: str
    config: Config


Chain = tuple[Link, ...]


def chain(recipe: Recipe, stage: str | None = None) -> Chain:
    """What leads from the baseline to a stage, the last one by default, the first link first."""
    stages = {each.name: each for each in recipe.stages}
    wanted, found = stage or recipe.stages[-1].name, []
    while wanted != BASELINE:
        found.append(Link(wanted, stages[wanted].config))
        wanted = stages[wanted].parent
    return tuple(reversed(found))


def control(links: Chain, *, untaught: bool = False) -> Chain:
    """The float network that a cell is held against: trained whenever the cell is, with the very settings.

    Where nothing is trained, it is the float network that the cell was made of. ``untaught`` leaves the teacher out,
    where that is what is looked at.
    """
    found = []
    for link in links:
        own = trainings(link.config)
        for number, training in enumerate(own, start=1):
            same = {name: getattr(training, name) for name in TrainingConfig.model_fields}
            config = FineTune(**(same | {"distil": None} if untaught else same))
            found.append(Link(f"{link.name}-control{f'-{number}' if len(own) > 1 else ''}", config))
        if isinstance(link.config, _KEPT):
            found.append(Link(f"{link.name}-control", link.config))
    return tuple(found)


def taught(links: Chain, itself: Artifact, other: Artifact | None) -> Chain:
    """With the artifacts that teach in the place of the words for them.

    Args:
        links: of a cell or a control.
        itself: who ``self`` is, for all stages of both: what the row starts from.
        other: who is meant where a model is named.
    """
    return tuple(Link(link.name, _taught(link.config, itself, other)) for link in links)


def trainings(config: Config) -> tuple[TrainingConfig, ...]:
    """The trainings that a stage carries out, one after another; a pruning in steps has one after each of them."""
    if isinstance(config, TrainingConfig):
        return (config,) if config.epochs else ()
    found = {name: part for name, part in _trainings_within(config).items() if part.epochs}
    last = [found.pop("train")] * getattr(config, "steps", 1) if "train" in found else []
    return (*found.values(), *last)


def epochs(links: Chain) -> int:
    """How many epochs are trained in all."""
    return sum(training.epochs for link in links for training in trainings(link.config))


def with_epochs(links: Chain, number: int) -> Chain:
    """Each training with so many epochs."""
    return tuple(Link(link.name, _retrained(link.config, epochs=number)) for link in links)


def shortened(links: Chain) -> Chain:
    """Each stage with as little work as it can have, and nothing refused for what that makes of the network."""
    return tuple(Link(link.name, _shortened(link.config)) for link in links)


def quickest(training: TrainingConfig) -> TrainingConfig:
    """A training with a few steps."""
    return training.model_copy(update=_QUICK)


def told(links: Iterable[Link]) -> list[tuple[str, dict[str, Any]]]:
    """Passes and the settings that are not their defaults, as JSON values."""
    return [(pass_of(link.config).name, unusual(link.config)) for link in links]


def unusual(config: Config) -> dict[str, Any]:
    """The settings that are not their defaults, as JSON values: what others' defaults become changes nothing."""
    usual, plain = defaults(type(config)), config.model_dump(mode="json")
    return {
        name: unusual(value) if isinstance(value := getattr(config, name), Config) else plain[name]
        for name in plain
        if getattr(config, name) != usual.get(name)
    }


def _retrained(config: Config, **changes: Any) -> Config:
    """A config whose training has other settings; those of its own that count epochs end with the training."""
    if isinstance(config, TrainingConfig):
        if not config.epochs:
            return config
        changed = {name: getattr(config, name) for name in config.model_fields_set} | changes
        last = changed.get("epochs", config.epochs)
        ends = {name: min(value, last) for name, value in changed.items() if name.endswith("_at")}
        return type(config)(**(changed | ends))
    within = {name: _retrained(part, **changes) for name, part in _trainings_within(config).items()}
    return config.model_copy(update=within) if within else config


def _taught(config: Config, itself: Artifact, other: Artifact | None) -> Config:
    if isinstance(config, TrainingConfig):
        if config.distil is None:
            return config
        teacher = itself if config.distil.teacher == SELF else other
        return _retrained(config, distil=Distil(**{**dict(config.distil), "teacher": teacher}))
    within = {name: _taught(part, itself, other) for name, part in _trainings_within(config).items()}
    return config.model_copy(update=within) if within else config


def _trainings_within(config: Config) -> dict[str, TrainingConfig]:
    """The trainings among the settings of a stage that is more than one, by the word for each."""
    parts = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: part for name, part in parts.items() if isinstance(part, TrainingConfig)}


def _shortened(config: Config) -> Config:
    config = _retrained(config, **_QUICK)
    changes: dict[str, Any] = {
        name: min(getattr(config, name), most) for name, most in _MOST.items() if hasattr(config, name)
    }
    if getattr(config, "rounding", None) == "nearest":
        del changes["rounding_steps"]  # none are taken
    changes |= {name: value for name, value in _LENIENT.items() if hasattr(config, name)}
    if isinstance(latency := getattr(config, "latency", None), Latency):
        changes["latency"] = latency.model_copy(update=_BRIEF)
    return config.model_copy(update=changes)
