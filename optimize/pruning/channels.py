"""The channels of a network as records: its layers by the labels of their channels, and what counts them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optimize.export.macs import weighted_macs
from optimize.pruning.channel_labels import Labels


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer.

    Attributes:
        name: of the module.
        out: labels of its outputs, ``int64 (out,)``.
        into: labels of its inputs, ``int64 (in,)``.
        per_group: input channels of each group; None where there is one group.
        kernel: shape of its weight behind the channels.
        places: positions of its answer for one image, of all calls.
    """

    name: str
    out: torch.Tensor
    into: torch.Tensor
    per_group: int | None
    kernel: tuple[int, ...]
    places: int

    def macs(self, out: int, into: int) -> int:
        """Multiply-accumulates of one image with so many channels."""
        return weighted_macs((out, self.per_group or into, *self.kernel), self.places)


@dataclass(frozen=True)
class Cut:
    """A node that has numbers of channels written into it: a pad, slice, split or reshape.

    Attributes:
        node: its name.
        dim: the dimension of the channels: from the last, -1, and of a slice from the first, 0.
        parts: labels of each number: what a pad adds before and after, a slice leaves before itself and holds, each
            part of a split, or all.
    """

    node: str
    dim: int
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Channels:
    """The channels of a network: its layers, what holds a number for each channel, and what counts them."""

    labels: Labels
    layers: dict[str, Layer]
    norms: dict[str, torch.Tensor]
    cuts: dict[str, Cut]
