"""A graph as the rules read it: who makes a tensor, who takes it, which are constants, and what quantizes what."""

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

#: Operators with weights, whose integer kernels are what quantization is for.
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: What a kernel takes along behind a layer.
ACTIVATIONS = ("Relu", "LeakyRelu", "Clip", "BatchNormalization", "Identity", "Dropout")
#: What moves numbers and changes none.
MOVES = ("Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Dropout")
# What keeps integers to a range, or cuts off a border of theirs.
_OF_INTEGERS = ("Clip", "Slice")
#: Whose operators rules know by their names; other domains may have others of the same name.
DOMAINS = ("", "ai.onnx", "com.microsoft")
# Axes of images, channels and kernels: a convolution's weight has three or more.
_LEAST_RANK = 3
# How many channels of bytes AMX multiplies at once.
_AT_ONCE = 64
#: Channels that a group is wide enough with for its kernels for AMX.
WIDE_GROUP = 32


class Graph:
    """A read-only view of a model's main graph, for rules: its attributes and tensors have the types that ONNX says.

    Operators of domains that no rule knows are named ``domain.operator`` in it.

    Raises:
        UserError: a tensor cannot be read, an attribute has another type than its operator's, or a node reads what no
            node before it gives (so that no path through the graph is endless).
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
        #: The node that a rule was given last; see `of`.
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
        for node in self.nodes:  # weights that are stored in fewer bits: their integers are those of int8
            stored = self.tensor(node, 0) if node.op_type == "Cast" else None
            if stored is not None and attribute(node, "to", 0) == TensorProto.INT8 and has_numbers(stored):
                integers = values_of(stored).astype(np.int8)
                self._tensors[node.output[0]] = numpy_helper.from_array(integers, node.output[0])
        self._varying = self.inputs.keys() - self._tensors.keys()
        for node in self.nodes:
            if self._varying & set(node.input) or (not node.input and node.op_type != "Constant"):
                self._varying |= set(node.output) - {""}  # an output that is left out is no input that is left out

    def of(self, *operators: str) -> Iterator[NodeProto]:
        """The nodes of some operators, or all of them; `visited` is the last, for whoever reports a rule's failure."""
        for node in self.nodes:
            if node.output and (not operators or node.op_type in operators):
                self.visited = node
                yield node

    def producer(self, node: NodeProto, number: int = 0) -> NodeProto | None:
        """The node that makes an input; None for the graph's own inputs, constants, and inputs that are left out."""
        return self._producers.get(node.input[number]) if number < len(node.input) else None

    def takers(self, node: NodeProto) -> list[NodeProto]:
        """The nodes that take a node's first output."""
        return list(self._takers.get(node.output[0], ()))

    def alone(self, node: NodeProto) -> bool:
        """Whether a node's first output goes to one node, and is no answer of the graph."""
        return len(self.takers(node)) == 1 and node.output[0] not in self.outputs

    def tensor(self, node: NodeProto, number: int) -> TensorProto | None:
        """An input that is an initializer or a constant; None where it is computed or left out."""
        return self._tensors.get(node.input[number]) if number < len(node.input) else None

    def values(self, node: NodeProto, number: int) -> NDArray[Any] | None:
        """The values of a constant input; None as `tensor`, and where they are no real numbers but strings, say."""
        tensor = self.tensor(node, number)
        return None if tensor is None or not has_numbers(tensor) else values_of(tensor)

    def constant(self, name: str) -> bool:
        """Whether a tensor depends on nothing that the graph is given."""
        return name not in self._varying

    def rank(self, name: str) -> int | None:
        """How many axes a tensor has; None where the file does not say."""
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """The sizes of a tensor, None for each that the file does not say; None where it does not say the rank."""
        if (tensor := self._tensors.get(name)) is not None:
            return tuple(tensor.dims)
        kind = self._types.get(name)
        if kind is None or not kind.HasField("shape"):
            return None
        # Old exporters write -1 for a size that varies, which ONNX Runtime (1.31) reads so.
        return tuple(entry.dim_value if entry.dim_value > 0 else None for entry in kind.shape.dim)

    def integers(self, node: NodeProto) -> int:
        """The element type (of ``TensorProto``) that a QuantizeLinear makes, or a DequantizeLinear takes."""
        takes = node.op_type == "DequantizeLinear"
        if takes:
            if (data := self.tensor(node, 0)) is not None:
                return data.data_type
            if (quantizer := self.quantizer(node)) is not None:
                return self.integers(quantizer)
        if (zero := self.tensor(node, 2)) is not None:
            return zero.data_type
        if takes:  # its own ``output_dtype`` is of the floats that it gives
            given = self._types.get(node.input[0])
            return (given.elem_type if given is not None else 0) or TensorProto.UINT8
        return int(attribute(node, "output_dtype", 0)) or TensorProto.UINT8

    def kept_to(self, quantizer: NodeProto) -> NodeProto | None:
        """The Clip that all of a QuantizeLinear's integers go through; None if there is none."""
        takers = self.takers(quantizer)
        return takers[0] if len(takers) == 1 and takers[0].op_type == "Clip" else None

    def last(self, quantizer: NodeProto) -> NodeProto:
        """What a QuantizeLinear's integers are read from: itself, or what they all go through and stay integers in."""
        node = quantizer
        while len(takers := self.takers(node)) == 1 and takers[0].op_type in _OF_INTEGERS:
            (node,) = takers
        return node

    def quantizer(self, dequantizer: NodeProto) -> NodeProto | None:
        """The QuantizeLinear whose integers a DequantizeLinear takes, perhaps cut off; None: they are of another."""
        before = self.producer(dequantizer)
        while before is not None and before.op_type in _OF_INTEGERS:
            before = self.producer(before)
        return before if before is not None and before.op_type == "QuantizeLinear" else None

    def weight(self, layer: NodeProto) -> NodeProto | None:
        """The DequantizeLinear that gives a layer its weight, if its weight is a quantized constant."""
        node = self.producer(layer, 1)
        while node is not None and node.op_type in (*MOVES, "Cast"):
            node = self.producer(node)
        dequantizes = node is not None and node.op_type == "DequantizeLinear" and self.constant(node.output[0])
        return node if dequantizes else None

    def kernel(self, convolution: NodeProto) -> tuple[int, ...] | None:
        """The sizes of a convolution's quantized weight, ``(out, in / groups, *kernel)``.

        None where it is none, or is moved behind its DequantizeLinear: the file need not say what it is then. None as
        well where it has too few axes for a kernel.
        """
        scaled = self.weight(convolution)
        moved = scaled is None or scaled is not self.producer(convolution, 1)
        shape = () if moved else self.stored_shape(scaled)
        return shape if len(shape) >= _LEAST_RANK else None

    def stored_shape(self, weight: NodeProto | None) -> tuple[int, ...]:
        """The shape of the constant that a DequantizeLinear takes, or that is quantized before it; empty: none."""
        while weight is not None:
            if (tensor := self.tensor(weight, 0)) is not None:
                return tuple(tensor.dims)
            weight = self.producer(weight)
        return ()

    def dequantizer(self, node: NodeProto, number: int = 0, *, through: tuple[str, ...] = ()) -> NodeProto | None:
        """The DequantizeLinear that an input comes from, moved or not, or ``through`` others; None: something else."""
        before = self.producer(node, number)
        while before is not None and before.op_type in (*MOVES, "Cast", *through):
            before = self.producer(before)
        return before if before is not None and before.op_type == "DequantizeLinear" else None

    def dequantized(self, node: NodeProto, number: int = 0) -> bool:
        """Whether an input comes from integers, moved or not."""
        return self.dequantizer(node, number) is not None

    def in_integers(self, layer: NodeProto) -> bool:
        """Whether a node is a layer whose input and weight are both quantized."""
        return layer.op_type in LAYERS and self.dequantized(layer) and self.weight(layer) is not None

    def behind_integers(self, node: NodeProto, number: int = 0) -> bool:
        """Whether an input comes from a quantized layer or from integers, through activations and sums at most."""
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
        """Whether what a node gives is quantized, behind activations at most."""
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
    """Whether axes are the rows and columns of a map: the two last of four, which an unknown rank is taken for."""
    return rank in (4, None) and {axis % 4 for axis in axes} == {2, 3}


