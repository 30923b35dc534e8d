"""``prune-channels``: channels really removed, with all that belongs to them, and what stays trained on.

The network that is left is smaller for every engine. What its shapes are is stored in the artifact's lineage, by which
later passes trace the parent and give it these shapes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import Field
from torch import fx, nn

from optimize.context import Context
from optimize.errors import NotApplicableError, PassError
from optimize.export.alike import require_alike
from optimize.export.program import write_program, write_weights
from optimize.export.trace import trace
from optimize.models.patterns import around
from optimize.passes.base import Pass, register
from optimize.pruning.criteria import Criterion, first_order, scores
from optimize.pruning.groups import Grouping, group
from optimize.pruning.propagation import channels_of
from optimize.pruning.settings import FineTuned, Pruning, check_keep, fine_tune, kept_by, listed
from optimize.pruning.surgery import Structure, joined, masked, remove, resized
from optimize.pruning.widths import Costs, Rounding, Spread, removed, widths
from optimize.store.artifact import Artifact, Product
from optimize.store.effects import WHOLE, Effect, write_effects
from optimize.training.events import part


class PruneChannels(Pruning):
    """Settings of ``prune-channels``."""

    macs: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="share of the multiply-accumulates in convolutions and linear layers that may stay",
    )
    criterion: Criterion = Field(
        default="group",
        description="what a channel is worth: l1 or l2 (norm of its filters), group (of all weights that go with it), "
        "bn (scale of its norm) or taylor (first order of the loss, on training images)",
    )
    spread: Spread = Field(
        default="global",
        description="how removal is spread: global (one threshold for all layers) or uniform (the same share of each)",
    )
    round_to: int = Field(
        default=8, ge=1, description="numbers of channels are multiples of this: 8 suits int8 kernels, 16 float ones"
    )
    min_width: int = Field(default=8, ge=1, description="fewest channels that a layer may be left with")
    steps: int = Field(default=1, ge=1, description="prunings, each followed by a fine-tuning, that share the removal")
    images: int = Field(default=256, ge=1, description="training images that taylor's gradients are of")
    tolerance: float = Field(
        default=1e-3,
        gt=0,
        description="largest allowed difference of any logit to those of the network in which the removed channels are "
        "there and nothing reads them, relative to the largest",
    )


def _grouped(module: fx.GraphModule, example: torch.Tensor, config: PruneChannels, kept: frozenset[str]) -> Grouping:
    """The channels of a traced module; ``kept`` are names of modules whose outputs stay."""

    def gathered(without: Mapping[str, str]) -> Grouping:
        channels = channels_of(module, example)
        whole = {name: "they are to be kept" for name in channels.layers if kept & set(around(name))}
        return group(channels, {**without, **whole})

    found = gathered({})
    if config.criterion != "bn":
        return found
    bare = {
        name: "no batch norm scales them"
        for each, score in zip(found.groups, scores(module, found, "bn", None), strict=True)
        if bool(score.isnan().any())
        for name in each.layers
    }
    return gathered(bare) if bare else found


def _smaller(
    module: fx.GraphModule, grouping: Grouping, config: PruneChannels, most: float, context: Context
) -> set[int]:
    """The units to remove so that at most ``most`` multiply-accumulates stay."""
    costs = Costs(grouping)
    gradients = first_order(module, grouping, context, config.images) if config.criterion == "taylor" else None
    score = scores(module, grouping, config.criterion, gradients)
    rounding = Rounding(config.round_to, config.min_width)
    stay = widths(grouping, score, rounding, config.spread, lambda kept: costs.macs(kept) <= most)
    if stay is None:
        fewest = costs.macs([rounding.nearest(0, each) for each in grouping.groups])
        raise PassError(
            f"prune-channels: at most {_millions(most)} multiply-accumulates were to stay (macs={config.macs:g}), and "
            f"with the fewest channels that round_to={config.round_to} and min_width={config.min_width} allow there "
            f"are {_millions(fewest)}; {len(grouping.kept)} of {len(grouping.channels.layers)} layers are left whole"
        )
    return removed(grouping, score, stay)


def _apply(parent: Artifact, config: PruneChannels, context: Context, folder: Path) -> Product:
    example = context.example()
    # As the model's own code names them: a traced module keeps the names, and not all classes.
    kept = kept_by(next(parent.line()).module(), config) if config.keep else frozenset()
    module = trace(parent.module())
    structure: Structure = {}
    trained = FineTuned()
    first, before = _grouped(module, example, config, kept), _parameters(module)
    grouping, full = first, Costs(first).full
    for step in range(1, config.steps + 1):
        grouping = _grouped(module, example, config, kept)
        if not grouping.groups:
            raise NotApplicableError(f"no channels of this model can be removed: {'; '.join(_left(grouping))}")
        units = _smaller(module, grouping, config, full * config.macs ** (step / config.steps), context)
        whole = masked(module, grouping, units)
        structure = joined(structure, remove(module, grouping, units))
        _require_same(module, whole, example, config.tolerance)
        own = dataclasses.replace(context, tensorboard=part(context.tensorboard, step, config.steps))
        trained += fine_tune(module, own, config.train)
    after = channels_of(module, example)
    effects = [
        Effect(name, f"{side} channels", float(len(was)), float(len(now)))
        for name, layer in first.channels.layers.items()
        for side, was, now in (
            ("output", layer.out, after.layers[name].out),
            ("input", layer.into, after.layers[name].into),
        )
        if len(was) != len(now)
    ]
    left = Costs(group(after, {})).full
    effects += [
        Effect(WHOLE, "multiply-accumulates of one image (millions)", full / 1e6, left / 1e6),
        Effect(WHOLE, "parameters (millions)", before / 1e6, _parameters(module) / 1e6),
    ]
    write_weights(module, folder)
    write_effects(effects, folder)
    file, file_format = write_program(module, example, folder)
    notes = (
        f"multiply-accumulates of one image in convolutions and linear layers {_millions(full)} → {_millions(left)} "
        f"({left / full:.0%}), parameters {_millions(before)} → {_millions(_parameters(module))}: channels are removed "
        f"from {sum(effect.figure.startswith('output') for effect in effects)} of {len(after.layers)} layers",
        *_left(grouping),
        *trained.notes,
    )
    return Product(
        file, file_format, parent.card.precision, notes=notes, structure=structure, training=trained.training
    )


def _require_same(module: nn.Module, whole: nn.Module, example: torch.Tensor, tolerance: float) -> None:
    """Refuse a network that does not answer as the whole one in which nothing reads what was removed."""
    try:
        with torch.no_grad():
            expected, actual = whole(example), module(example)
    except RuntimeError as error:
        raise PassError(f"prune-channels: the smaller network does not run: {str(error).splitlines()[0]}") from None
    of = "those of the network in which nothing reads the removed channels"
    require_alike(actual, expected, tolerance, "prune-channels", of)


def _left(grouping: Grouping) -> list[str]:
    """Which layers keep all or some of their outputs, and why; a line for each reason."""
    layers = defaultdict(list)
    for name, reason in grouping.kept.items():
        layers[reason].append(name)
    return [f"outputs stay of {listed(names)}: {reason}" for reason, names in layers.items()]


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _millions(count: float) -> str:
    return f"{count / 1e6:.3g} M"


PRUNE_CHANNELS = register(
    Pass(
        name="prune-channels",
        summary="remove channels, with all that belongs to them, and train what is left",
        config=PruneChannels,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        data="training",
        libraries=("torch", "torchvision"),
        resize=resized,
        check=check_keep,
    )
)
