"""A graph that takes pixels: the network behind the normalisation that the runtime would otherwise do."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from pydantic import Field
from torch import fx, nn

from optimize.context import Context
from optimize.tracing.aten_program import is_program
from serve.common.config import Config
from serve.runtime.card.card import InputType, Preprocessing
from serve.runtime.outputs import Answer

#: The input of a graph.
GraphInput = Literal["uint8", "float"]

INPUT_TYPES: dict[GraphInput, InputType] = {"uint8": "uint8", "float": "float32"}

_ATEN = torch.ops.aten


class TakesPixels(Config):
    """The setting of passes that write a graph: its input."""

    input: GraphInput = Field(
        default="uint8",
        description="input of the graph: uint8 (raw pixels, which the graph normalizes; the same answers and usually "
        "at least as fast) or float (normalized float32)",
    )


class FromPixels(nn.Module):
    """Maps ``uint8 (N, C, H, W)`` pixels to the output of ``module`` for the normalised pixels.

    The formula is that of ``serve.runtime.images.image_preprocessing.normalise``, with the same constants in float32,
    so that both give equal bits. It stays in front of the first layer and is not folded into its weights. The layer
    pads with zeros after the normalisation. A folded layer would pad with zeros before it.
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

    def forward(self, pixels: torch.Tensor) -> Answer:
        """Return what the network returns."""
        answer: Answer = self.module(pixels.to(torch.float32) * self.factor - self.shift)
        return answer


def entered(module: nn.Module, given: GraphInput, preprocessing: Preprocessing) -> nn.Module:
    """Return ``module``, which takes normalised float32, as a network that takes the graph's input."""
    if given == "float":
        return module
    whole = FromPixels(module, preprocessing)
    return _as_one_graph(whole, module) if is_program(module) else whole


def _as_one_graph(whole: FromPixels, program: fx.GraphModule) -> fx.GraphModule:
    """Return ``whole``, whose module is a program, as one program. Its steps are written into a copy of the graph."""
    (images,) = program.graph.find_nodes(op="placeholder")
    graph = fx.Graph()
    pixels = graph.placeholder("pixels")
    pixels.meta.update(images.meta)  # for the symbol of the batch size; the dtype comes from an example
    floats = graph.call_function(_ATEN.to.dtype, (pixels, torch.float32))
    scaled = graph.call_function(_ATEN.mul.Tensor, (floats, graph.get_attr("factor")))
    normalised = graph.call_function(_ATEN.sub.Tensor, (scaled, graph.get_attr("shift")))
    # The program's check that the images are float32 is left out.
    known = dict.fromkeys(program.graph.find_nodes(op="call_module"), normalised) | {images: normalised}
    answer = graph.graph_copy(program.graph, known)
    for tensor in program.graph.find_nodes(op="get_attr"):
        known[tensor].target = f"module.{tensor.target}"
    graph.output(answer)
    graph.set_codegen(copy.copy(program.graph._codegen))
    return fx.GraphModule(whole, graph)


def graph_input(context: Context, given: GraphInput, images: int) -> torch.Tensor:
    """Return training images ``(images, C, H, W)`` in the type that the graph takes."""
    return context.pixels(images) if given == "uint8" else context.example(images)
