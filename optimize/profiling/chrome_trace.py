"""Profiles as a Chrome trace: a file for chrome://tracing and Perfetto.

The format is the "JSON Object Format" of the Trace Event Format (Google, "Trace Event Format", sections "JSON Object
Format", "Complete Events" and "Metadata Events"): times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimize.profiling.profile_records import Layer, Profile, Profiled

_END_TO_END = "laid end to end: the engine says what each layer takes, and not when"


def chrome_trace(found: Profiled) -> dict[str, Any]:
    """Return one call of each execution as JSON values. Each execution is a process of the trace."""
    events = [event for number, one in enumerate(found.profiles) for event in _events(number, one)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "title": found.title,
            "artifact": found.artifact,
            "batch": str(found.batch),
            "cpu": found.cpu,
            "taken": found.taken.isoformat(),
        },
    }


def _events(number: int, one: Profile) -> Iterator[dict[str, Any]]:
    timed = all(layer.start_ms is not None for layer in one.layers)
    timeline = "as they began in the last call" if timed else _END_TO_END
    yield _metadata(number, "process_name", f"{one.runs_on} ({timeline})")
    yield _metadata(number, "thread_name", "layers")
    ended = 0.0
    for layer in one.layers:
        start = layer.start_ms if timed and layer.start_ms is not None else ended
        ended = start + layer.ms
        yield {
            "name": layer.name,
            "cat": layer.kind,
            "ph": "X",
            "ts": start * 1e3,
            "dur": layer.ms * 1e3,
            "pid": number,
            "tid": 0,
            "args": _about(one, layer),
        }


def _metadata(number: int, what: str, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": number, "tid": 0, "args": {"name": name}}


def _about(one: Profile, layer: Layer) -> dict[str, Any]:
    said = {
        "kind": layer.kind,
        "precision": layer.precision,
        "MACs": layer.macs,
        "weights bytes": layer.weights,
        "read bytes": layer.read,
        "written bytes": layer.written,
        "share of peak": one.of_peak(layer),
        "share of copy": one.of_copy(layer),
    }
    return {name: value for name, value in said.items() if value is not None}
