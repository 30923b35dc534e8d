"""``prune-channels``: removes channels with all weights that belong to them, and trains the rest.

The remaining network is smaller for every engine. Its shapes are stored in the artifact's lineage. Later passes trace
the parent and give it these shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import fx, nn

from optimize.context import Context
from optimize.errors import NotApplicableError, PassError
from optimize.export.macs import total_macs
from optimize.export.program import write_program, write_weights
from optimize.models.module_patterns import around
from optimize.passes.base import Pass, gradients_lost, register, zeros_are_meant
from optimize.pruning.channels import Channels
from optimize.pruning.criteria import Criterion, first_order, scores
from optimize.pruning.groups import Grouping, group
from optimize.pruning.latency_budget import Budget, Kept, Latency, Race, Removed, Search
from optimize.pruning.propagation import channels_of
from optimize.pruning.regularised import Sparsifying, sparsify
from optimize.pruning.settings import FineTuned, Pruning, check_keep, fine_tune, kept_by
from optimize.pruning.surgery import Structure, joined, masked, remove, resized
from optimize.pruning.width_budget import Costs, Rounding, Spread, removed, widths
from optimize.store.artifact import Artifact, Product
from optimize.store.layer_effects import WHOLE, Effect, write_effects
from optimize.tracing.equivalence import require_alike
from optimize.tracing.trace import trace
from optimize.training.tensorboard_events import part
from serve.runtime.errors import listed


def _half(given: dict[str, Any]) -> float | None:
    """Return the default share of the arithmetic: 0.5 if no time is given."""
    return 0.5 if given.get("latency") is None else None


class PruneChannels(Pruning):
    """Settings of ``prune-channels``."""

    latency: Latency | None = Field(
        default=None,
        description="instead of macs: the share of the measured time that may remain, such as "
        "{share: 0.6, execution: openvino, batch: 1}",
    )
    macs: float | None = Field(
        default_factory=_half,
        gt=0,
        lt=1,
        description="share of the network's multiply-accumulates that may remain; 0.5 if latency is not set either",
    )
    criterion: Criterion = Field(
        default="group",
        description="importance of a channel: l1 or l2 (norm of its filters), group (norm of all its weights), bn "
        "(scale of its norm) or taylor (first-order change of the loss)",
    )
    spread: Spread = Field(
        default="global",
        description="how removal is spread: global (one threshold for all layers) or uniform (the same share of each)",
    )
    round_to: int = Field(
        default=8,
        ge=1,
        description="numbers of channels are rounded to multiples of this: 8 suits int8 kernels, 16 "
        "suits float kernels",
    )
    min_width: int = Field(default=8, ge=1, description="minimum number of channels in a layer")
    steps: int = Field(default=1, ge=1, description="number of pruning steps; each is followed by a fine-tuning")
    sparsify: Sparsifying | None = Field(
        default=None,
        description="a training before the first pruning that makes channels unimportant: settings of a training, "
        "pull (group or bn) and strength; by default none",
    )
    images: int = Field(default=256, ge=1, description="number of training images for the gradients of taylor")
    tolerance: float = Field(
        default=1e-3,
        gt=0,
        description="largest allowed difference of any logit, relative to the largest, from the network that has the "
        "removed channels but does not read them",
    )

    @model_validator(mode="after")
    def _one_measure(self) -> PruneChannels:
        if (self.latency is None) == (self.macs is None):
            raise ValueError("set exactly one of macs and latency")
        return self


def _grouped(module: fx.GraphModule, example: torch.Tensor, config: PruneChannels, kept: frozenset[str]) -> Grouping:
    """Return the groups of channels of a traced module. ``kept`` names modules whose outputs stay."""

    def gathered(without: Mapping[str, str]) -> Grouping:
        channels = channels_of(module, example)
        whole = {name: "they must be kept" for name in channels.layers if kept & set(around(name))}
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


class _Arithmetic:
    """A budget of multiply-accumulates. `Race` is a budget of time.

    Args:
        module: the whole network, traced.
        config: says how much may stay.
        example: an input ``(N, C, H, W)``.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, module: fx.GraphModule, config: PruneChannels, example: torch.Tensor) -> None:
        self._config, self._example, self._full = config, example, total_macs(module, example)

    def widest(self, module: fx.GraphModule, grouping: Grouping, removed: Removed, search: Search, part: float) -> Kept:
        """See `Race.widest`."""
        assert self._config.macs is not None
        costs, most = Costs(grouping), self._full * self._config.macs**part
        others = total_macs(module, self._example) - costs.full  # of layers whose channels are not followed
        stay = search(lambda kept: others + costs.macs(kept) <= most)
        if stay is None:
            config, rounding = self._config, _rounding(self._config)
            fewest = others + costs.macs([rounding.nearest(0, each) for each in grouping.groups])
            raise PassError(
                f"prune-channels: at most {_millions(most)} multiply-accumulates may remain "
                f"(macs={config.macs:g}), but round_to={config.round_to} and min_width={config.min_width} allow no "
                f"fewer than {_millions(fewest)}; {len(grouping.kept)} of {len(grouping.channels.layers)} layers "
                "are not pruned"
            )
        return stay


def _rounding(config: PruneChannels) -> Rounding:
    return Rounding(config.round_to, config.min_width)