def summed_alone(equation: str) -> list[int]:
    """Which operands of an Einsum have an axis that nothing else has, so that they are summed over it."""
    given, arrow, answer = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow:  # then an axis that is there once is the answer's
        return []
    others = [set(answer).union(*terms[:place], *terms[place + 1 :]) for place in range(len(terms))]
    return [place for place, term in enumerate(terms) if set(term) - others[place]]


def misfits_amx(channels: int) -> bool:
    """Whether OpenVINO gets 1 × 1 convolutions in groups of so many channels wrong with AMX, which takes 64 at once."""
    return channels > _AT_ONCE and channels % _AT_ONCE != 0 and channels % 4 == 0


def misfits_amx_narrow(groups: int, channels: int, answers: int, places: int) -> bool:
    """Whether torch and OpenVINO get convolutions in such groups wrong with AMX where an integer that is not 0 is zero.

    Args:
        groups: of the convolution.
        channels: that each reads.
        answers: that each gives.
        places: of the kernel.
    """
    return groups > 1 and places > 1 and channels < WIDE_GROUP and answers > 16 and answers != 32


def counts_beside(epsilon: float, step: float) -> bool:
    """Whether what a norm adds to a variance is more than a tenth of the square of a step of what is normed."""
    return epsilon > 0.1 * step * step


