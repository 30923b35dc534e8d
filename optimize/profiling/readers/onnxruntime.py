"""``onnxruntime``: ONNX Runtime writes the time of each node of a session, with shapes, into a JSON file."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from optimize.export.macs import Work
from optimize.profiling.base import WARM_CALLS, Piece, Reader, Reading, Subject, register
from optimize.profiling.int8_products import INPUT, activations, int8_product_graph
from optimize.profiling.layer_matching import GraphLayer, GraphLayers
from serve.runtime.errors import PipelineError
from serve.runtime.model_files.onnx_session import cpu_session, runtime

_NODE, _RUN = "_kernel_time", "model_run"
#: The element types of ONNX Runtime's shapes, as precisions.
_PRECISIONS: Final = {
    "float": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "uint8": "int8",
    "int8": "int8",
}
#: Parts of the names of operators that compute layers.
_COMPUTING: Final = ("Conv", "Gemm", "MatMul", "Attention")

Event = dict[str, Any]


def read(subject: Subject) -> Reading:
    """See `Reader`."""
    with tempfile.TemporaryDirectory() as folder:
        with _profiled_sessions(Path(folder, "session")):
            engine = subject.open()
        for _ in range(WARM_CALLS + subject.calls):
            subject.call(engine)
        del engine
        gc.collect()  # the file is written when the session ends
        written = list(Path(folder).iterdir())
        if len(written) != 1:
            raise PipelineError(f"ONNX Runtime {runtime().__version__} wrote {len(written)} profiles, not one")
        events: list[Event] = json.loads(written[0].read_text(encoding="utf-8"))
    layers = GraphLayers(subject.folder / subject.card.file, len(subject.images), subject.floats)
    calls = _calls(events, subject.calls)
    pieces = [_piece(nodes, calls[-1][0], layers) for nodes in zip(*(nodes for _, nodes in calls), strict=True)]
    return Reading(tuple(pieces), layers.left)


@contextlib.contextmanager
def _profiled_sessions(prefix: Path) -> Iterator[None]:
    """Make all sessions that are created within the block write a profile, whatever their options.

    The runtime's own code makes the session, so that it is the same as in the server. Profiling cannot be turned on for
    a single run (1.31).
    """
    library = runtime()
    plain = library.SessionOptions

    class ProfilingOptions(plain):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.enable_profiling = True
            self.profile_file_prefix = str(prefix)

    library.SessionOptions = ProfilingOptions
    try:
        yield
    finally:
        library.SessionOptions = plain


def _calls(events: Sequence[Event], count: int) -> list[tuple[Event, list[Event]]]:
    """Return the last calls, each with its nodes in order of time."""
    runs = sorted((one for one in events if one["name"] == _RUN), key=lambda one: one["ts"])[-count:]
    nodes = sorted(
        (one for one in events if one["cat"] == "Node" and one["name"].endswith(_NODE)), key=lambda one: one["ts"]
    )
    found = []
    for run in runs:
        inside = [one for one in nodes if run["ts"] <= one["ts"] < run["ts"] + run["dur"]]
        found.append((run, inside))
    if len(found) < count or not found[0][1] or len({_names(inside) for _, inside in found}) != 1:
        raise PipelineError("ONNX Runtime's profile does not have the same nodes in every call")
    return found


def _names(nodes: Sequence[Event]) -> tuple[str, ...]:
    return tuple(one["name"] for one in nodes)


def _piece(nodes: Sequence[Event], run: Event, layers: GraphLayers) -> Piece:
    """Make a piece from a node's events in each call."""
    last = nodes[-1]
    about = last["args"]
    called, kind = last["name"].removesuffix(_NODE), about["op_name"]
    layer = layers.take(called) if any(word in kind for word in _COMPUTING) else None
    types = [next(iter(one)) for one in about.get("input_type_shape", ()) if one]
    return Piece(
        name=layer.name if layer else called,
        kind=kind,
        ms=tuple(one["dur"] / 1e3 for one in nodes),
        precision=_PRECISIONS.get(types[0]) if types else None,
        work=_work(about, layer),
        start_ms=(last["ts"] - run["ts"]) / 1e3,
    )


def _work(about: Event, layer: GraphLayer | None) -> Work:
    # The session neither keeps nor counts weights that a kernel has packed for itself (1.31).
    weights = max(int(about["parameter_size"]), layer.weights if layer else 0)
    return Work(
        layer.macs if layer else 0,
        weights=weights,
        read=int(about["activation_size"]),
        written=int(about["output_size"]),
    )


def int8_product(side: int, threads: int) -> Callable[[], object]:
    """See `Reader`."""
    session = cpu_session(int8_product_graph(side), half=False, threads=threads)
    given = {INPUT: activations(side)}
    return lambda: session.run(None, given)


ONNXRUNTIME = register(Reader("onnxruntime", read, int8_product))
