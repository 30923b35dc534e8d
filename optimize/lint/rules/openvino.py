"""Rules of graphs that OpenVINO computes wrongly. Each names the version in which it was seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from onnx import NodeProto

from optimize.lint.base import CPUS, Fault, LintTarget, rule
from optimize.lint.graph import (
    MOVES,
    Graph,
    attribute,
    counts_beside,
    label,
    misfits_amx,
    misfits_amx_narrow,
    of_a_map,
    shown,
    summed_alone,
)

# Operators that make a tensor of a given size, with the number of that input.
_SIZED = {"Expand": 1, "Tile": 1, "ConstantOfShape": 0}

# Operators between a size and that input.
_SIZES_PASS = ("Concat", "Unsqueeze", "Squeeze", "Reshape", "Cast", "Identity", "Mul", "Where", "Max")


@rule("norm-floor", "warning", CPUS)
def norm_floors(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A norm that divides its integers' values has a lower bound of half a step. Engines leave a residue of zeros.

    OpenVINO (2026.4.1) fuses quantizer and dequantizer into one FakeQuantize. A zero then leaves the rounding errors of
    its zero point. With a bound of 1e-12, a vector of such errors is divided by its own length. Its length becomes one.
    No other norm is below a step, so a bound of half a step changes no quotient (see
    `optimize.quantization.lowering.openvino.norm_floors`). A norm may have other uses, such as a logarithm or the
    quotient of another tensor. There such a bound matters.
    """
    for node in graph.of("Clip", "Max"):
        number, norm = _norm(graph, node)
        if norm is None or len(node.input) < 2:
            continue
        given, floor = graph.dequantizer(norm), graph.values(node, 1 - number)
        if given is None or floor is None or floor.size != 1 or not _divides(graph, node, given):
            continue
        scale, zero = graph.values(given, 1), graph.values(given, 2)
        if scale is None or scale.size != 1 or zero is None or not zero.any():
            continue
        if 0 < (least := float(floor.item())) < (half := 0.5 * float(scale.item())) * (1 - 1e-6):
            yield Fault(
                label(node),
                f"it keeps the norm of integers from zero by {least:.2g}, and a step of theirs is {2 * half:.2g}",
                f"keep it from zero by half a step, {half:.2g}",
            )