def label(node: NodeProto) -> str:
    """How a finding names a node: by its name, or by what it gives."""
    return printable(node.name or f"{node.op_type} of {next(iter(node.output), 'nothing')}")


def qualified(node: NodeProto) -> str:
    """The name of a node's operator, with its domain where that is not ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain == "com.microsoft" else node.op_type


def printable(text: str, most: int = 500) -> str:
    """A text of a file as one line of a terminal: escaped where it has line ends or control characters, and cut off."""
    shown = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return shown if len(shown) <= most else f"{shown[:most]}…"


def shown(integers: NDArray[Any]) -> str:
    """How a finding tells a zero-point: by its number, or by the ends of the channels'."""
    return str(integers.item()) if integers.size == 1 else f"{integers.min()} to {integers.max()}"


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """The value of a node's attribute."""
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def _named(node: NodeProto) -> NodeProto:
    """A node as rules see it: one of a domain that they do not know is not taken for ONNX's of the same name."""
    if node.domain in DOMAINS:
        return node
    renamed = NodeProto()
    renamed.CopyFrom(node)
    renamed.op_type = f"{node.domain}.{node.op_type}"
    return renamed


def _check(graph: onnx.GraphProto, nodes: Iterable[NodeProto], opset: int) -> None:
    """Check what rules rely on; see `Graph`."""
    for tensor in graph.initializer:
        check_tensor(tensor)
    sparse = (tensor.values.name for tensor in graph.sparse_initializer)
    known = {*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer), *sparse}
    made = set[str]()
    for node in nodes:
        if lacking := next((name for name in node.input if name and name not in known), None):
            raise UserError(f"{label(node)} reads {lacking[:200]!r}, which nothing in front of it gives")
        if twice := next((name for name in node.output if name in made), None):
            raise UserError(f"{label(node)} gives {twice[:200]!r}, which another node gives already")
        given = set(node.output) - {""}
        made |= given
        known |= given
        _check_attributes(node, opset)


def _check_attributes(node: NodeProto, opset: int) -> None:
    """Check that the attributes of an operator of ONNX's have its types, and that texts are UTF-8, as ONNX asks."""
    types = _attribute_types(node.op_type, opset) if node.domain in ("", "ai.onnx") else {}
    for entry in node.attribute:
        wanted = types.get(entry.name)
        if wanted is not None and entry.type != wanted:
            names = [AttributeProto.AttributeType.Name(kind) for kind in (entry.type, wanted)]
            raise UserError(f"the attribute {entry.name!r} of {label(node)} is {names[0]}, and must be {names[1]}")
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
    """The types of an operator's attributes by their names; none of an operator that ONNX has not."""
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
