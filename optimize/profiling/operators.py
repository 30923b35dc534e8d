"""The operators of an engine's calls, in order, from torch's profiler, without operators within operators."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from optimize.profiling.base import WARM_CALLS, Subject
from serve.runtime.engines.base import Engine
from serve.runtime.errors import PipelineError
from serve.runtime.outputs import Outputs

_CALL: Final = "a call of the engine"
_OWN: Final = "profiler::"  # torch's own marks


def operator_calls(subject: Subject, engine: Engine) -> list[tuple[Any, list[Any]]]:
    """Return the timed calls: for each the call's event and its operators' events (`torch.autograd.profiler_util`).

    Raises:
        PipelineError: calls differ in their operators.
    """
    plain = engine.run

    def marked(batch: torch.Tensor) -> Outputs:
        with record_function(_CALL):
            return plain(batch)

    engine.run = marked  # type: ignore[method-assign]
    for _ in range(WARM_CALLS):
        subject.call(engine)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")  # the profiler warns that it clears its events after a cycle: there is one
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            for _ in range(subject.calls):
                subject.call(engine)
    calls = [(one, list(_operators(one))) for one in profiler.events() or () if one.name == _CALL]
    calls.sort(key=lambda call: call[0].time_range.start)
    if len(calls) != subject.calls or len({tuple(one.name for one in inside) for _, inside in calls}) != 1:
        raise PipelineError("torch's profiler does not show the same operators in every call")
    return calls


def _operators(event: Any) -> Iterator[Any]:
    """Yield the outermost operators within an event, in order of time."""
    for child in sorted(event.cpu_children, key=lambda one: one.time_range.start):
        if "::" not in child.name:
            yield from _operators(child)
        elif not child.name.startswith(_OWN):
            yield child


def times(calls: list[tuple[Any, list[Any]]], place: int) -> tuple[tuple[float, ...], float]:
    """Return the milliseconds of the operator at a place in each call, and its start in the last call."""
    call, inside = calls[-1]
    taken = tuple(operators[place].time_range.elapsed_us() / 1e3 for _, operators in calls)
    return taken, (inside[place].time_range.start - call.time_range.start) / 1e3
