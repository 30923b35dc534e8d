"""Adds fair float executions to compare INT8 with: the float graph on ONNX Runtime and OpenVINO.

If no artifact of a run is a float graph, one is made as a reference and timed in the same turns. It is not an artifact
of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from optimize.errors import PassError
from optimize.measure.bench import Bench, Candidate, SpeedTable
from optimize.measure.latency import Speed
from optimize.measure.rows import FLOAT_GRAPHS, Reference, Skip
from optimize.passes.base import find_pass
from optimize.run.relative_speeds import Turns
from optimize.run.session import Session, Step
from optimize.store.artifact import Artifact
from serve.runtime.engines.base import executions_for
from serve.runtime.errors import EngineError, PipelineError, one_line

#: Names that no stage of a recipe and no variant can have.
_FOLDED: Final = "(folded)"
_GRAPH: Final = "(float graph)"
_STEP: Final = "float graph"


@dataclass(frozen=True)
class FloatReferences:
    """The float references that are not pairs of the report.

    Attributes:
        pairs: the pairs to time, by reference's name.
        skips: why other references are not timed.
        keys: keys of their objects in the store.
    """

    pairs: Mapping[str, Candidate] = field(default_factory=dict)
    skips: Mapping[str, Skip] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()

    def named(self, speeds: Mapping[str, Speed]) -> dict[str, Speed]:
        """Return speeds by id, with those of the references under their names."""
        names = {pair.id: name for name, pair in self.pairs.items()}
        return {names.get(pair, pair): speed for pair, speed in speeds.items()}

    def references(self, table: SpeedTable, turns: Turns) -> list[Reference]:
        """Return the references as records of a report."""
        failed = {
            name: Skip(kind="cannot_run_here", reason=table.skipped.get(pair.id, "it was not timed"))
            for name, pair in self.pairs.items()
            if name not in turns.speeds
        }
        skips = {**self.skips, **failed}
        timed = [Reference(name=name, measured=turns.timed(name)) for name in self.pairs if name not in skips]
        return [*timed, *(Reference(name=name, skip=skip) for name, skip in skips.items())]


def graph_of(session: Session, eager: Artifact) -> Step:
    """Make the float graph of an eager artifact, with norms folded if possible. The store keeps it.

    Returns:
        The graph. Its seconds are those of both steps, and it is cached if both were.
    """
    try:
        folded = session.apply(eager, find_pass("fuse").config(), _FOLDED)
    except PassError:  # Its forward cannot be traced. The exporter may succeed, and engines fold norms too.
        return session.apply(eager, find_pass("onnx").config(), _GRAPH)
    graph = session.apply(folded.artifact, find_pass("onnx").config(), _GRAPH)
    return replace(graph, cached=folded.cached and graph.cached, seconds=folded.seconds + graph.seconds)


def float_references(
    pairs: Sequence[Candidate],
    eager: Artifact | None,
    bench: Bench,
    make: Callable[[Artifact], Step] | None,
) -> FloatReferences:
    """Choose the pairs to time besides the report's own, so that each engine's float execution is among them.

    Args:
        pairs: the pairs of the report.
        eager: the artifact whose weights the references run.
        bench: measures them.
        make: makes the graph. None: a missing graph is not made.
    """
    there = {
        pair.execution.engine for pair in pairs if pair.artifact.kind == "onnx" and pair.execution.device_type == "cpu"
    }
    absent = {name: engine for name, engine in FLOAT_GRAPHS.items() if engine not in there and "cpu" in bench.devices}
    if not absent:
        return FloatReferences()
    if make is None or eager is None:
        reason = "it needs a float onnx stage, and the recipe has none"
        return FloatReferences(skips=dict.fromkeys(absent, Skip(kind="not_applicable", reason=reason)))
    listener = bench.context.listener
    listener.started(_STEP)
    try:
        step = make(eager)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a library's failure on one model must not cost the measurement
        listener.ended(_STEP, 0.0, cached=False, skipped=one_line(error))
        skip = Skip(kind="not_applicable", reason=f"the float graph cannot be made: {one_line(error)}")
        return FloatReferences(skips=dict.fromkeys(absent, skip))
    listener.ended(_STEP, step.seconds, cached=step.cached, skipped=None)
    graph = step.artifact
    found: dict[str, Candidate] = {}
    skips: dict[str, Skip] = {}
    keys = {key for artifact in graph.line() for key in artifact.objects}
    usual = {execution.engine: execution for execution in executions_for(graph.card, "cpu")}
    for name, engine in absent.items():
        try:
            if engine not in usual:
                raise EngineError(f"{engine} does not run it here")
            keys.add(bench.probe(usual[engine]))
            found[name] = Candidate(graph, usual[engine])
        except PipelineError as error:
            skips[name] = Skip(kind="cannot_run_here", reason=str(error))
    return FloatReferences(found, skips, frozenset(keys))
