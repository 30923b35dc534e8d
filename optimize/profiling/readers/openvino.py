"""``openvino``: OpenVINO measures each node of a compiled model, and describes the compiled graph.

Its counters (2026.4) are means of all calls in whole microseconds. Single calls and their order in time are not
available. A node that takes less than one microsecond is reported as not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from optimize.export.macs import Work
from optimize.profiling.base import WARM_CALLS, Piece, Reader, Reading, Subject, register
from optimize.profiling.int8_products import activations, int8_product_graph
from optimize.profiling.layer_matching import GraphLayer, GraphLayers
from serve.runtime.engines.openvino import OpenVinoEngine, compile_bytes, core
from serve.runtime.errors import PipelineError

_PRECISIONS: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "int8", "i8": "int8"}
#: OpenVINO's words for operations that compute layers.
_COMPUTING: Final = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "ScaledDotProduct", "MHA")


def read(subject: Subject) -> Reading:
    """See `Reader`."""
    core().set_property("CPU", {"PERF_COUNT": True})  # for all later compilations, the engine's own too
    try:
        engine = subject.open()
    finally:
        core().set_property("CPU", {"PERF_COUNT": False})
    if not isinstance(engine, OpenVinoEngine):
        raise PipelineError("an execution with batch buckets cannot be profiled; leave them out")
    for _ in range(WARM_CALLS):
        subject.call(engine)
    before = _times(engine.request)
    for _ in range(subject.calls):
        subject.call(engine)
    after = _times(engine.request)
    # The counters are means of all calls, so the first ones are subtracted.
    whole = WARM_CALLS + subject.calls
    times = {key: max(0.0, (whole * after[key] - WARM_CALLS * before.get(key, 0.0)) / subject.calls) for key in after}
    layers = None
    if subject.card.format == "onnx":
        layers = GraphLayers(subject.folder / subject.card.file, len(subject.images), subject.floats)
    nodes = {
        node.get_friendly_name(): node for node in engine.request.get_compiled_model().get_runtime_model().get_ops()
    }
    pieces = tuple(
        _piece(nodes[name], ms, layers) if name in nodes else Piece(name, kind, (ms,))
        for (_, name, kind), ms in times.items()
    )
    lacks = "" if layers else f"MACs of {subject.card.format} files are not counted"
    return Reading(
        pieces,
        layers.left if layers else 0,
        f"means of {subject.calls} calls, in whole microseconds; {lacks}".rstrip("; "),
    )


def _times(request: Any) -> dict[tuple[int, str, str], float]:
    """Return mean milliseconds of each node that ran, in order of execution, by place, name and kind.

    A node that computes a layer always ran. If it took less than a microsecond, its time is 0.
    """
    return {
        (place, one.node_name, one.node_type): one.real_time.total_seconds() * 1e3
        for place, one in enumerate(request.get_profiling_info())
        if str(one.status).endswith("EXECUTED") or _computes(one.node_type)
    }


def _computes(kind: str) -> bool:
    return any(word in kind for word in _COMPUTING)


def _piece(node: Any, ms: float, layers: GraphLayers | None) -> Piece:
    """Make a piece from a node of the compiled model, with the layer that it computes."""
    about = {name: getattr(value, "value", value) for name, value in node.get_rt_info().items()}
    name, kind = node.get_friendly_name(), str(about["layerType"])
    given = [(one.get_source_output().get_node(), one) for one in node.inputs()]
    constants = [one for source, one in given if _is_constant(source)]
    others = [(source, one) for source, one in given if not _is_constant(source)]
    layer = _layer(node, about, layers) if layers and _computes(kind) else None
    work = Work(
        macs=layer.macs if layer else 0,
        weights=sum(_bytes(one) for one in constants),
        read=sum(_bytes(one) for _, one in others),
        written=sum(_bytes(one) for one in node.outputs()),
    )
    return Piece(
        name=layer.name if layer else name,
        kind=kind,
        ms=(ms,),
        precision=_PRECISIONS.get(str(about["runtimePrecision"])),
        work=work if layers else None,
        after=tuple(source.get_friendly_name() for source, _ in others),
    )


def _layer(node: Any, about: dict[str, Any], layers: GraphLayers) -> GraphLayer | None:
    """Return the layer that a node computes. It may combine several, as a whole attention does."""
    names = [name for name in (*str(about["originalLayersNames"]).split(","), node.get_friendly_name()) if name]
    found = [layer for name in names if (layer := layers.take(name)) is not None]
    if not found:
        return None
    return GraphLayer(found[0].name, sum(one.macs for one in found), sum(one.weights for one in found))


def _is_constant(node: Any) -> bool:
    kind = node.get_rt_info()["layerType"]
    return bool(getattr(kind, "value", kind) == "Const")


def _bytes(port: Any) -> int:
    """Return the bytes of a port's tensor. 0 for a dynamic shape, whose size is unknown."""
    shape = port.get_partial_shape()
    if shape.is_dynamic or port.get_element_type().is_dynamic():
        return 0
    return int(math.prod(shape.to_shape()) * port.get_element_type().size)


def int8_product(side: int, threads: int) -> Callable[[], object]:
    """See `Reader`."""
    request = compile_bytes(int8_product_graph(side), threads).create_infer_request()
    given = {0: activations(side)}
    return lambda: request.infer(given, share_inputs=True)


OPENVINO = register(Reader("openvino", read, int8_product))
