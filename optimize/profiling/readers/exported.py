"""``exported``: each call in an exported program's graph is one torch operator, which torch's profiler times."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.export.macs import program_work
from optimize.profiling.base import Piece, Reader, Reading, Subject, register
from optimize.profiling.layer_names import layer_name
from optimize.profiling.operators import operator_calls, times
from serve.runtime.engines.exported import ExportedProgramEngine
from serve.runtime.errors import PipelineError


def read(subject: Subject) -> Reading:
    """See `Reader`."""
    engine = subject.open()
    if not isinstance(engine, ExportedProgramEngine):
        raise PipelineError("an execution with batch buckets cannot be profiled; leave them out")
    module: Any = engine.module
    shape = (len(subject.images), *subject.card.preprocessing.shape)
    work = program_work(module, torch.zeros(shape, dtype=getattr(torch, subject.card.input_dtype)))
    calls = operator_calls(subject, engine)
    found: dict[fx.Node, Piece] = {}
    remaining = iter(node for node in module.graph.nodes if node.op == "call_function")
    for place, operator in enumerate(calls[-1][1]):
        # A node that computes a size, or a view that torch makes without an operator, has no event.
        node = next((one for one in remaining if _schema(one) == operator.name), None)
        if node is None:
            raise PipelineError(
                f"torch's profiler shows {operator.name}, which the program's graph does not call there"
            )
        ms, start = times(calls, place)
        found[node] = Piece(
            name=layer_name(node),
            kind=operator.name.partition("::")[2],
            ms=ms,
            precision=_precision(node),
            work=work[node.name],
            start_ms=start,
            after=tuple(found[one].name for one in node.all_input_nodes if one in found),
        )
    given = sum(work[node.name].macs for node in found)
    return Reading(tuple(found.values()), sum(one.macs for one in work.values()) - given)


def _schema(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def _precision(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else None


EXPORTED = register(Reader("exported", read))
