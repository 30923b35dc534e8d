"""A graph as the rules read it: producers and readers of tensors, constants, and quantizers."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto, defs, helper, numpy_helper

from optimize.lint.untrusted_tensors import check_tensor, has_numbers, values_of
from serve.runtime.errors import UserError

#: Operators with weights. Quantization is for their integer kernels.
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: Operators that a kernel fuses behind a layer.
ACTIVATIONS = ("Relu", "LeakyRelu", "Clip", "BatchNormalization", "Identity", "Dropout")
#: Operators that move values and do not change them.
MOVES = ("Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Dropout")
# Operators that clip integers to a range, or cut off their border.
_OF_INTEGERS = ("Clip", "Slice")
#: Domains whose operators the rules know. Other domains may have other operators with the same names.
DOMAINS = ("", "ai.onnx", "com.microsoft")
# A convolution's weight has three or more axes.
_LEAST_RANK = 3
# Number of byte channels that AMX multiplies at once.
_AT_ONCE = 64
#: Channels from which a group is wide enough for its AMX kernels.
WIDE_GROUP = 32


class Graph:
    """A read-only view of a model's main graph, for rules. Attributes and tensors have the types that ONNX defines.

    Operators of unknown domains are named ``domain.operator`` in it.

    Raises:
        UserError: a tensor cannot be read, an attribute has a wrong type, or a node reads a tensor that no earlier node
            gives. So no path through the graph is endless.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
        #: The last node that a rule received. See `of`.
        self.visited: NodeProto | None = None
        self.nodes: tuple[NodeProto, ...] = tuple(map(_named, graph.node))
        _check(graph, self.nodes, self.opset)
        self.outputs = {value.name for value in graph.output}
        self.inputs = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info)}
        self._producers = {output: node for node in self.nodes for output in node.output if output}
        self._takers: defaultdict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(filter(None, node.input)):
                self._takers[name].append(node)
            if node.op_type == "Constant" and (value := _constant_of(node)) is not None:
                self._tensors[node.output[0]] = value
        for node in self.nodes:  # weights stored in fewer bits: their integers are those of int8
            stored = self.tensor(node, 0) if node.op_type == "Cast" else None
            if stored is not None and attribute(node, "to", 0) == TensorProto.INT8 and has_numbers(stored):
                integers = values_of(stored).astype(np.int8)
                self._tensors[node.output[0]] = numpy_helper.from_array(integers, node.output[0])
        self._varying = self.inputs.keys() - self._tensors.keys()
        for node in self.nodes:
            if self._varying & set(node.input) or (not node.input and node.op_type != "Constant"):
                self._varying |= set(node.output) - {""}  # an empty name is an omitted output or input

    def of(self, *operators: str) -> Iterator[NodeProto]:
        """Yield the nodes of some operators, or all. `visited` is the last one, for the report of a rule's failure."""
        for node in self.nodes:
            if node.output and (not operators or node.op_type in operators):
                self.visited = node
                yield node

    def producer(self, node: NodeProto, number: int = 0) -> NodeProto | None:
        """Return the node that makes an input. None: the graph's own input, a constant, or an omitted input."""
        return self._producers.get(node.input[number]) if number < len(node.input) else None

    def takers(self, node: NodeProto) -> list[NodeProto]:
        """Return the nodes that read a node's first output."""
        return list(self._takers.get(node.output[0], ()))

    def alone(self, node: NodeProto) -> bool:
        """Tell whether a node's first output has one reader and is no output of the graph."""
        return len(self.takers(node)) == 1 and node.output[0] not in self.outputs

    def tensor(self, node: NodeProto, number: int) -> TensorProto | None:
        """Return an input that is an initializer or a constant, or None if it is computed or omitted."""
        return self._tensors.get(node.input[number]) if number < len(node.input) else None

    def values(self, node: NodeProto, number: int) -> NDArray[Any] | None:
        """Return the values of a constant input. None: as `tensor`, or the values are no real numbers."""
        tensor = self.tensor(node, number)
        return None if tensor is None or not has_numbers(tensor) else values_of(tensor)

    def constant(self, name: str) -> bool:
        """Tell whether a tensor does not depend on the graph's inputs."""
        return name not in self._varying

    def rank(self, name: str) -> int | None:
        """Return the number of axes of a tensor, or None if the file does not give it."""
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """Return the sizes of a tensor, with None for unknown ones. None: the rank is unknown, too."""
        if (tensor := self._tensors.get(name)) is not None:
            return tuple(tensor.dims)
        kind = self._types.get(name)
        if kind is None or not kind.HasField("shape"):
            return None
        # Old exporters write -1 for a size that varies. ONNX Runtime (1.31) accepts that.
        return tuple(entry.dim_value if entry.dim_value > 0 else None for entry in kind.shape.dim)

    def integers(self, node: NodeProto) -> int:
        """Return the element type (of ``TensorProto``) that a QuantizeLinear makes, or a DequantizeLinear reads."""
        takes = node.op_type == "DequantizeLinear"
        if takes:
            if (data := self.tensor(node, 0)) is not None:
                return data.data_type
            if (quantizer := self.quantizer(node)) is not None:
                return self.integers(quantizer)
        if (zero := self.tensor(node, 2)) is not None:
            return zero.data_type
        if takes:  # its own ``output_dtype`` is that of its float output
            given = self._types.get(node.input[0])
            return (given.elem_type if given is not None else 0) or TensorProto.UINT8
        return int(attribute(node, "output_dtype", 0)) or TensorProto.UINT8

    def kept_to(self, quantizer: NodeProto) -> NodeProto | None:
        """Return the Clip that reads all integers of a QuantizeLinear, or None."""
        takers = self.takers(quantizer)
        return takers[0] if len(takers) == 1 and takers[0].op_type == "Clip" else None

    def last(self, quantizer: NodeProto) -> NodeProto:
        """Return the last node with a QuantizeLinear's integers: itself, or the last Clip or Slice behind it."""
        node = quantizer
        while len(takers := self.takers(node)) == 1 and takers[0].op_type in _OF_INTEGERS:
            (node,) = takers
        return node

    def quantizer(self, dequantizer: NodeProto) -> NodeProto | None:
        """Return the QuantizeLinear whose integers a DequantizeLinear reads, perhaps clipped, or None."""
        before = self.producer(dequantizer)
        while before is not None and before.op_type in _OF_INTEGERS:
            before = self.producer(before)
        return before if before is not None and before.op_type == "QuantizeLinear" else None

    def weight(self, layer: NodeProto) -> NodeProto | None:
        """Return the DequantizeLinear of a layer's weight, if the weight is a quantized constant."""
        node = self.producer(layer, 1)
        while node is not None and node.op_type in (*MOVES, "Cast"):
            node = self.producer(node)
        dequantizes = node is not None and node.op_type == "DequantizeLinear" and self.constant(node.output[0])
        return node if dequantizes else None

    def kernel(self, convolution: NodeProto) -> tuple[int, ...] | None:
        """Return the sizes of a convolution's quantized weight, ``(out, in / groups, *kernel)``.

        None: it has no such weight, or the weight is moved behind its DequantizeLinear, as the file need not give the
        sizes then. Also None if it has too few axes for a kernel.
        """
        scaled = self.weight(convolution)
        moved = scaled is None or scaled is not self.producer(convolution, 1)
        shape = () if moved else self.stored_shape(scaled)
        return shape if len(shape) >= _LEAST_RANK else None

    def stored_shape(self, weight: NodeProto | None) -> tuple[int, ...]:
        """Return the shape of the constant that a DequantizeLinear reads, or that is quantized before it.

        Empty: none.
        """
        while weight is not None:
            if (tensor := self.tensor(weight, 0)) is not None:
                return tuple(tensor.dims)
            weight = self.producer(weight)
        return ()

    def dequantizer(self, node: NodeProto, number: int = 0, *, through: tuple[str, ...] = ()) -> NodeProto | None:
        """Return the DequantizeLinear behind an input, also through moves or the operators of ``through``, or None."""
        before = self.producer(node, number)
        while before is not None and before.op_type in (*MOVES, "Cast", *through):
            before = self.producer(before)
        return before if before is not None and before.op_type == "DequantizeLinear" else None

    def dequantized(self, node: NodeProto, number: int = 0) -> bool:
        """Tell whether an input comes from integers, moved or not."""
        return self.dequantizer(node, number) is not None

    def in_integers(self, layer: NodeProto) -> bool:
        """Tell whether a node is a layer whose input and weight are both quantized."""
        return layer.op_type in LAYERS and self.dequantized(layer) and self.weight(layer) is not None

    def behind_integers(self, node: NodeProto, number: int = 0) -> bool:
        """Tell whether an input comes from a quantized layer or from integers, through activations and sums only."""
        waiting, seen = [self.producer(node, number)], set[str]()
        while waiting:
            before = waiting.pop()
            if before is None or self.constant(before.output[0]) or before.output[0] in seen:
                continue
            if before.op_type == "DequantizeLinear" or self.in_integers(before):
                return True
            seen.add(before.output[0])
            if before.op_type in (*ACTIVATIONS, *MOVES, "Cast"):
                waiting.append(self.producer(before))
            elif before.op_type in ("Add", "Sum"):
                waiting += [self.producer(before, addend) for addend in range(len(before.input))]
        return False

    def before_integers(self, node: NodeProto) -> bool:
        """Tell whether a node's output is quantized, directly or behind activations."""
        waiting, seen = self.takers(node), set[str]()
        while waiting:
            taker = waiting.pop()
            if taker.op_type == "QuantizeLinear":
                return True
            if taker.op_type in (*ACTIVATIONS, *MOVES, "Cast") and taker.output[0] not in seen:
                seen.add(taker.output[0])
                waiting += self.takers(taker)
        return False


