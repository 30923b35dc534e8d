"""One trial: some layers in int8 and the others not, made by the users' passes and measured like any artifact.

All parts of a trial are in the store by their own keys. A search that was stopped finds its trials there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from optimize.errors import NotApplicableError
from optimize.measure.accuracy import Answers
from optimize.measure.bench import Bench, Candidate, Kept
from optimize.measure.latency import Speed
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.run.relative_speeds import fastest
from optimize.run.session import Session, Step
from optimize.store.artifact import Artifact
from optimize.store.keys import make_key
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import execution_id, find_engine
from serve.runtime.errors import EngineError, PipelineError, UserError, one_line


@dataclass(frozen=True)
class Precisions:
    """The layers that are not int8: those in FP32 and those in FP16."""

    single: frozenset[str] = frozenset()
    half: frozenset[str] = frozenset()

    @property
    def bits(self) -> dict[str, int]:
        """Bits of the layers that are not int8, by name."""
        wide = dict.fromkeys(self.single, 32) | dict.fromkeys(self.half, 16)
        return dict(sorted(wide.items()))

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits."""
        return make_key(bits=self.bits)[:8]


@dataclass(frozen=True)
class Mixed:
    """A trial's artifacts: the quantized module, and its graph, which is measured."""

    quantized: Step
    graph: Step

    @property
    def steps(self) -> tuple[Step, Step]:
        """Both, the parent first."""
        return self.quantized, self.graph


@dataclass
class Cost:
    """The work since the last reset.

    Attributes:
        seconds: its time, now or in an earlier run.
        cached: whether all of it came from the store.
    """

    seconds: float = 0.0
    cached: bool = True

    def add(self, taken: Step | Kept[Any]) -> None:
        """Count an artifact, or a measurement."""
        self.seconds += taken.seconds
        self.cached &= taken.cached

    def reset(self) -> None:
        """Start again from zero."""
        self.seconds, self.cached = 0.0, True


@dataclass(frozen=True)
class Bed:
    """Makes and measures trials.

    Attributes:
        session: of the model.
        bench: measures them.
        parent: the float module to quantize.
        ptq: the quantization. Every trial leaves its ``keep_float`` in float.
        graph: settings of the graph.
        keys: keys of all objects in the store that trials consist of. It grows.
        cost: the work since the last reset. Reset it before each trial that you report.
    """

    session: Session
    bench: Bench
    parent: Artifact
    ptq: Ptq
    graph: OnnxInt8
    keys: set[str] = field(default_factory=set)
    cost: Cost = field(default_factory=Cost)

    def configs(self, precisions: Precisions) -> tuple[Ptq, OnnxInt8]:
        """Return the settings of the two passes."""
        kept = tuple(sorted({*self.ptq.keep_float, *precisions.single, *precisions.half}))
        return (
            self.ptq.model_copy(update={"keep_float": kept}),
            self.graph.model_copy(update={"half": tuple(sorted(precisions.half))}),
        )

    def make(self, precisions: Precisions) -> Mixed:
        """Return the trial's artifacts, made or found in the store.

        Raises:
            PipelineError: a pass has nothing to do, or its result is not what it promises.
        """
        ptq, graph = self.configs(precisions)
        mark = f"-{precisions.digest}" if precisions.bits else ""
        quantized = self._made(self.parent, ptq, f"ptq{mark}")
        return Mixed(quantized, self._made(quantized.artifact, graph, f"onnx-int8{mark}"))

    def answers(self, candidate: Candidate) -> Answers:
        """Return the answers of a pair on the evaluation images."""
        kept = self.bench.answers(candidate)
        self.keys.add(kept.key)
        self.cost.add(kept)
        return kept.value

    def speeds(self, candidates: Sequence[Candidate]) -> dict[str, Speed]:
        """Return the times of pairs measured in turns, by id.

        Raises:
            PipelineError: one of them could not be timed. Nothing is stored then, as it may work the next time.
        """
        found, untimed = self.times(candidates)
        if untimed:
            raise PipelineError(untimed[0])
        return found

    def times(self, candidates: Sequence[Candidate]) -> tuple[dict[str, Speed], tuple[str, ...]]:
        """Return the times of pairs measured in turns, by id, and a reason for each that could not be timed.

        If one is missing, nothing is stored, as it may work the next time.
        """
        kept = self.bench.speed(candidates, beside_eager=False)
        self.cost.add(kept)
        skipped = kept.value.skipped
        if skipped:
            self.bench.store.forget(kept.key)
            for candidate in candidates:
                if candidate.id in skipped:  # its process may have failed
                    self.bench.release(candidate)
        else:
            self.keys.add(kept.key)
        said = tuple(f"{name} could not be timed: {reason}" for name, reason in skipped.items())
        return dict(kept.value.speeds), said

    def note(self, artifacts: Iterable[Artifact]) -> None:
        """Record the objects of artifacts and of their ancestors."""
        for artifact in artifacts:
            self.keys.update(key for each in artifact.line() for key in each.objects)

    def _made(self, parent: Artifact, config: Ptq | OnnxInt8, name: str) -> Step:
        try:
            step = self.session.apply(parent, config, name)
        except (PipelineError, NotApplicableError, OSError):
            raise
        except Exception as error:
            raise PipelineError(f"{name}: {one_line(error)}") from error
        self.note([step.artifact])
        self.cost.add(step)
        return step


