"""One trial: some layers in int8 and the others not, made by the passes that users run, measured as all is measured.

Everything that it consists of is in the store by its own key, so that a search that was stopped finds its trials there.
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
    """Which layers are not int8: those in FP32 and those in FP16."""

    single: frozenset[str] = frozenset()
    half: frozenset[str] = frozenset()

    @property
    def bits(self) -> dict[str, int]:
        """Of the layers that are not int8, by name."""
        wide = dict.fromkeys(self.single, 32) | dict.fromkeys(self.half, 16)
        return dict(sorted(wide.items()))

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits."""
        return make_key(bits=self.bits)[:8]


@dataclass(frozen=True)
class Mixed:
    """A trial's artifacts: the quantized module, and the graph of it that is measured."""

    quantized: Step
    graph: Step

    @property
    def steps(self) -> tuple[Step, Step]:
        """Both, the parent first."""
        return self.quantized, self.graph


@dataclass
class Cost:
    """What was made and measured since it was last reset.

    Attributes:
        seconds: that it took, now or at another time.
        cached: whether all of it was taken from the store.
    """

    seconds: float = 0.0
    cached: bool = True

    def add(self, taken: Step | Kept[Any]) -> None:
        """Count an artifact, or a measurement."""
        self.seconds += taken.seconds
        self.cached &= taken.cached

    def reset(self) -> None:
        """Begin anew."""
        self.seconds, self.cached = 0.0, True


@dataclass(frozen=True)
class Bed:
    """Where trials are made and measured.

    Attributes:
        session: of the model.
        bench: what measures.
        parent: the float module that is quantized.
        ptq: how; its ``keep_float`` are left in float by every trial.
        graph: settings of the graph.
        keys: of all objects of the store that trials consist of; grows.
        cost: of what was made and measured; whoever tells of a trial resets it before.
    """

    session: Session
    bench: Bench
    parent: Artifact
    ptq: Ptq
    graph: OnnxInt8
    keys: set[str] = field(default_factory=set)
    cost: Cost = field(default_factory=Cost)

    def configs(self, precisions: Precisions) -> tuple[Ptq, OnnxInt8]:
        """The settings of the two passes."""
        kept = tuple(sorted({*self.ptq.keep_float, *precisions.single, *precisions.half}))
        return (
            self.ptq.model_copy(update={"keep_float": kept}),
            self.graph.model_copy(update={"half": tuple(sorted(precisions.half))}),
        )

    def make(self, precisions: Precisions) -> Mixed:
        """The trial's artifacts, made or found in the store.

        Raises:
            PipelineError: a pass has nothing to do, or its result is not what it promises.
        """
        ptq, graph = self.configs(precisions)
        mark = f"-{precisions.digest}" if precisions.bits else ""
        quantized = self._made(self.parent, ptq, f"ptq{mark}")
        return Mixed(quantized, self._made(quantized.artifact, graph, f"onnx-int8{mark}"))

    def answers(self, candidate: Candidate) -> Answers:
        """What a pair answers on the evaluation images."""
        kept = self.bench.answers(candidate)
        self.keys.add(kept.key)
        self.cost.add(kept)
        return kept.value

    def speeds(self, candidates: Sequence[Candidate]) -> dict[str, Speed]:
        """Times of pairs that took turns, by id.

        Raises:
            PipelineError: one of them could not be timed. Nothing of it is kept: the next time it may be.
        """
        found, untimed = self.times(candidates)
        if untimed:
            raise PipelineError(untimed[0])
        return found

    def times(self, candidates: Sequence[Candidate]) -> tuple[dict[str, Speed], tuple[str, ...]]:
        """Times of those pairs that could be timed, by id, of turns that they took; and of each of the others why not.

        Nothing is kept where there is one without: the next time it may be timed.
        """
        kept = self.bench.speed(candidates, beside_eager=False)
        self.cost.add(kept)
        skipped = kept.value.skipped
        if skipped:
            self.bench.store.forget(kept.key)
            for candidate in candidates:
                if candidate.id in skipped:  # its process may be what has failed
                    self.bench.release(candidate)
        else:
            self.keys.add(kept.key)
        said = tuple(f"{name} could not be timed: {reason}" for name, reason in skipped.items())
        return dict(kept.value.speeds), said

    def note(self, artifacts: Iterable[Artifact]) -> None:
        """Take note of what artifacts consist of, their ancestors included."""
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
    """Refuse an execution of an engine that there is not, before anything is measured.

    Raises:
        UserError: there is no such engine; the message names the nearest.
    """
    if wanted is not None:
        find_engine(wanted.partition("[")[0])


def named(executions: Sequence[Execution], wanted: str | None, what: str) -> list[Execution]:
    """Those of some executions that go by a name: their engine's, or their own (see `execution_id`).

    Args:
        executions: of which to choose.
        wanted: the name; None takes all.
        what: they are executions of, for the message.

    Raises:
        UserError: none goes by it; the message says which there are.
    """
    found = [execution for execution in executions if wanted in (None, execution.engine, execution_id(execution))]
    if not found:
        known = ", ".join(map(execution_id, executions))
        raise UserError(f"there is no execution {wanted!r} of {what} here; use {known}")
    return found


def require_execution(bench: Bench, float_graph: Artifact, wanted: str | None) -> None:
    """Refuse an execution that the float graph does not have here, before anything is measured.

    Raises:
        UserError: as `named`.
        EngineError: the graph has none at all.
    """
    if wanted is not None:
        named([candidate.execution for candidate in bench.candidates(float_graph)], wanted, "the float graph")


def shared_executions(bed: Bed, first: Artifact, second: Artifact) -> list[Execution]:
    """The executions that run both artifacts here, which may be the same; each engine was tried.

    Raises:
        EngineError: there is none; the message says why.
    """
    works = bed.bench.working(first, second)
    bed.keys.update(each.key for each in works)
    return [each.execution for each in works]


def fastest_execution(
    bed: Bed, float_graph: Artifact, graph: Artifact, wanted: str | None
) -> tuple[Execution, tuple[str, ...]]:
    """The execution that runs the quantized graph fastest, of those that run the float one, too; or the one wanted.

    Returns:
        It, and what there is to say of those that it could not be compared with; the session's listener was told.

    Raises:
        UserError: the wanted one is none of them.
        EngineError: there is none, or of several none could be timed.
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
    """What all trials of a search are run by: the fastest of the fully quantized graph, or the one wanted.

    Where the gate does not even let the fully quantized network pass, there is nothing to time: then it is the first
    that runs the float graph.

    Returns, raises: as `fastest_execution`.
    """
    try:
        graph = bed.make(Precisions()).graph.artifact
    except (UserError, EngineError):
        raise
    except PipelineError:
        return named(shared_executions(bed, float_graph, float_graph), wanted, "the float graph")[0], ()
    return fastest_execution(bed, float_graph, graph, wanted)
