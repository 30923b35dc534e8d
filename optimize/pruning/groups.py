"""Groups of channels that may be removed one by one, and layers that must stay whole, with the reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from optimize.pruning.channels import Channels


@dataclass(frozen=True)
class Group:
    """Units at the same places of the network, which are interchangeable.

    A unit is the least that can be removed: one channel of a layer with the channels that are added to it in other
    layers, or one group of a grouped convolution.

    Attributes:
        units: the numbers of the sets of labels.
        layers: names of the layers with these outputs, and the number of outputs in a unit.
    """

    units: tuple[int, ...]
    layers: Mapping[str, int]


@dataclass(frozen=True)
class Grouping:
    """The removable and the fixed channels of a network.

    Attributes:
        channels: the channels of the network.
        groups: groups of removable units.
        kept: the reasons why outputs of layers must stay, by layer.
    """

    channels: Channels
    groups: tuple[Group, ...]
    kept: Mapping[str, str]


def group(channels: Channels, whole: Mapping[str, str]) -> Grouping:
    """Group the channels of a network.

    Args:
        channels: the result of `channels_of`.
        whole: further layers that must stay whole, by name, with the reason.
    """
    for name, reason in whole.items():
        channels.labels.keep(channels.layers[name].out, reason)
    places: dict[int, Counter[str]] = defaultdict(Counter)
    for place, labels in _places(channels):
        for unit in channels.labels.sets(labels).tolist():
            places[unit][place] += 1
    alike: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for unit, counts in places.items():
        if channels.labels.reason(unit) is None:
            alike[tuple(sorted(counts.items()))].append(unit)
    groups = []
    for key, units in alike.items():
        layers = {place.removeprefix("out "): count for place, count in key if place.startswith("out ")}
        if layers:  # padding zeros to which no layer's channels are added cannot be chosen
            groups.append(Group(tuple(units), layers))
    return Grouping(channels, tuple(groups), _kept(channels))


def _places(channels: Channels) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield every place at which channels are counted: its name and labels."""
    for layer in channels.layers.values():
        yield f"out {layer.name}", layer.out
        yield f"in {layer.name}", layer.into
    for name, labels in channels.norms.items():
        yield f"norm {name}", labels
    for cut in channels.cuts.values():
        for number, labels in enumerate(cut.parts):
            yield f"cut {cut.node} {number}", labels


def _kept(channels: Channels) -> dict[str, str]:
    """Return the reasons why layers keep outputs, by layer. Layers that keep none are left out."""
    found = {}
    for layer in channels.layers.values():
        reasons = (channels.labels.reason(unit) for unit in channels.labels.sets(layer.out).tolist())
        if (reason := next((reason for reason in reasons if reason is not None), None)) is not None:
            found[layer.name] = reason
    return found
