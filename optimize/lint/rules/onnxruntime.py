"""Rules of graphs that ONNX Runtime computes wrongly. Each names the version in which it was seen."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto, TensorProto

from optimize.lint.base import CPUS, Fault, LintTarget, rule
from optimize.lint.graph import MOVES, Graph, attribute, label

#: The rounding error of a scale in float32.
_ROUNDING = 1e-6

#: Operators whose output is never negative.
_POSITIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs")


@rule("padded-pool", "warning", CPUS)
def padded_pools(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A pool reads no zeros that a Pad puts around an image. ONNX Runtime takes them for the pool's own padding.

    ONNX Runtime (1.31, ``PadFusion``, its pull request 18136) does so by default, if nothing else reads the zeros. A
    max pool ignores its own padding. So the maximum of a zero and negative numbers becomes negative. No padding may be
    as wide as its pool. Such a graph cannot be opened. Averages with narrower padding are right. So are maxima of
    values that are never negative (see `optimize.export.onnx_graph.pool_rewrites`).
    """
    for node in graph.of("MaxPool", "AveragePool"):
        pad = _border(graph, node)
        if pad is None:
            continue
        if _wide(graph, pad, node):
            said = "and ONNX Runtime cannot open the graph: it makes the zeros a border that is as wide as the pool"
        elif node.op_type == "MaxPool" and not _positive(graph, pad):
            said = "and ONNX Runtime leaves these zeros out of its maxima"
        else:
            continue
        yield Fault(
            label(node),
            f"it reads the zeros of {label(pad)}, {said}",
            "put a Max with the lowest float, which changes nothing, between the Pad and it",
        )


@rule("counted-end", "warning", CPUS)
def counted_ends(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """An average between integers that may reach over an image's end counts no padding. Engines count other places.

    This concerns sizes that are rounded up (``ceil_mode``). ONNX Runtime (1.31, ``QLinearAveragePool``) counts places
    that do not exist. So does OpenVINO (2026.4.1) with zeros around the image (see
    `optimize.export.onnx_graph.pool_rewrites`).
    """
    for node in graph.of("AveragePool"):
        counts = attribute(node, "ceil_mode", 0) and attribute(node, "count_include_pad", 0)
        if counts and graph.dequantized(node) and (any(attribute(node, "pads", ())) or graph.before_integers(node)):
            yield Fault(
                label(node),
                "it counts a border, and may reach over the image's end, where engines count other places",
                "let it count none (count_include_pad 0), and multiply by the share that it counted",
            )


@rule("softmax-range", "warning", CPUS)
def softmax_ranges(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A softmax between integers has output steps of 1/256 or more. ONNX Runtime wraps more than 256 of them around.

    ONNX Runtime (1.31) fuses it into an integer operator (``QLinearSoftmax``) that does not saturate (see
    `optimize.quantization.lowering.softmax_shares`).
    """
    for node in graph.of("Softmax"):
        for step in _steps(graph, node) if graph.dequantized(node) else ():
            if 256 * step < 1 - _ROUNDING:
                yield Fault(
                    label(node),
                    f"its shares are quantized in steps of {step:.3g}, and ONNX Runtime wraps those above 256 around",
                    "quantize them up to 1, or put a Max with the lowest float, which changes nothing, in front of it",
                )


def _steps(graph: Graph, node: NodeProto) -> Iterator[float]:
    """Yield the scales of the quantizers behind a node."""
    waiting, seen = graph.takers(node), set[str]()
    while waiting:
        taker = waiting.pop(0)
        if taker.output[0] in seen:
            continue
        seen.add(taker.output[0])
        if taker.op_type == "QuantizeLinear":
            scale = graph.values(taker, 1)
            if scale is not None and scale.size == 1:
                yield float(scale.item())
        elif taker.op_type in MOVES:
            waiting += graph.takers(taker)


def _border(graph: Graph, pool: NodeProto) -> NodeProto | None:
    """Return the Pad whose zeros ONNX Runtime turns into a pool's own padding, or None."""
    pad = graph.producer(pool)
    if pad is not None and pad.op_type == "Cast" and graph.alone(pad):
        pad = graph.producer(pad)
    if (
        pad is None
        or pad.op_type != "Pad"
        or not graph.alone(pad)
        or attribute(pad, "mode", b"constant") != b"constant"
    ):
        return None
    sizes, number = graph.values(pad, 1), graph.values(pad, 2)
    if sizes is None or (sizes < 0).any() or not sizes.any() or any(pad.input[3:]):
        return None
    if (number is None and any(pad.input[2:3])) or (number is not None and number.any()):
        return None
    of_places = not sizes.reshape(2, -1)[:, :2].any()
    own = (
        any(attribute(pool, "pads", ()))
        and pool.op_type == "AveragePool"
        and not attribute(pool, "count_include_pad", 0)
    )
    placed = attribute(pool, "auto_pad", b"NOTSET") != b"NOTSET" or len(pool.output) > 1 or own
    return pad if of_places and not placed else None


def _wide(graph: Graph, pad: NodeProto, pool: NodeProto) -> bool:
    """Tell whether a Pad and a pool's own padding together are as wide as the pool on some side."""
    kernel = attribute(pool, "kernel_shape", ())
    sizes = graph.values(pad, 1)
    assert sizes is not None
    sides = sizes.reshape(2, -1)[:, 2:].ravel().tolist()
    own = attribute(pool, "pads", ()) or [0] * len(sides)
    return any(added + before >= width for added, before, width in zip(sides, own, [*kernel] * 2, strict=False))


def _positive(graph: Graph, pad: NodeProto) -> bool:
    """Tell whether a Pad's input is never negative."""
    given = graph.producer(pad)
    if given is None:
        return False
    if given.op_type == "DequantizeLinear":
        zero = graph.values(given, 2)
        return graph.integers(given) == TensorProto.UINT8 and (zero is None or not zero.any())
    least = graph.values(given, 1) if given.op_type == "Clip" else None
    return given.op_type in _POSITIVE or (least is not None and bool((least >= 0).all()))