def _gone(
    module: fx.GraphModule, grouping: Grouping, config: PruneChannels, context: Context, widest: Callable[..., Kept]
) -> set[int]:
    """Return the units to remove. ``widest`` is the method of a budget, with its share of the removal."""
    gradients = first_order(module, grouping, context, config.images) if config.criterion == "taylor" else None
    score = scores(module, grouping, config.criterion, gradients)
    going = functools.partial(removed, grouping, score)
    # Counting arithmetic is fast. For a time budget, each candidate has to be built and run.
    search = functools.partial(widths, grouping, score, _rounding(config), config.spread, fill=config.latency is None)
    return going(widest(module, grouping, going, search))


def _apply(parent: Artifact, config: PruneChannels, context: Context, folder: Path) -> Product:
    example = context.example()
    # By the class names of the model's own code: a traced module keeps the layer names, but not all classes.
    kept = kept_by(next(parent.line()).module(), config) if config.keep else frozenset()
    keep_zeros = zeros_are_meant(parent)
    module = trace(parent.module(), example)
    first = _grouped(module, example, config, kept)
    if not first.groups:
        raise NotApplicableError(f"no channels of this model can be removed: {'; '.join(_left(first))}")
    structure: Structure = {}
    full, before = total_macs(module, example), _parameters(module)
    trained, sparsified = FineTuned(), int(config.sparsify is not None)
    trainings = sparsified + config.steps
    if config.sparsify is not None:
        own = dataclasses.replace(context, tensorboard=part(context.tensorboard, 1, trainings))
        trained += sparsify(module, first, own, config.sparsify, keep_zeros=keep_zeros)
    with contextlib.ExitStack() as stack:
        budget: Budget = (
            stack.enter_context(Race(module, config.latency, context))
            if config.latency is not None
            else _Arithmetic(module, config, example)
        )
        for step in range(1, config.steps + 1):
            grouping = _grouped(module, example, config, kept)
            widest = functools.partial(budget.widest, part=step / config.steps)
            units = _gone(module, grouping, config, context, widest)
            whole = masked(module, grouping, units)
            structure = joined(structure, remove(module, grouping, units))
            _require_same(module, whole, example, config.tolerance)
            own = dataclasses.replace(context, tensorboard=part(context.tensorboard, sparsified + step, trainings))
            trained += fine_tune(module, own, config.train, keep_zeros=keep_zeros)
    after = channels_of(module, example)
    left, parameters = total_macs(module, example), _parameters(module)
    channels = _changed(first.channels, after)
    effects = [
        *channels,
        Effect(WHOLE, "multiply-accumulates of one image (millions)", full / 1e6, left / 1e6),
        Effect(WHOLE, "parameters (millions)", before / 1e6, parameters / 1e6),
    ]
    write_weights(module, folder)
    write_effects(effects, folder)
    file, file_format = write_program(module, example, folder)
    notes = (
        f"multiply-accumulates of one image {_millions(full)} → {_millions(left)} ({left / full:.0%}), parameters "
        f"{_millions(before)} → {_millions(parameters)}: channels are removed from "
        f"{sum(effect.figure.startswith('output') for effect in channels)} of {len(after.layers)} layers",
        *budget.notes,
        *_left(grouping),
        *trained.notes,
        *(gradients_lost(parent, module, example) if trained.training else ()),
    )
    return Product(
        file, file_format, parent.card.precision, notes=notes, structure=structure, training=trained.training
    )


def _changed(before: Channels, after: Channels) -> list[Effect]:
    """Return an effect for each layer whose number of channels changed."""
    return [
        Effect(name, f"{side} channels", float(len(was)), float(len(now)))
        for name, layer in before.layers.items()
        for side, was, now in (
            ("output", layer.out, after.layers[name].out),
            ("input", layer.into, after.layers[name].into),
        )
        if len(was) != len(now)
    ]


def _require_same(module: nn.Module, whole: nn.Module, example: torch.Tensor, tolerance: float) -> None:
    """Refuse a smaller network that differs from the whole one in which nothing reads the removed channels."""
    try:
        with torch.no_grad():
            expected, actual = whole(example), module(example)
    except RuntimeError as error:
        raise PassError(f"prune-channels: the smaller network does not run: {str(error).splitlines()[0]}") from None
    of = "the network that does not read the removed channels"
    require_alike(actual, expected, tolerance, "prune-channels", of)


def _check(build: Callable[[], nn.Module], config: PruneChannels) -> None:
    check_keep(build, config)
    if config.latency is not None:
        config.latency.check()


def _left(grouping: Grouping) -> list[str]:
    """Return a line for each reason for which layers keep some or all of their outputs."""
    layers = defaultdict(list)
    for name, reason in grouping.kept.items():
        layers[reason].append(name)
    return [f"outputs stay of {listed(names, 4)}: {reason}" for reason, names in layers.items()]


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _millions(count: float) -> str:
    return f"{count / 1e6:.3g} M"


PRUNE_CHANNELS = register(
    Pass(
        name="prune-channels",
        summary="remove channels and everything that depends on them, and train the remaining network",
        config=PruneChannels,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        data="training",
        libraries=("torch", "torchvision", "onnx", "onnxscript"),
        resize=lambda module, example, structure: resized(module, structure, example),
        timed=lambda config: (config.latency.by,) if config.latency is not None else (),
        check=_check,
    )
)