def of_a_map(axes: Iterable[int], rank: int | None) -> bool:
    """Tell whether axes are the rows and columns of a map: the last two of four. An unknown rank counts as four."""
    return rank in (4, None) and {axis % 4 for axis in axes} == {2, 3}


def summed_alone(equation: str) -> list[int]:
    """Return the operands of an Einsum with an axis that nothing else has. They are summed over it."""
    given, arrow, answer = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow:  # then an axis that occurs once is in the output
        return []
    others = [set(answer).union(*terms[:place], *terms[place + 1 :]) for place in range(len(terms))]
    return [place for place, term in enumerate(terms) if set(term) - others[place]]


def misfits_amx(channels: int) -> bool:
    """Tell whether OpenVINO gets 1 × 1 convolutions in groups of this width wrong with AMX, which reads 64 at once."""
    return channels > _AT_ONCE and channels % _AT_ONCE != 0 and channels % 4 == 0


def misfits_amx_narrow(groups: int, channels: int, answers: int, places: int) -> bool:
    """Tell whether torch and OpenVINO get convolutions in such groups wrong with AMX if a zero point is not 0.

    Args:
        groups: number of groups.
        channels: channels that each group reads.
        answers: channels that each group gives.
        places: number of places of the kernel.
    """
    return groups > 1 and places > 1 and channels < WIDE_GROUP and answers > 16 and answers != 32


