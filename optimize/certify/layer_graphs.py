"""Cuts a QDQ graph into one graph for each layer, from the integers of earlier quantizers to its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from optimize.certify.reference_program import Batch, Layer
from optimize.lint.graph import Graph
from serve.runtime.errors import PipelineError


class GraphLayers:
    """A QDQ graph whose quantizers are those of a reference program, in its order.

    Args:
        model: with its initializers.
        layers: the layers of the program.

    Raises:
        PipelineError: its quantizers are not the program's.
    """

    def __init__(self, model: onnx.ModelProto, layers: Sequence[Layer]) -> None:
        self._model = model
        self._graph = Graph(model)
        self.image = next(iter(self._graph.inputs.keys() - {tensor.name for tensor in model.graph.initializer}))
        quantizers = [node for node in self._graph.of("QuantizeLinear") if not self._graph.constant(node.output[0])]
        self._quantizers = dict(zip((layer.number for layer in layers), self._matched(quantizers, layers), strict=True))
        self._ends = {number: self._graph.last(node) for number, node in self._quantizers.items()}
        self._numbers = {node.output[0]: number for number, node in self._ends.items()}
        self._makers = {output: node for node in model.graph.node for output in node.output}

    @property
    def takes_pixels(self) -> bool:
        """Whether the graph normalises its images itself."""
        return bool(self._graph.inputs[self.image] == TensorProto.UINT8)

    def given(self, layer: Layer, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a layer's graph for a batch, as arrays by name.

        The image may be among them: a graph that needs the number of images reads it from its own input.
        """
        _, names = self._slice(self._ends[layer.number])
        image = (batch.pixels if self.takes_pixels else batch.images).numpy()
        return {
            name: image if name == self.image else batch.integers[self._numbers[name]].contiguous().numpy()
            for name in names
        }

    def alone(self, layer: Layer, batch: Batch) -> bytes:
        """Return a layer's graph.

        Its inputs are the integers of earlier layers, or the image. Its output is its own integers.

        Args:
            layer: the layer.
            batch: as the reference received it. The shapes are those of its integers, for any number of images.
        """
        end = self._ends[layer.number]
        inside, given = self._slice(end)
        if {number for name in given if (number := self._numbers.get(name)) is not None} != set(layer.before):
            raise PipelineError(
                f"layer {layer.number} ({layer.name}) has other inputs in the graph than in the program"
            )
        inputs = [self._value(name, batch) for name in given]
        kind = self._graph.integers(self._quantizers[layer.number])
        output = helper.make_tensor_value_info(end.output[0], kind, _shape(batch, layer.number))
        used = {name for node in inside for name in node.input}
        constants = [tensor for tensor in self._model.graph.initializer if tensor.name in used]
        graph = helper.make_graph(inside, "layer", inputs, [output], constants)
        alone = helper.make_model(graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version)
        body: bytes = alone.SerializeToString()
        return body

    def _slice(self, end: onnx.NodeProto) -> tuple[list[onnx.NodeProto], list[str]]:
        """Return the nodes between earlier layers and a layer's last node, in order, and their inputs.

        The last node gives the layer's integers: the quantizer, or the node that clips them or cuts off their border.
        """
        made: set[str] = set()
        given: dict[str, None] = {}
        waiting = list(end.input)
        while waiting:
            name = waiting.pop()
            maker = self._makers.get(name)
            if name in self._numbers or name == self.image:
                given[name] = None
            elif maker is not None and maker.output[0] not in made:
                made.add(maker.output[0])
                waiting += [each for each in maker.input if each]
        inside = [node for node in self._model.graph.node if node.output[0] in made]
        return [*inside, end], list(given)

    def _value(self, name: str, batch: Batch) -> onnx.ValueInfoProto:
        if name == self.image:
            found: onnx.ValueInfoProto = next(value for value in self._model.graph.input if value.name == name)
            return found
        number = self._numbers[name]
        kind = self._graph.integers(self._quantizers[number])
        return helper.make_tensor_value_info(name, kind, _shape(batch, number))

    def _matched(self, quantizers: Sequence[onnx.NodeProto], layers: Sequence[Layer]) -> list[onnx.NodeProto]:
        """Return the graph's quantizer of each layer. The exporter keeps the program's order."""
        if len(quantizers) == len(layers) and all(map(self._is_of, quantizers, layers)):
            return list(quantizers)
        raise PipelineError(
            f"the {len(quantizers)} quantizers of the graph do not match the {len(layers)} of its reference program: "
            "it was not made from that program"
        )

    def _is_of(self, node: onnx.NodeProto, layer: Layer) -> bool:
        scale, zero = self._graph.values(node, 1), self._graph.values(node, 2)
        return (
            scale is not None
            and np.size(scale) == 1
            and math.isclose(float(scale), layer.quantizer.scale, rel_tol=1e-6)
            and (0 if zero is None else int(zero)) == layer.quantizer.zero_point
        )


def _shape(batch: Batch, number: int) -> tuple[str | int, ...]:
    return ("batch", *batch.integers[number].shape[1:])
