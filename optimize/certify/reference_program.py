"""Reads the reference program as layers, with their integers and the results of exact arithmetic.

The program (see `optimize.quantization.lowering.qdq`) has explicit quantize and dequantize operators around float
operators. A layer is everything between one quantizer and those before it: a convolution with its activation, a sum, a
pool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import MOVES, moved, quantizing
from optimize.quantization.lowering.integer_biases import dequantizers
from optimize.quantization.lowering.openvino.concatenations import read_joined
from optimize.quantization.lowering.uneven_padding import put_padding, take_padding
from optimize.tracing.constants import constant_value
from serve.runtime.card.card import Preprocessing
from serve.runtime.images.image_preprocessing import normalise

_ATEN = torch.ops.aten

#: Activations that clamp values and do nothing else.
_CLAMPS = frozenset(
    getattr(_ATEN, name).default
    for name in (
        "relu",
        "relu_",
        "relu6",
        "relu6_",
        "hardtanh",
        "hardtanh_",
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_max",
    )
)
_CASTS = frozenset({_ATEN._to_copy.default, _ATEN.to.dtype, _ATEN.to.dtype_layout})


@dataclass(frozen=True)
class Quantizer:
    """The rounding of a layer's result: ``clamp(round(value / scale) + zero_point, low, high)``, of a dtype."""

    scale: float
    zero_point: int
    low: int
    high: int
    dtype: torch.dtype

    @property
    def whole_range(self) -> tuple[int, int]:
        """The least and the largest integer of the type."""
        kind = torch.iinfo(self.dtype)
        return kind.min, kind.max


@dataclass(frozen=True)
class Layer:
    """The operators between quantizers.

    Attributes:
        number: its position in the program, from 0.
        name: its operators, with the name of the module that has the weights.
        quantizer: the quantizer of its result.
        before: numbers of the layers whose integers it reads. Empty: it reads the image.
        node: the node of the quantizer.
        inside: its nodes in order, with the dequantizers.
    """

    number: int
    name: str
    quantizer: Quantizer
    before: tuple[int, ...]
    node: fx.Node
    inside: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Batch:
    """Images, and the integers that layers get for them.

    Attributes:
        pixels: ``uint8 (N, C, H, W)``.
        images: the same, normalised, ``float32``.
        integers: the integers of layers' results, by number.
    """

    pixels: torch.Tensor
    images: torch.Tensor
    integers: Mapping[int, torch.Tensor]


class ReferenceLayers:
    """A reference program as layers. Use it from one thread only.

    Args:
        program: the reference.
        joined: whether readers of a concatenation need no quantizer, as in graphs for CPUs. See `read_joined`.
        padded: whether convolutions pad after quantization, as in graphs. See `take_padding`.
    """

    def __init__(self, program: torch.export.ExportedProgram, *, joined: bool = False, padded: bool = False) -> None:
        module = program.module()
        assert isinstance(module, fx.GraphModule)
        if joined:
            read_joined(module)
        if padded:
            put_padding(module, take_padding(module))
        self._module = module
        self._image = next(node for node in module.graph.nodes if node.op == "placeholder")
        quantizers = [node for node in module.graph.nodes if quantizing(node) == "quantize_per_tensor"]
        self._numbers = {node: number for number, node in enumerate(quantizers)}
        self.layers = tuple(self._layer(node) for node in quantizers)

    @property
    def steps(self) -> tuple[float | None, ...]:
        """The scale of the quantizer of each of the program's outputs. None: a float operator computes the output."""
        answer: Any = next(node for node in self._module.graph.nodes if node.op == "output").args[0]
        ends = [moved(node) for node in (answer if isinstance(answer, tuple | list) else (answer,))]
        return tuple(float(end.args[1]) if quantizing(end) == "dequantize_per_tensor" else None for end in ends)

    def shown(self, pixels: torch.Tensor, preprocessing: Preprocessing) -> Batch:
        """Run the program on images ``uint8 (N, C, H, W)``.

        Returns:
            The images with the integers of every layer's result.
        """
        images = normalise(pixels, preprocessing, torch.device("cpu"), torch.float32)
        found = _Noting(self._module, self._numbers)
        with torch.no_grad():
            found.run(images)
        return Batch(pixels, images, found.integers)

    def exact(
        self, layer: Layer, batch: Batch, *, activations: bool = True, range_: bool = True, whole_biases: bool = False
    ) -> torch.Tensor:
        """Return a layer's result in integers before rounding, in float64. Products and sums of bytes are exact there.

        Args:
            layer: the layer.
            batch: its inputs.
            activations: whether ReLUs and similar operators clamp. Otherwise they pass all values on.
            range_: whether to clamp to the quantizer's range. Otherwise to its type's range.
            whole_biases: whether to round biases to integers of their products' scale, as int32 sums do.
        """
        quantizer = layer.quantizer
        values: dict[fx.Node, Any] = {self._image: batch.images.double()}
        values |= {self.layers[number].node: batch.integers[number].double() for number in layer.before}
        with torch.no_grad():
            for node in layer.inside:
                if node.target is _ATEN.sym_size.int:
                    values[node] = len(batch.images)
                elif node.op == "get_attr":
                    values[node] = self._constant(node)
                else:
                    values[node] = _computed(node, values, activations=activations, whole_biases=whole_biases)
            value: torch.Tensor = values[_only(layer.node.args[0])] / quantizer.scale + quantizer.zero_point
        ends = (quantizer.low, quantizer.high) if range_ else quantizer.whole_range
        return value.clamp(*ends)

    def _constant(self, node: fx.Node) -> Any:
        found = constant_value(self._module, node)
        return found.double() if isinstance(found, torch.Tensor) and found.is_floating_point() else found

    def _layer(self, node: fx.Node) -> Layer:
        inside: set[fx.Node] = set()
        before: set[int] = set()
        waiting = [_only(node.args[0])]
        while waiting:
            each = waiting.pop()
            if each in self._numbers:
                before.add(self._numbers[each])
            elif each.op != "placeholder" and each not in inside:
                inside.add(each)
                # A size is that of the batch, whichever tensor it is read from.
                waiting += [] if each.target is _ATEN.sym_size.int else each.all_input_nodes
        ordered = tuple(each for each in self._module.graph.nodes if each in inside)
        scale, zero_point, low, high, dtype = node.args[1:6]
        assert isinstance(scale, float)
        assert isinstance(zero_point, int)
        assert isinstance(low, int)
        assert isinstance(high, int)
        assert isinstance(dtype, torch.dtype)
        return Layer(
            number=self._numbers[node],
            name=_name(ordered),
            quantizer=Quantizer(scale, zero_point, low, high, dtype),
            before=tuple(sorted(before)),
            node=node,
            inside=ordered,
        )


