"""Levels the tensors that a concatenation joins: they share one scale, of which a small tensor would use few steps.

What computes the small tensor is multiplied by a power of two, and what reads it is divided by it. So the answers stay
the same to the last bit, unless a number leaves the range of the smallest or largest floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.recovery.equalization import homogeneous, multiply_inputs, multiply_rows, plain, reads_of
from optimize.store.layer_effects import Effect

FIGURE = "ranges that it joins, largest to smallest"

#: The ratio of two ranges from which on the smaller one is scaled. It then has 64 of the 256 steps.
_APART = 4.0
_JOINING = (torch.cat, torch.concat, torch.concatenate)
#: Further functions with f(s x) = s f(x), where s > 0.
_RESIZING = (
    functional.interpolate,
    functional.max_pool2d,
    functional.avg_pool2d,
    functional.adaptive_avg_pool2d,
    functional.adaptive_max_pool2d,
)


class _FixedError(Exception):
    """A value cannot be scaled."""


@dataclass
class _Scaling:
    """What changes if values are scaled: the layers that compute them, and channels of the layers that read them."""

    made: set[str] = field(default_factory=set)
    read: set[tuple[str, int, int]] = field(default_factory=set)
    values: set[fx.Node] = field(default_factory=set)


def level(module: fx.GraphModule, example: torch.Tensor) -> list[Effect]:
    """Level what each concatenation of channels joins, in place, as far as the layers around can take the factors.

    Args:
        module: traced, without norms, in eval mode.
        example: images ``(N, C, H, W)``, on which ranges are found.

    Returns:
        For each concatenation that was levelled, the ratio of the ranges that it joins.
    """
    joins = [node for node in module.graph.nodes if _parts(node)]
    if not joins:
        return []
    levels = _Levels(module)
    before = now = _ranges(module, joins, example)
    for join in joins:
        largest = max(now[join])
        changes = [
            levels.multiply(part, 2.0 ** math.floor(math.log2(largest / reach)))
            for part, reach in zip(_parts(join), now[join], strict=True)
            if 0 < _APART * reach <= largest
        ]
        if any(changes):
            now = _ranges(module, joins, example)
    pairs = ((join, _apart(before[join]), _apart(now[join])) for join in joins)
    return [Effect(join.name, FIGURE, first, last) for join, first, last in pairs if last < first]


class _Levels:
    """Multiplies values of a traced module by factors that its layers take up."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._calls, self._tied = reads_of(module)

    def multiply(self, value: fx.Node, factor: float) -> bool:
        """Multiply a value by a factor and divide it where it is read. Return False if something cannot take it."""
        scaling = _Scaling()
        try:
            self._scale(value, scaling)
        except _FixedError:
            return False
        for name in scaling.made:
            layer = self._module.get_submodule(name)
            multiply_rows(layer, torch.full((len(_weight(layer)),), factor))
        for name, first, last in scaling.read:
            layer = self._module.get_submodule(name)
            factors = torch.ones(_inputs(layer))
            factors[first:last] = 1 / factor
            multiply_inputs(layer, factors)
        return True

    def _scale(self, value: fx.Node, scaling: _Scaling) -> None:
        """Collect what changes if all of a value is scaled, and nothing else.

        Raises:
            _FixedError: something computes or reads it that cannot take a factor.
        """
        if value in scaling.values:
            return
        scaling.values.add(value)
        if self._plain(value):
            scaling.made.add(str(value.target))
        elif self._homogeneous(value):
            self._scale(value.all_input_nodes[0], scaling)
        elif parts := _parts(value):
            for part in parts:
                self._scale(part, scaling)
        else:
            raise _FixedError
        self._follow(value, 0, None, scaling)

    def _follow(self, value: fx.Node, first: int, channels: int | None, scaling: _Scaling) -> None:
        """Collect what reads a value whose channels from ``first`` on are scaled. None: all of them."""
        for user in value.users:
            if user in scaling.values:
                continue
            if self._plain(user):
                width = _inputs(self._module.get_submodule(str(user.target)))
                scaling.read.add((str(user.target), first, width if channels is None else first + channels))
            elif channels is None and self._homogeneous(user):
                self._scale(user, scaling)
            elif self._homogeneous(user):
                self._follow(user, first, channels, scaling)
            elif parts := _parts(user):
                places = [place for place, part in enumerate(parts) if part is value]
                for place in places:
                    before = sum(self._channels(part) for part in parts[:place])
                    own = self._channels(value) if channels is None else channels
                    self._follow(user, before + first, own, scaling)
            else:
                raise _FixedError

    def _channels(self, value: fx.Node) -> int:
        """Return the number of channels of a value that layers and homogeneous operations compute."""
        if self._plain(value):
            return len(_weight(self._module.get_submodule(str(value.target))))
        if parts := _parts(value):
            return sum(map(self._channels, parts))
        if self._homogeneous(value):
            return self._channels(value.all_input_nodes[0])
        raise _FixedError

    def _plain(self, node: fx.Node) -> bool:
        return plain(self._module, node, self._calls, self._tied) and isinstance(
            self._module.get_submodule(str(node.target)), nn.Conv2d
        )

    def _homogeneous(self, node: fx.Node) -> bool:
        if len(node.all_input_nodes) != 1:
            return False
        called = self._module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        return homogeneous(self._module, node) or isinstance(called, nn.Upsample) or called in _RESIZING


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, wanted: set[fx.Node]) -> None:
        super().__init__(module)
        self._wanted = wanted
        self.ranges: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n in self._wanted:
            self.ranges[n] = float(found.abs().max())
        return found


def _ranges(module: fx.GraphModule, joins: list[fx.Node], example: torch.Tensor) -> Mapping[fx.Node, list[float]]:
    """Return the largest magnitude of each tensor that the concatenations join."""
    recorder = _Recorder(module, {part for join in joins for part in _parts(join)})
    with torch.no_grad():
        recorder.run(example)
    return {join: [recorder.ranges[part] for part in _parts(join)] for join in joins}


def _apart(ranges: list[float]) -> float:
    some = [reach for reach in ranges if reach > 0]
    return max(some) / min(some) if some else 1.0


def _parts(node: fx.Node) -> list[fx.Node]:
    """Return the tensors whose channels a node joins. Empty: it does something else."""
    if node.op != "call_function" or node.target not in _JOINING:
        return []
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    parts, axis = given.get("tensors"), given.get("dim", given.get("axis", 0))
    return [*parts] if axis == 1 and isinstance(parts, (list, tuple)) else []


def _weight(layer: nn.Module) -> torch.Tensor:
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight


def _inputs(layer: nn.Module) -> int:
    return int(layer.in_channels)  # type: ignore[arg-type]
