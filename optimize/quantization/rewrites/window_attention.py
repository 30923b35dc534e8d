"""Writes out window attention, of torchvision's Swin and its second version, as layers and products."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional
from torchvision.models.swin_transformer import shifted_window_attention

from optimize.quantization.graph.editing import Writer, replace, scaled, shape_of
from optimize.tracing.constants import NotConstantError, constant_value


@dataclass(frozen=True)
class _Windows:
    """The division of a map of tokens: sides of the map, of a window, and the shift of the windows."""

    sides: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]
    channels: int

    @property
    def counts(self) -> tuple[int, int]:
        """Number of rows and columns of windows. The last ones may reach beyond the map."""
        return -(-self.sides[0] // self.window[0]), -(-self.sides[1] // self.window[1])

    @property
    def padding(self) -> tuple[int, int]:
        """The missing places at the bottom and on the right."""
        tall, wide = (count * side for count, side in zip(self.counts, self.window, strict=True))
        return tall - self.sides[0], wide - self.sides[1]

    @property
    def length(self) -> int:
        """Number of tokens in a window."""
        return math.prod(self.window)

    def cut(self, write: Writer, image: fx.Node) -> fx.Node:
        """Write ``(N, H, W, C)`` as ``(N windows, length, C)``."""
        if any(self.padding):
            image = write.function(functional.pad, image, (0, 0, 0, self.padding[1], 0, self.padding[0]))
        if any(self.shift):
            image = write.function(torch.roll, image, shifts=(-self.shift[0], -self.shift[1]), dims=(1, 2))
        (rows, columns), (tall, wide) = self.counts, self.window
        parts = write.method("reshape", image, -1, rows, tall, columns, wide, self.channels)
        return write.method("reshape", write.method("permute", parts, 0, 1, 3, 2, 4, 5), -1, self.length, self.channels)

    def join(self, write: Writer, parts: fx.Node) -> fx.Node:
        """Write the inverse of `cut`."""
        (rows, columns), (tall, wide) = self.counts, self.window
        parts = write.method("reshape", parts, -1, rows, columns, tall, wide, self.channels)
        parts = write.method("permute", parts, 0, 1, 3, 2, 4, 5)
        image = write.method("reshape", parts, -1, rows * tall, columns * wide, self.channels)
        if any(self.shift):
            image = write.function(torch.roll, image, shifts=self.shift, dims=(1, 2))
        if any(self.padding):
            inside = (slice(None), *(slice(0, side) for side in self.sides))
            image = write.function(operator.getitem, image, inside)
        return image

    def mask(self) -> torch.Tensor:
        """Return the mask that separates tokens of a shifted window that are not neighbours in the image.

        Returns:
            0 or -100, ``(windows, 1, length, length)``.
        """
        part = torch.zeros([count * side for count, side in zip(self.counts, self.window, strict=True)])
        ends = [
            ((0, -side), (-side, -moved), (-moved, None)) for side, moved in zip(self.window, self.shift, strict=True)
        ]
        number = 0
        for top, bottom in ends[0]:
            for left, right in ends[1]:
                part[top:bottom, left:right] = number
                number += 1
        (rows, columns), (tall, wide) = self.counts, self.window
        part = part.view(rows, tall, columns, wide).permute(0, 2, 1, 3).reshape(rows * columns, -1)
        apart = part.unsqueeze(1) != part.unsqueeze(2)
        return torch.zeros(apart.shape).masked_fill(apart, -100.0).unsqueeze(1)


def write_window(module: fx.GraphModule, node: fx.Node) -> bool:
    """Write out torchvision's window attention, with a mask for shifted windows (Liu et al. 2021, arXiv:2103.14030).

    With ``logit_scale`` it is the cosine attention of its second version (arXiv:2111.09883, section 3.2).
    """
    asked = _bound(node)
    shape = shape_of(asked["input"])
    names = ("qkv_weight", "proj_weight", "relative_position_bias", "qkv_bias", "proj_bias", "logit_scale")
    try:
        constants = {name: constant_value(module, asked[name]) for name in names}
    except NotConstantError:
        return False
    if shape is None or asked["training"] or not window_name(node):
        return False
    windows = _Windows((shape[1], shape[2]), tuple(asked["window_size"]), (0, 0), shape[3])
    # Windows are not shifted along an axis that one window spans.
    shift = [0 if count == 1 else by for count, by in zip(windows.counts, asked["shift_size"], strict=True)]
    windows = dataclasses.replace(windows, shift=(shift[0], shift[1]))
    write = Writer(module, window_name(node))
    tokens = windows.cut(write, asked["input"])
    query, key, value = _projected(write, tokens, constants, asked["num_heads"], windows.length)
    scores = write.function(torch.matmul, query, write.method("transpose", key, -2, -1))
    scores = _placed(write, scores, constants, asked["num_heads"], windows)
    mixed = write.function(torch.matmul, write.softmax(scores, asked["attention_dropout"]), value)
    mixed = write.method("reshape", write.method("permute", mixed, 0, 2, 1, 3), -1, windows.length, windows.channels)
    answer = write.linear("proj.merged", mixed, constants["proj_weight"], constants["proj_bias"])
    replace(node, windows.join(write, write.dropout(answer, asked["dropout"])))
    return True


def _projected(
    write: Writer, tokens: fx.Node, constants: Mapping[str, torch.Tensor | None], heads: int, length: int
) -> list[fx.Node]:
    """Return query, key and value, each ``(N windows, heads, length, depth)``.

    For cosine attention they are normalised.
    """
    weight, bias = constants["qkv_weight"], constants["qkv_bias"]
    assert weight is not None
    weights = list(weight.chunk(3))
    biases: list[torch.Tensor | None] = [None] * 3 if bias is None else list(bias.chunk(3))
    depth = len(weights[0]) // heads
    cosine = constants["logit_scale"] is not None
    if cosine:
        biases[1] = None  # keys have no bias in the second version, whatever the parameter holds
    else:
        weights[0], biases[0] = weights[0] * depth**-0.5, scaled(biases[0], depth**-0.5)
    found = []
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        part = write.linear(f"qkv.{name}", tokens, weight, bias)
        part = write.method("permute", write.method("reshape", part, -1, length, heads, depth), 0, 2, 1, 3)
        if cosine and name != "value":
            # This is `functional.normalize` without its Expand in ONNX, since a division broadcasts. OpenVINO 2026.4.1
            # gives wrong results where a quantizer follows an Expand.
            norm = write.function(torch.linalg.vector_norm, part, dim=-1, keepdim=True)
            part = write.function(operator.truediv, part, write.method("clamp_min", norm, 1e-12))
        found.append(part)
    return found


def _placed(
    write: Writer, scores: fx.Node, constants: Mapping[str, torch.Tensor | None], heads: int, windows: _Windows
) -> fx.Node:
    """Add what depends on positions to the scores: their bias, and the mask of shifted windows."""
    if (logit_scale := constants["logit_scale"]) is not None:
        factor = logit_scale.clamp(max=math.log(100.0)).exp()
        scores = write.function(operator.mul, scores, write.constant("logit_factor", factor))
    bias = constants["relative_position_bias"]
    assert bias is not None
    scores = write.function(operator.add, scores, write.constant("relative_position_bias", bias))
    if any(windows.shift):
        mask = write.constant("mask", windows.mask(), trained=False)
        square = (windows.length, windows.length)
        scores = write.method("reshape", scores, -1, math.prod(windows.counts), heads, *square)
        scores = write.method("reshape", write.function(operator.add, scores, mask), -1, heads, *square)
    return scores


def _bound(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of torchvision's function, by name."""
    call = inspect.signature(shifted_window_attention).bind(*node.args, **node.kwargs)
    call.apply_defaults()
    return call.arguments


def window_name(node: fx.Node) -> str:
    """Return the name of the module whose attention this call is, or '' if the graph does not tell."""
    weight = _bound(node)["qkv_weight"]
    return str(weight.target).rpartition(".")[0].rpartition(".")[0] if isinstance(weight, fx.Node) else ""