def counts_beside(epsilon: float, step: float) -> bool:
    """Tell whether a norm's epsilon is more than a tenth of the squared step of its input."""
    return epsilon > 0.1 * step * step


def label(node: NodeProto) -> str:
    """Return the name of a node in findings: its own name, or that of its output."""
    return printable(node.name or f"{node.op_type} of {next(iter(node.output), 'nothing')}")


def qualified(node: NodeProto) -> str:
    """Return the name of a node's operator, with its domain if that is not ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain == "com.microsoft" else node.op_type


def printable(text: str, most: int = 500) -> str:
    """Return a file's text as one terminal line: truncated, and escaped if it has line ends or control characters."""
    shown = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return shown if len(shown) <= most else f"{shown[:most]}…"


def shown(integers: NDArray[Any]) -> str:
    """Return a zero point as text: the number, or the range over the channels."""
    return str(integers.item()) if integers.size == 1 else f"{integers.min()} to {integers.max()}"


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """Return the value of a node's attribute."""
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def _named(node: NodeProto) -> NodeProto:
    """Return a node as rules see it. A node of an unknown domain is not taken for ONNX's of the same name."""
    if node.domain in DOMAINS:
        return node
    renamed = NodeProto()
    renamed.CopyFrom(node)
    renamed.op_type = f"{node.domain}.{node.op_type}"
    return renamed


def _check(graph: onnx.GraphProto, nodes: Iterable[NodeProto], opset: int) -> None:
    """Check what rules rely on. See `Graph`."""
    for tensor in graph.initializer:
        check_tensor(tensor)
    sparse = (tensor.values.name for tensor in graph.sparse_initializer)
    known = {*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer), *sparse}
    made = set[str]()
    for node in nodes:
        if lacking := next((name for name in node.input if name and name not in known), None):
            raise UserError(f"{label(node)} reads {lacking[:200]!r}, which no earlier node computes")
        if twice := next((name for name in node.output if name in made), None):
            raise UserError(f"{label(node)} gives {twice[:200]!r}, which another node already computes")
        given = set(node.output) - {""}
        made |= given
        known |= given
        _check_attributes(node, opset)


def _check_attributes(node: NodeProto, opset: int) -> None:
    """Check that the attributes of an ONNX operator have its types, and that texts are UTF-8, as ONNX requires."""
    types = _attribute_types(node.op_type, opset) if node.domain in ("", "ai.onnx") else {}
    for entry in node.attribute:
        wanted = types.get(entry.name)
        if wanted is not None and entry.type != wanted:
            names = [AttributeProto.AttributeType.Name(kind) for kind in (entry.type, wanted)]
            raise UserError(f"the attribute {entry.name!r} of {label(node)} is {names[0]}, but must be {names[1]}")
        if wanted == AttributeProto.STRING and node.op_type != "Constant":
            try:
                entry.s.decode()
            except UnicodeDecodeError:
                raise UserError(
                    f"the attribute {entry.name!r} of {label(node)} is {entry.s[:80]!r}, which is not UTF-8"
                ) from None
        elif entry.type == AttributeProto.TENSOR:
            check_tensor(entry.t)


@functools.lru_cache(maxsize=1024)
def _attribute_types(operator: str, opset: int) -> dict[str, int]:
    """Return the types of an operator's attributes by name. They are empty for an operator that ONNX does not have."""
    try:
        schema: Any = defs.get_schema(operator, min(max(opset, 1), defs.onnx_opset_version()), "")
    except defs.SchemaError:
        return {}
    return {name: int(entry.type) for name, entry in schema.attributes.items()}


def _constant_of(node: NodeProto) -> TensorProto | None:
    for entry in node.attribute:
        if entry.name == "value" and node.output:
            tensor: TensorProto = entry.t
            return tensor
        if entry.name in ("value_float", "value_floats", "value_int", "value_ints") and node.output:
            kind = np.float32 if "float" in entry.name else np.int64
            return numpy_helper.from_array(np.asarray(helper.get_attribute_value(entry), kind), node.output[0])
    return None
