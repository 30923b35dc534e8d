"""A graph that takes pixels: the network behind the normalisation that the runtime would do before it."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from optimize.context import Context
from serve.config import Config
from serve.runtime.card import InputType, Preprocessing

#: What a graph takes.
GraphInput = Literal["uint8", "float"]

INPUT_TYPES: dict[GraphInput, InputType] = {"uint8": "uint8", "float": "float32"}


class TakesPixels(Config):
    """The setting of the passes that write a graph: what it takes."""

    input: GraphInput = Field(
        default="uint8",
        description="what the graph takes: uint8, pixels as they are, which it normalises itself (the same answers; at "
        "least as fast in most rows of docs/bench-cpu.md, slower in others), or float, normalised float32",
    )


class FromPixels(nn.Module):
    """``uint8 (N, C, H, W)`` pixels to what ``module`` gives for them normalised.

    The formula is that of ``serve.runtime.images.normalise``, with the same constants in float32, so that both give
    equal bits. It stays in front of the first layer and is not folded into its weights: that layer's padding is zero
    after the normalisation, where a folded one would be as if it were zero before it.
    """

    factor: torch.Tensor
    shift: torch.Tensor

    def __init__(self, module: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        std = torch.tensor(preprocessing.std).view(1, -1, 1, 1)
        mean = torch.tensor(preprocessing.mean).view(1, -1, 1, 1)
        self.register_buffer("factor", 1 / (255 * std))
        self.register_buffer("shift", mean / std)
        self.module = module
        self.training = module.training  # eval() would reach an exported module, which has none

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)``."""
        logits: torch.Tensor = self.module(pixels.to(torch.float32) * self.factor - self.shift)
        return logits


def entered(module: nn.Module, given: GraphInput, preprocessing: Preprocessing) -> nn.Module:
    """``module``, which takes normalised float32, as a network that takes what the graph is to take."""
    return FromPixels(module, preprocessing) if given == "uint8" else module


def graph_input(context: Context, given: GraphInput, images: int) -> torch.Tensor:
    """Training images ``(images, C, H, W)`` as the graph takes them."""
    return context.pixels(images) if given == "uint8" else context.example(images)
