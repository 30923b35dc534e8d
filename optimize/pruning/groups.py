"""Groups of channels that may be removed one by one, and the layers that must stay whole, with the reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from optimize.pruning.channels import Channels


@dataclass(frozen=True)
class Group:
    """Units that stand in the same places of the network, so that one is as good as another.

    A unit is what can only be removed together: one channel of a layer, with those that are added to it in other
    layers, or one group of a grouped convolution.

    Attributes:
        units: the numbers of the sets of labels.
        layers: names of the layers whose outputs they are, with how many of each layer's a unit has.
    """

    units: tuple[int, ...]
    layers: Mapping[str, int]


@dataclass(frozen=True)
class Grouping:
    """What can be removed of a network, and what cannot.

    Attributes:
        channels: of the network.
        groups: of units that can be removed.
        kept: why layers' outputs cannot, by layer.
    """

    channels: Channels
    groups: tuple[Group, ...]
    kept: Mapping[str, str]


def group(channels: Channels, whole: Mapping[str, str]) -> Grouping:
    """Gather the channels of a network.

    Args:
        channels: what `channels_of` found.
        whole: why layers are to stay whole, by name, beside those that have to.
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
        if layers:  # zeros that a pad adds and no layer's channels are added to are nobody's to choose
            groups.append(Group(tuple(units), layers))
    return Grouping(channels, tuple(groups), _kept(channels))


def _places(channels: Channels) -> Iterable[tuple[str, torch.Tensor]]:
    """Every place in which channels are counted, by name, with its labels."""
    for layer in channels.layers.values():
        yield f"out {layer.name}", layer.out
        yield f"in {layer.name}", layer.into
    for name, labels in channels.norms.items():
        yield f"norm {name}", labels
    for cut in channels.cuts.values():
        for number, labels in enumerate(cut.parts):
            yield f"cut {cut.node} {number}", labels


def _kept(channels: Channels) -> dict[str, str]:
    """Why layers keep outputs, by layer; those that keep none are left out."""
    found = {}
    for layer in channels.layers.values():
        reasons = (channels.labels.reason(unit) for unit in channels.labels.sets(layer.out).tolist())
        if (reason := next((reason for reason in reasons if reason is not None), None)) is not None:
            found[layer.name] = reason
    return found