def require_engine(wanted: str | None) -> None:
    """Refuse an execution of an unknown engine, before anything is measured.

    Raises:
        UserError: there is no such engine. The message names the nearest.
    """
    if wanted is not None:
        find_engine(wanted.partition("[")[0])


def named(executions: Sequence[Execution], wanted: str | None, what: str) -> list[Execution]:
    """Return the executions with a name: that of their engine, or their own (see `execution_id`).

    Args:
        executions: the executions to choose from.
        wanted: the name. None takes all.
        what: the artifact or purpose of the executions, for the message.

    Raises:
        UserError: none has that name. The message lists the names.
    """
    found = [execution for execution in executions if wanted in (None, execution.engine, execution_id(execution))]
    if not found:
        known = ", ".join(map(execution_id, executions))
        raise UserError(f"no execution {wanted!r} of {what} works here; use {known}")
    return found


def require_execution(bench: Bench, float_graph: Artifact, wanted: str | None) -> None:
    """Refuse an execution that the float graph does not have on this machine, before anything is measured.

    Raises:
        UserError: as `named`.
        EngineError: the graph has none at all.
    """
    if wanted is not None:
        named([candidate.execution for candidate in bench.candidates(float_graph)], wanted, "the float graph")


def shared_executions(bed: Bed, first: Artifact, second: Artifact) -> list[Execution]:
    """Return the executions that run both artifacts, which may be the same, on this machine. Each engine was tried.

    Raises:
        EngineError: there is none. The message says why.
    """
    works = bed.bench.working(first, second)
    bed.keys.update(each.key for each in works)
    return [each.execution for each in works]


def fastest_execution(
    bed: Bed, float_graph: Artifact, graph: Artifact, wanted: str | None
) -> tuple[Execution, tuple[str, ...]]:
    """Return the fastest execution of the quantized graph that also runs the float graph, or the wanted one.

    Returns:
        It, and remarks on executions that could not be compared. The session's listener received them.

    Raises:
        UserError: the wanted one is none of them.
        EngineError: there is none, or none of several could be timed.
    """
    works = named(shared_executions(bed, float_graph, graph), wanted, "both the float and the int8 graph")
    if len(works) == 1:
        return works[0], ()
    candidates = {candidate.id: candidate for candidate in (Candidate(graph, execution) for execution in works)}
    try:
        speeds, untimed = bed.times(list(candidates.values()))
    finally:
        for candidate in candidates.values():
            bed.bench.release(candidate)
    best = fastest(speeds, candidates)
    if best is None:
        raise EngineError("; ".join(untimed))
    remarks = tuple(f"{reason}; {best} is the fastest of the others" for reason in untimed)
    for remark in remarks:
        bed.session.context.listener.said(remark)
    return candidates[best].execution, remarks


def choose_execution(bed: Bed, float_graph: Artifact, wanted: str | None) -> tuple[Execution, tuple[str, ...]]:
    """Return the execution of all trials of a search: the fastest of the fully quantized graph, or the wanted one.

    If the fully quantized network does not pass the gate, there is nothing to time. It is then the first execution that
    runs the float graph.

    Returns, raises: as `fastest_execution`.
    """
    try:
        graph = bed.make(Precisions()).graph.artifact
    except (UserError, EngineError):
        raise
    except PipelineError:
        return named(shared_executions(bed, float_graph, float_graph), wanted, "the float graph")[0], ()
    return fastest_execution(bed, float_graph, graph, wanted)
