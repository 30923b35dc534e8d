"""Counts the zero weights in a model file of any format."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from onnx import numpy_helper
from torch import fx

from optimize.tracing.constants import attribute
from serve.runtime.card.card import Format
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program

#: ONNX operators whose second input is a weight, and operators that only pass a weight on to them.
_ONNX_LAYERS: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_PASSING: Final = frozenset({"DequantizeLinear", "QuantizeLinear", "Transpose", "Reshape", "Cast", "Identity"})
#: The same for torch's programs: prefixes of operator names, and whole names, without leading underscores.
_LAYERS: Final = ("conv1d", "conv2d", "conv3d", "convolution", "linear", "conv_transpose")
_HANDING_ON: Final = frozenset(
    {f"{way}quantize_per_{each}" for way in ("", "de") for each in ("channel", "tensor")}
    | {"to", "to_copy", "permute", "transpose", "t", "view", "reshape", "contiguous", "clone", "detach", "alias"}
)


@dataclass(frozen=True)
class Sparsity:
    """Zeros among the weights of convolutions and linear layers.

    Attributes:
        zeros: number of weights that are zero.
        weights: number of weights.
        layers: number of weight tensors.
    """

    zeros: int
    weights: int
    layers: int

    def words(self, file: str) -> str:
        """Return a sentence with the figures."""
        share = self.zeros / self.weights
        return f"{share:.1%} of the {self.weights} weights of {self.layers} layers in {file} are zero, counted there"


def sparsity(folder: Path, file: str, kind: Format) -> Sparsity | None:
    """Count the zeros of a model file. None: it has no weights that can be read.

    An integer weight is zero where it is 0, because weights have no zero point here.

    Args:
        folder: the folder of the file and of its parts.
        file: its name.
        kind: its format.
    """
    read = _READERS.get(kind)
    found = list(read(folder / file).values()) if read is not None else []
    if not found:
        return None
    return Sparsity(sum(zeros for zeros, _ in found), sum(count for _, count in found), len(found))


def constant_behind(
    tensor: str, makers: Mapping[str, onnx.NodeProto], constants: Mapping[str, onnx.TensorProto]
) -> onnx.TensorProto | None:
    """Return the constant behind a tensor of an ONNX graph, however it is stored, or None if it depends on the images.

    Args:
        tensor: its name.
        makers: the node that gives each tensor.
        constants: the graph's initializers, by name.
    """
    while tensor not in constants:
        node = makers.get(tensor)
        if node is None or node.op_type not in _PASSING:
            return None
        tensor = node.input[0]
    return constants[tensor]


#: By a name of each weight: its zeros and its size.
_Counts = dict[str, tuple[int, int]]


def _of_onnx(path: Path) -> _Counts:
    graph = onnx.load(str(path)).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    found: _Counts = {}
    for node in graph.node:
        if node.op_type not in _ONNX_LAYERS:
            continue
        weight = constant_behind(node.input[1], makers, constants)
        if weight is None:
            continue
        values = torch.from_numpy(numpy_helper.to_array(weight).astype("float32"))
        found[weight.name] = (int((values == 0).sum()), math.prod(weight.dims))
    return found


def _of_program(path: Path) -> _Counts:
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers its operators (torch 2.11 to 2.14)
    module: Any = load_program(path).module()
    assert isinstance(module, fx.GraphModule)
    found: _Counts = {}
    for node in module.graph.nodes:
        if not _called(node).startswith(_LAYERS) or len(node.args) < 2:
            continue
        weight = node.args[1]
        while isinstance(weight, fx.Node) and _called(weight) in _HANDING_ON:
            weight = weight.args[0]
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            found[str(weight.target)] = _counted(attribute(module, str(weight.target)))
    return found


def _called(node: fx.Node) -> str:
    """Return the name of the operator that a node calls, or '' if it calls none."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2].lstrip("_") if schema is not None else ""


def _of_script(path: Path) -> _Counts:
    use_int8_kernels()
    found: _Counts = {}
    for node in torch.jit.load(str(path), map_location="cpu").inlined_graph.nodes():  # type: ignore[no-untyped-call]
        name = node.kind().partition("::")[2].lstrip("_")
        inputs = list(node.inputs())
        if not name.startswith(_LAYERS) or len(inputs) < 2 or inputs[1].node().kind() != "prim::Constant":
            continue
        value = inputs[1].toIValue()
        if isinstance(value, torch.ScriptObject):
            value = unpacked(value)[0]
        if isinstance(value, torch.Tensor):
            found[inputs[1].debugName()] = _counted(value)
    return found


def unpacked(packed: torch.ScriptObject) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of a layer that was packed for torch's int8 kernels."""
    weight, bias = getattr(torch.ops.quantized, f"{packed_kind(packed)}_unpack")(packed)
    return weight, bias


def packed_kind(packed: torch.ScriptObject) -> str:
    """Return the prefix of a packed weight's operators: linear, conv2d or conv3d (conv1d uses conv2d's)."""
    name = str(packed._type()).rpartition(".")[2]
    return name.removesuffix("PackedParamsBase").lower()


def _counted(weight: torch.Tensor) -> tuple[int, int]:
    values = weight.dequantize() if weight.is_quantized else weight
    return int((values == 0).sum()), values.numel()


_READERS: Final[Mapping[str, Callable[[Path], _Counts]]] = {
    "onnx": _of_onnx,
    "exported_program": _of_program,
    "torchscript": _of_script,
}
