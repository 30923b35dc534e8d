"""Matches an engine's pieces with the layers of an ONNX graph and their MACs.

Engines rename and join layers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import shape_inference

from optimize.export.macs import product_macs, weighted_macs
from optimize.export.sparsity import constant_behind
from optimize.profiling.layer_names import called

#: The operators in our graphs that have MACs.
_COMPUTING: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
#: What engines add to names: ONNX Runtime 1.31 (``_nchwc``, ``_token_7``, ``fused ``), OpenVINO 2026.4.
_ADDED: Final = re.compile(r"^fused |/WithoutBiases$|/fq_\w+$|(_token_\d+)+$|_nchwc$|/duplicated$")
_ROOT: Final = "module."
#: A weight's name without this is the layer's name.
_OF_A_WEIGHT: Final = re.compile(r"[._](weight|kernel)\w*$")


@dataclass(frozen=True)
class GraphLayer:
    """A convolution, linear layer or product of a graph: its name in the model, MACs of a batch, bytes of weights."""

    name: str
    macs: int
    weights: int


class GraphLayers:
    """The layers of a graph. Each is assigned once to a piece of an engine.

    Args:
        path: the graph. External weights are not read.
        batch: the number of images in one batch.
        known: names and MACs of the network's layers in order, which name the layers of an int8 graph.
    """

    def __init__(self, path: Path, batch: int, known: Sequence[tuple[str, int]] = ()) -> None:
        model = onnx.load(path, load_external_data=False)
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = batch
        self._graph = shape_inference.infer_shapes(model, data_prop=True).graph
        self._constants = {tensor.name: tensor for tensor in self._graph.initializer}
        self._makers = {output: node for node in self._graph.node for output in node.output}
        self._shapes = {name: tuple(tensor.dims) for name, tensor in self._constants.items()}
        for value in (*self._graph.value_info, *self._graph.input, *self._graph.output):
            dims = value.type.tensor_type.shape.dim
            self._shapes[value.name] = tuple(dim.dim_value for dim in dims)
        self._layers = {node.output[0]: self._layer(node) for node in self._graph.node if node.op_type in _COMPUTING}
        computing = {output: layer for output, layer in self._layers.items() if layer.macs}
        names = called([layer.macs for layer in computing.values()], known)
        for (output, layer), name in zip(computing.items(), names or (), strict=False):
            self._layers[output] = dataclasses.replace(layer, name=name)
        self._by_name = {node.name: node.output[0] for node in self._graph.node if node.name}
        self._left = dict(self._layers)

    @property
    def macs(self) -> int:
        """Return the MACs of the whole graph."""
        return sum(layer.macs for layer in self._layers.values())

    @property
    def left(self) -> int:
        """Return the MACs of the layers that were not assigned."""
        return sum(layer.macs for layer in self._left.values())

    def take(self, executed: str) -> GraphLayer | None:
        """Assign and return the layer that an engine executes under a name. None if no layer is left."""
        for name in _aliases(executed):
            output = self._computed(self._by_name.get(name, name))
            layer: GraphLayer | None = self._left.pop(output, None) if output is not None else None
            if layer is not None:
                return layer
        return None

    def _computed(self, tensor: str) -> str | None:
        """Return the output of the nearest layer before a tensor, or the tensor itself if it is one."""
        waiting, seen = [tensor], {tensor}
        while waiting:
            name = waiting.pop(0)
            if name in self._layers:
                return name
            node = self._makers.get(name)
            fresh = [one for one in node.input if one not in seen] if node is not None else []
            seen.update(fresh)
            waiting += fresh
        return None

    def _layer(self, node: onnx.NodeProto) -> GraphLayer:
        answer = self._shapes.get(node.output[0], ())
        first = self._shapes.get(node.input[0], ())
        weight = next((found for one in node.input[:2] if (found := self._constant(one)) is not None), None)
        if node.op_type == "ConvTranspose":
            macs = weighted_macs(self._shapes[node.input[1]], _places(first))
        elif node.op_type == "Conv":
            macs = weighted_macs(self._shapes[node.input[1]], _places(answer))
        else:
            turned = any(entry.name == "transA" and entry.i for entry in node.attribute)
            macs = product_macs(answer, first[-2 if turned else -1]) if answer and first else 0
        name = node.name or node.output[0]
        if weight is None:
            return GraphLayer(name, macs, 0)
        size = math.prod(weight.dims) * _itemsize(weight.data_type)
        own = _OF_A_WEIGHT.sub("", weight.name)
        while own.startswith(_ROOT):  # the module that preprocesses the network's input adds this prefix
            own = own.removeprefix(_ROOT)
        return GraphLayer(name if own in ("", _ROOT.rstrip(".")) else own, macs, size)

    def _constant(self, tensor: str) -> onnx.TensorProto | None:
        """Return the constant of a tensor, however it is stored."""
        return constant_behind(tensor, self._makers, self._constants)


def _aliases(executed: str) -> Iterator[str]:
    """Yield an engine's name, and then the name with less and less of what the engine added."""
    yield executed
    while (shorter := _ADDED.sub("", executed, count=1)) != executed:
        executed = shorter
        yield executed


def _places(shape: tuple[int, ...]) -> int:
    """Return the number of positions of a tensor ``(N, C, ...)``, without its channels."""
    return math.prod((*shape[:1], *shape[2:]))


def _itemsize(kind: int) -> int:
    return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)