class _Noting(fx.Interpreter):
    """Records the integers of quantizers while a program runs."""

    def __init__(self, module: fx.GraphModule, numbers: Mapping[fx.Node, int]) -> None:
        super().__init__(module)
        self._numbers = numbers
        self.integers: dict[int, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._numbers:
            self.integers[self._numbers[n]] = value
        return value


def _computed(node: fx.Node, values: Mapping[fx.Node, Any], *, activations: bool, whole_biases: bool) -> Any:
    """Return the value of a node in float64."""
    mapped: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda other: values[other])
    given, named = mapped
    operator = quantizing(node)
    if operator == "dequantize_per_tensor":
        return (given[0] - given[2]) * given[1]
    if operator == "dequantize_per_channel":
        weight, scales, zeros, axis = given[:4]
        shape = [-1 if place == axis else 1 for place in range(weight.ndim)]
        return (weight.double() - zeros.double().view(shape)) * scales.double().view(shape)
    if node.target in _CASTS or (node.target in _CLAMPS and not activations):
        return given[0]
    assert callable(node.target)
    if whole_biases and (step := _step_of_products(node, values)) is not None:
        given = (*given[:2], (given[2] / step).round() * step, *given[3:])
    return node.target(*given, **named)


def _step_of_products(node: fx.Node, values: Mapping[fx.Node, Any]) -> torch.Tensor | None:
    """Return the scale of each output channel's integer products of a layer with a bias, or None."""
    found = dequantizers(node)
    if found is None:
        return None
    given, weight = found
    scales: torch.Tensor = values[_only(weight.args[1])]
    scale = given.args[1]
    assert isinstance(scale, float)
    return scales.double() * scale


def _only(node: Any) -> fx.Node:
    assert isinstance(node, fx.Node)
    return node


def _name(nodes: tuple[fx.Node, ...]) -> str:
    """Return a name such as ``conv1: conv2d relu``: the module with the weights, if any, and the operators."""
    called = [node for node in nodes if node.op == "call_function" and not quantizing(node)]
    computing = [node for node in called if node.target not in MOVES and node.target is not _ATEN.sym_size.int]
    operators = " ".join(re.sub(r"_\d+$", "", node.name) for node in computing or called) or "the image"
    modules = [path for node in computing if (path := _module(node))]
    return f"{modules[0]}: {operators}" if modules else operators


def _module(node: fx.Node) -> str:
    """Return the path of a node's module, or '' if it is unknown."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].")