@rule("integer-reduction", "warning", CPUS)
def reductions(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Sums and means over axes do not read dequantized values. OpenVINO reduces the integers, and wrongly.

    OpenVINO (2026.4.1) moves the DequantizeLinear behind them. Means over the last two of four axes are right (see
    `optimize.quantization.lowering.openvino.reductions`).
    """
    for node in graph.of("ReduceSum", "ReduceMean", "Einsum"):
        if not any(graph.dequantized(node, place) for place in _reduced(graph, node)):
            continue
        yield Fault(
            label(node),
            "it reduces what is dequantized, and OpenVINO computes wrong values for that",
            "put a Max with the lowest float, which changes nothing, between the DequantizeLinear and it",
        )


@rule("integer-extreme", "warning", CPUS)
def extremes(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Maxima and minima of floats over axes are not quantized right behind. OpenVINO compares bytes, and wrongly.

    OpenVINO (2026.4.1) lets them write the quantizer's bytes. Over dequantized values they are right (see
    `optimize.quantization.lowering.openvino.extremes`).
    """
    for node in graph.of("ReduceMax", "ReduceMin"):
        if not graph.dequantized(node) and graph.before_integers(node):
            yield Fault(
                label(node),
                "a quantizer reads it, and OpenVINO computes wrong values for that",
                "put a Max with the lowest float, which changes nothing, between it and the QuantizeLinear",
            )


@rule("integer-border", "warning", CPUS)
def borders(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Dequantized values get no padding along one axis, except zeros with zero point 0. OpenVINO fills it wrongly.

    OpenVINO (2026.4.1) moves the DequantizeLinear behind the Pad. Padding along two axes is right (see
    `optimize.quantization.lowering.openvino.borders`).
    """
    for node in graph.of("Pad"):
        given, sizes = graph.dequantizer(node, through=("Slice",)), graph.values(node, 1)
        if given is None or sizes is None or attribute(node, "mode", b"constant") != b"constant":
            continue
        shifted = [values for values in (graph.values(given, 2), graph.values(node, 2)) if values is not None]
        if any(values.any() for values in shifted) and sizes.reshape(2, -1).any(0).sum() == 1:
            yield Fault(
                label(node),
                "it puts a border along one axis around what is dequantized, and OpenVINO computes wrong values there",
                "put a Max with the lowest float, which changes nothing, between the DequantizeLinear and it",
            )


@rule("norm-epsilon", "warning", CPUS)
def norm_epsilons(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A norm of dequantized values has an epsilon that is tiny beside their variance. OpenVINO adds it to integers.

    OpenVINO (2026.4.1) normalizes the integers. Their variances are larger by the square of their scale (see
    `optimize.quantization.lowering.openvino.reductions`).
    """
    for node in graph.of("LayerNormalization", "InstanceNormalization", "GroupNormalization"):
        given = graph.dequantizer(node)
        scale = None if given is None else graph.values(given, 1)
        epsilon = attribute(node, "epsilon", 1e-5)
        if scale is not None and scale.size == 1 and counts_beside(epsilon, step := float(scale.item())):
            yield Fault(
                label(node),
                f"it adds {epsilon:.2g} to variances of steps of {step:.2g}, and OpenVINO adds it to those of integers",
                "put a Max with the lowest float, which changes nothing, between the DequantizeLinear and it",
            )


@rule("counted-zeros", "warning", CPUS)
def counted_zeros(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """An average that counts zeros around a map reads no integers with a zero point. OpenVINO counts the integer 0.

    OpenVINO (2026.4.1) averages the integers and dequantizes afterwards (see
    `optimize.quantization.lowering.openvino.borders`).
    """
    for node in graph.of("AveragePool"):
        given = graph.dequantizer(node) if attribute(node, "count_include_pad", 0) else None
        zero = None if given is None else graph.values(given, 2)
        if zero is not None and zero.any() and any(attribute(node, "pads", ())):
            yield Fault(
                label(node),
                f"it counts zeros around what is dequantized, whose zero is {shown(zero)}: OpenVINO takes 0 for it",
                "put a Max with the lowest float, which changes nothing, between the DequantizeLinear and it",
            )


@rule("group-width", "warning", CPUS)
def group_widths(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A group of a quantized 1×1 convolution reads up to 64 channels, or 64 n. OpenVINO gets others wrong with AMX.

    On CPUs with AMX, OpenVINO (2026.4.1) has a kernel for 1×1 convolutions without stride or padding. It reads 64
    channels at once, also those of the next group. All results are wrong if a group has another multiple of 4 (72, 96,
    120). Other widths use another kernel. If a group also gives more than 64 channels, it raised "No reorder available"
    at run time. All were right with padding, and with ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI`` (see
    `optimize.quantization.lowering.amx.group_widths`).
    """
    for node in graph.of("Conv"):
        weight = graph.kernel(node)
        if weight is None or not graph.dequantized(node) or attribute(node, "group", 1) == 1:
            continue
        _, width, *kernel = weight
        placed = any(attribute(node, "pads", ())) or any(step > 1 for step in attribute(node, "strides", ()))
        if {*kernel} == {1} and not placed and misfits_amx(width):
            yield Fault(
                label(node),
                f"its groups read {width} channels, and OpenVINO computes wrong values for that on CPUs with AMX",
                "give it a border along one axis, and cut that off its integers",
            )


@rule("narrow-groups", "warning", CPUS)
def narrow_groups(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A group of a convolution of several places reads 32 channels or more. OpenVINO gets fewer wrong with AMX.

    OpenVINO (2026.4.1) computes only the first group right. This concerns groups with more than 16 outputs (except 32)
    that read integers with a zero point (see `optimize.quantization.lowering.amx.narrow_groups`).
    """
    for node in graph.of("Conv"):
        weight, given, groups = graph.kernel(node), graph.dequantizer(node), attribute(node, "group", 1)
        zero = None if given is None else graph.values(given, 2)
        if weight is None or zero is None or not zero.any() or groups < 1:
            continue
        answers, channels, *kernel = weight
        if misfits_amx_narrow(groups, channels, answers // groups, math.prod(kernel)):
            yield Fault(
                label(node),
                f"its groups read {channels} channels, and OpenVINO computes wrong values for that on CPUs with AMX",
                "put groups together, with zeros for the weights between them",
            )


@rule("joined-pair", "warning", CPUS)
def joined(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A ReLU or arithmetic with a constant reads a concatenation, not its quantized values. OpenVINO ends the process.

    OpenVINO (2026.4.1) opens such a graph with a step, ``MoveFakeQuantize``. It ends with SIGSEGV if the pair behind
    the Concat has a zero point (see `optimize.quantization.lowering.openvino.concatenations`).
    """
    for node in graph.of("Relu", "Mul", "Add", "Sub", "Div"):
        varying = [number for number, name in enumerate(node.input) if not graph.constant(name)]
        parts = _put_together(graph, node, varying[0]) if len(varying) == 1 else None
        if parts is None or not graph.before_integers(node):
            continue
        given = graph.producer(node, varying[0])
        zero = None if given is None else graph.values(given, 2)
        if zero is not None and zero.any():
            yield Fault(
                label(node),
                f"it reads what {label(parts)} puts together behind a quantizer: OpenVINO ends the process for that",
                "give all parts the quantizer's scale and zero-point, and have it read them without that",
            )


@rule("joined-tokens", "warning", CPUS)
def joined_tokens(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A linear layer reads no integers that are concatenated along another axis. OpenVINO cannot open such a graph.

    OpenVINO (2026.4.1) moves the quantizer in front of the Concat. Then it divides the layer's weight by a scale for
    each token (see `optimize.quantization.lowering.openvino.concatenations`).
    """
    for node in graph.of("MatMul", "Gemm"):
        parts = _put_together(graph, node, 0)
        if parts is None or not graph.in_integers(node):
            continue
        rank, axis = graph.rank(parts.output[0]), attribute(parts, "axis", 0)
        if rank is not None and axis % rank != rank - 1:
            yield Fault(
                label(node),
                f"it reads what {label(parts)} puts together of integers along another axis: OpenVINO cannot open that",
                "put a Max with the lowest float, which changes nothing, between the Concat and its QuantizeLinear",
            )


def _put_together(graph: Graph, node: NodeProto, number: int) -> NodeProto | None:
    """Return the Concat of integers from which an input comes, behind its own pair, or None."""
    found = graph.producer(node, number)
    for operator in ("DequantizeLinear", "QuantizeLinear"):
        if found is None or found.op_type != operator:
            return None
        found = graph.producer(found)
    if found is None or found.op_type != "Concat":
        return None
    return found if all(graph.dequantized(found, part) for part in range(len(found.input))) else None


def _reduced(graph: Graph, node: NodeProto) -> Sequence[int]:
    """Return the inputs that a node sums or averages, except over a map."""
    if node.op_type == "Einsum":
        return summed_alone(attribute(node, "equation", b"").decode(errors="replace"))
    axes = graph.values(node, 1)
    listed = attribute(node, "axes", ()) if axes is None else axes.ravel().tolist()
    return [] if node.op_type == "ReduceMean" and of_a_map(listed, graph.rank(node.input[0])) else [0]


@rule("counted-images", "warning", CPUS)
def counted(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Nothing is repeated for the number of images that the graph counts. OpenVINO then loses a quantized layer's bias.

    OpenVINO (2026.4.1) reads that number from another tensor with as many images. If that is a convolution's output,
    it then has a second reader between it and its bias (see
    `optimize.export.onnx_graph.engine_rewrites.write_out_copies`). It was seen where one size of a Shape is taken.
    `zeros_like`, which takes all sizes, was right.
    """
    if not any(len(layer.input) > 2 and graph.in_integers(layer) for layer in graph.of("Conv")):
        return
    for node in graph.of(*_SIZED):
        if _counts(graph, node, _SIZED[node.op_type]):
            yield Fault(
                label(node),
                "it makes as many copies as the graph counts images, and OpenVINO may lose a layer's bias by it",
                "make what all images share once, and add a zero of each to it; expand what is of each by -1 there",
            )


def _counts(graph: Graph, node: NodeProto, number: int) -> bool:
    """Tell whether an input contains the first size of a tensor, taken from its Shape alone."""
    waiting, seen = [graph.producer(node, number)], set[str]()
    while waiting:
        before = waiting.pop()
        if before is None or before.output[0] in seen:
            continue
        seen.add(before.output[0])
        if before.op_type in _SIZES_PASS:
            waiting += [graph.producer(before, part) for part in range(len(before.input))]
        elif before.op_type == "Shape":  # from opset 15 on it may give one size by itself
            if (attribute(before, "start", 0), attribute(before, "end", 0)) == (0, 1):
                return True
        elif before.op_type in ("Gather", "Slice"):
            shape, first = graph.producer(before), graph.values(before, 1)
            if shape is not None and shape.op_type == "Shape" and first is not None and not first.any():
                return True
    return False


def _divides(graph: Graph, floored: NodeProto, given: NodeProto) -> bool:
    """Tell whether a DequantizeLinear's values are divided by a node's, each perhaps moved or repeated."""
    waiting, seen = [floored], set[str]()
    while waiting:
        node = waiting.pop()
        if node.output[0] in seen:  # otherwise n moves that meet again would have 2 ** n paths
            continue
        seen.add(node.output[0])
        for taker in graph.takers(node):
            if taker.op_type in (*MOVES, "Cast", "Expand") and taker.input[0] == node.output[0]:
                waiting.append(taker)
            elif taker.op_type == "Div" and taker.input[1] == node.output[0]:
                divided = graph.dequantizer(taker)  # each reader may have its own dequantizer
                if divided is not None and divided.input[:] == given.input[:]:
                    return True
    return False


def _norm(graph: Graph, node: NodeProto) -> tuple[int, NodeProto | None]:
    """Return the norm that a Clip or a Max bounds, and the number of that input, or None."""
    for number in (0, 1) if node.op_type == "Max" else (0,):  # either input of a maximum may be the bound
        norm = graph.producer(node, number)
        if norm is not None and norm.op_type in ("ReduceL1", "ReduceL2"):
            return number, norm
    return 0, None
