"""The channels of a network as records: layers by the labels of their channels, and the nodes that count channels."""

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
        per_group: input channels of each group. None: there is one group.
        kernel: shape of its weight after the channels.
        places: output positions for one image, over all calls.
    """

    name: str
    out: torch.Tensor
    into: torch.Tensor
    per_group: int | None
    kernel: tuple[int, ...]
    places: int

    def macs(self, out: int, into: int) -> int:
        """Return the multiply-accumulates of one image with these numbers of channels."""
        return weighted_macs((out, self.per_group or into, *self.kernel), self.places)


@dataclass(frozen=True)
class Cut:
    """A node that contains numbers of channels: a pad, slice, split or reshape.

    Attributes:
        node: its name.
        dim: the dimension of the channels, from the last, -1. For a slice it counts from the first, 0.
        parts: labels behind each number. For a pad: those added before and after. For a slice: those before it and in
            it. For a split: those of each part. For a reshape: all.
    """

    node: str
    dim: int
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Channels:
    """The channels of a network: its layers, tensors with a number for each channel, and nodes that count channels."""

    labels: Labels
    layers: dict[str, Layer]
    norms: dict[str, torch.Tensor]
    cuts: dict[str, Cut]
