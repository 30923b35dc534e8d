"""Finds the precision of each layer under a budget of accuracy and latency, by trials that really run.

Half of the evaluation images choose, and the others judge the choice. The results are measured again at the end, in
turns with every float execution. A pair that is slower than the fastest of those is not returned.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, field_validator

from optimize.errors import NotApplicableError
from optimize.measure.bench import Bench, Candidate
from optimize.measure.figures import Difference, Measured, Ratio
from optimize.measure.latency import Speed, compare, falls_behind, level
from optimize.measure.machine import machine
from optimize.measure.rows import Judgement, Pair, Row, Skip
from optimize.measure.timing import Timing
from optimize.passes.fuse import Fuse
from optimize.passes.onnx import Onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.precision.precision_records import Budget, Found, Trial
from optimize.precision.quantizable_layers import layers_of, ranks
from optimize.precision.search_explanation import Choice, why
from optimize.precision.search_methods import METHODS, MethodName, given_back
from optimize.precision.trials import Bed, Mixed, Precisions, choose_execution, require_engine, require_execution
from optimize.run.image_halves import Halves, halves
from optimize.run.recommendation.accuracy_drop import within
from optimize.run.relative_speeds import Turns
from optimize.run.report_rows import Measurements, measure
from optimize.run.session import Session, Step
from optimize.store.artifact import Artifact
from optimize.tasks.base import Evidence, Task, groups_of, rows_of
from serve.common.config import Config
from serve.runtime.errors import EngineError, PipelineError, UserError

#: Number of trials that are measured again at the end, in turns with everything else.
_FINALISTS = 3


class Search(Config):
    """The goal and the method of a search."""

    model_config = ConfigDict(title="")  # in messages, its settings are named as on the command line

    max_drop: float = Field(
        default=0.005,
        ge=0,
        le=1,
        description="largest loss of accuracy, as a fraction, on the images used for the choice",
    )
    max_latency_ms: float | None = Field(default=None, gt=0, description="longest median latency of one image, in ms")
    bits: tuple[int, ...] = Field(
        default=(8, 32),
        description="allowed precisions of layers: 8 (int8), 16 (FP16 weights, and FP16 arithmetic if the engine "
        "supports it) and 32; 8 and at least one other",
    )
    method: MethodName = Field(
        default="greedy",
        description="how to search for the layers to keep in float: greedy (by simulated sensitivity) or halving "
        "(delta debugging, without an order)",
    )
    max_trials: int | None = Field(default=None, ge=1, description="maximum number of trials; None: no limit")
    execution: str | None = Field(
        default=None, description="engine for the trials; None: the one that runs int8 fastest"
    )

    @field_validator("bits")
    @classmethod
    def _some_of_three(cls, bits: tuple[int, ...]) -> tuple[int, ...]:
        if not {8} < set(bits) <= {8, 16, 32}:
            raise ValueError(f"must be 8 and at least one of 16 and 32, such as 8,32; got {','.join(map(str, bits))}")
        return tuple(sorted(set(bits)))

    @field_validator("execution")
    @classmethod
    def _of_an_engine(cls, wanted: str | None) -> str | None:
        try:
            require_engine(wanted)
        except UserError as error:
            raise ValueError(str(error)) from None
        return wanted


class _SpentError(Exception):
    """No trial is left."""


@dataclass
class _Ledger:
    """The trials so far. Every set of precisions is tried once.

    Attributes:
        bed: makes and measures trials.
        start: the float graph by the execution of all trials.
        baseline: the evidence of the float baseline.
        halves: which images choose.
        by: the request.
    """

    bed: Bed
    start: Candidate
    baseline: Evidence
    halves: Halves
    by: Search
    trials: list[Trial] = field(default_factory=list)
    made: dict[Precisions, tuple[Trial, Mixed | None]] = field(default_factory=dict)

    def holds(self, precisions: Precisions) -> bool:
        """Tell whether the budget of accuracy is kept on the images that choose."""
        if precisions not in self.made:
            if self.by.max_trials is not None and len(self.trials) >= self.by.max_trials:
                raise _SpentError
            self._try(precisions)
        return self.made[precisions][0].holds

    @property
    def task(self) -> Task:
        """What the network is for."""
        return self.bed.session.context.task

    def best(self) -> list[tuple[Precisions, Trial, Mixed]]:
        """Return the trials that hold, sorted by their speed relative to the float graph, the fastest first."""
        held = [(key, trial, mixed) for key, (trial, mixed) in self.made.items() if trial.holds and mixed is not None]
        return sorted(held, key=lambda entry: -entry[1].speedup.value if entry[1].speedup else 0.0)

    def _try(self, precisions: Precisions) -> None:
        number, listener = len(self.trials) + 1, self.bed.session.context.listener
        said = f"trial {number}"
        listener.started(said)
        self.bed.cost.reset()
        mixed = None
        try:
            mixed = self.bed.make(precisions)
            trial = self._measured(number, precisions, mixed)
        except UserError:
            raise
        except PipelineError as error:
            skip = Skip(kind="failed", reason=str(error))
            trial = Trial(number=number, bits=precisions.bits, delta=None, holds=False, skip=skip)
        cost = self.bed.cost
        listener.ended(said, cost.seconds, cached=cost.cached, skipped=str(trial.skip) if trial.skip else None)
        self.trials.append(trial)
        self.made[precisions] = trial, mixed

    def _measured(self, number: int, precisions: Precisions, mixed: Mixed) -> Trial:
        candidate = Candidate(mixed.graph.artifact, self.start.execution)
        try:
            own = self.bed.answers(candidate).evidence
            delta = _difference(self.task, self.baseline, own, self.halves.choose).delta
            trial = Trial(number=number, bits=precisions.bits, delta=delta, holds=within(delta, self.by.max_drop))
            return self._timed(trial, candidate) if trial.holds else trial
        finally:
            self.bed.bench.release(candidate)

    def _timed(self, trial: Trial, candidate: Candidate) -> Trial:
        """Return a trial that holds with its times. If it cannot be timed, it still holds, and says why."""
        try:
            speeds = self.bed.speeds([self.start, candidate])
        except UserError:
            raise
        except PipelineError as error:
            return trial.model_copy(update={"skip": Skip(kind="failed", reason=str(error))})
        own = speeds[candidate.id]
        return trial.model_copy(update={"p50": _p50(own), "speedup": compare(speeds[self.start.id], own)})


def search(
    session: Session,
    baseline: Step,
    by: Search,
    *,
    ptq: Ptq | None = None,
    timing: Timing,
    devices: tuple[str, ...],
) -> tuple[Found, frozenset[str]]:
    """Choose the precision of each layer of a model.

    Args:
        session: of the model.
        baseline: its float module, with which all accuracies are compared.
        by: the request.
        ptq: settings of the quantization.
        timing: how speed is measured.
        devices: where speed is measured.

    Returns:
        The result, and the keys of all objects in the store that the search made or read.

    Raises:
        UserError: there is no layer to quantize, or no such execution.
        PipelineError: the float network cannot be measured.
    """
    ptq = ptq or Ptq()
    floats = _floats(session, baseline)
    parent, float_graph = floats[-2].artifact, floats[-1].artifact
    bench = Bench(session.store, session.context, timing, devices)
    require_execution(bench, float_graph, by.execution)
    layers = layers_of(parent, ptq, session.context)
    order, ranked = _order(session, parent, ptq, by, layers)
    start = measure(floats, Bench(session.store, session.context, timing, devices))  # the measurement to beat
    bed = Bed(session, bench, parent, ptq, OnnxInt8())
    bed.note(step.artifact for step in floats)
    bed.keys.update(start.keys | ranked)
    task = session.context.task
    answers = start.evidence[_first(start.rows)]
    parts = halves(task.ease(answers), groups_of(answers))
    ledger: _Ledger | None = None
    remarks: list[str] = []
    with bench:
        try:
            execution, untimed = choose_execution(bed, float_graph, by.execution)
            remarks += [f"{remark}." for remark in untimed]
            ledger = _Ledger(bed, Candidate(float_graph, execution), answers, parts, by)
            _run(ledger, order)
        except _SpentError:
            remarks.append(f"No more trials were allowed than {by.max_trials}.")
        except EngineError as error:
            remarks.append(f"INT8 was not tried: {error}.")
    finalists = ledger.best()[:_FINALISTS] if ledger else []
    mixed = {key: found for key, _, found in finalists}
    steps = [*floats, *(step for found in mixed.values() for step in found.steps)]
    final = measure(steps, Bench(session.store, session.context, timing, devices)) if mixed else start
    bed.keys.update(final.keys)
    choice = choose(final.rows, final.turns, final.evidence, parts, by, task=task)
    of_pair = {step.artifact.name: key for key, found in mixed.items() for step in found.steps}
    chosen = of_pair.get(choice.row.name) if choice.row else None
    bits = dict.fromkeys(layers, 32) if chosen is None else dict.fromkeys(layers, 8) | chosen.bits
    trials = tuple(ledger.trials) if ledger else ()
    found = Found(
        title=f"{session.source.name} on {session.context.data.name}",
        task=task.name,
        budget=Budget(max_drop=by.max_drop, max_latency_ms=by.max_latency_ms, bits=by.bits),
        method=by.method,
        layers=len(layers),
        chose=len(parts.choose),
        trials=trials,
        pair=choice.pair.id if choice.pair else None,
        execution=choice.pair.execution if choice.pair else None,
        bits=bits if choice.pair else {},
        p50=choice.p50,
        judged=_judged(choice, final, parts, task),
        fastest_float=choice.float_name,
        fastest_float_p50=choice.float_p50,
        why=(),
        stages=tuple(_stages(steps, final.rows, choice.row)),
        timing=timing,
        cpu=str(machine(session.context.device)["cpu"]),
    )
    said = why(found, choice, remarks)
    return found.model_copy(update={"why": said}), frozenset(bed.keys)


def _floats(session: Session, baseline: Step) -> list[Step]:
    """Return the baseline, the module to quantize, and its float graph."""
    steps = [baseline]
    try:
        steps.append(session.apply(baseline.artifact, Fuse()))
    except NotApplicableError as error:
        session.context.listener.said(f"fuse: {error}")
    # `floats[-2]` is the module to quantize: the fused one, or the baseline if there is nothing to fuse.
    return [*steps, session.apply(steps[-1].artifact, Onnx())]


def _order(
    session: Session, parent: Artifact, ptq: Ptq, by: Search, layers: Mapping[str, int]
) -> tuple[list[str], frozenset[str]]:
    """Return the layers in the method's order, and the keys it used: the most sensitive first, or the graph's order."""
    if by.method != "greedy":
        return list(layers), frozenset()
    found, key = ranks(session, parent, ptq)
    return sorted(layers, key=lambda name: found.get(name, 0.0)), frozenset({key})


def _run(ledger: _Ledger, order: list[str]) -> None:
    """Find the layers that must not be int8, and then those of them for which 16 bits are enough.

    Raises:
        _SpentError: no trial is left.
    """
    bits = ledger.by.bits
    every = frozenset(order)

    def wide(left: frozenset[str]) -> Precisions:
        return Precisions(single=left) if 32 in bits else Precisions(half=left)

    def holds(left: frozenset[str]) -> bool:
        return left == every or ledger.holds(wide(left))

    if holds(frozenset()):
        return
    kept = METHODS[ledger.by.method](order, holds)
    if {16, 32} <= set(bits) and kept != every:
        left = [name for name in order if name in kept]
        if not ledger.holds(Precisions(half=kept)):
            given_back(left, kept, lambda single: ledger.holds(Precisions(single, kept - single)))


def choose(
    rows: Sequence[Row], taken: Turns, evidence: Mapping[str, Evidence], parts: Halves, by: Search, *, task: Task
) -> Choice:
    """Return the fastest pair within the budget, float or not.

    An int8 pair that a float execution beats is never returned.

    Args:
        rows: everything that was measured in turns, the baseline first.
        taken: the turns.
        evidence: of each pair, by id.
        parts: which images choose.
        by: the budget.
        task: what the network is for.
    """
    baseline, speeds, yardstick = evidence[_first(rows)], taken.speeds, taken.yardstick
    measured = [(row, pair, pair.measured) for row in rows for pair in row.pairs if pair.measured]
    holding: list[tuple[Row, Pair, Measured]] = []
    refused: dict[str, str] = {}
    beaten: dict[str, Ratio] = {}
    for row, pair, found in measured:
        is_float = row.file is not None and row.file.is_float
        delta = _difference(task, baseline, evidence[pair.id], parts.choose).delta
        if not within(delta, by.max_drop):
            refused[pair.id] = f"loses {-delta * 100:.2f} points"
        elif not is_float and found.speedup.value < 1:
            beaten[pair.id] = found.speedup
        elif by.max_latency_ms is not None and found.latency_ms.p50 > by.max_latency_ms:
            refused[pair.id] = f"takes {found.latency_ms.p50:.3g} ms"
        else:
            holding.append((row, pair, found))
    choice = Choice(
        float_name=yardstick,
        float_p50=_p50(speeds[yardstick]),
        float_is_pair=any(pair.id == yardstick for _, pair, _ in measured),
        refused=refused,
        beaten=beaten,
    )
    if not holding:
        quickest = min((found.latency_ms.p50, pair.id) for _, pair, found in measured if pair.id not in beaten)
        return replace(choice, quickest=quickest)
    first = min(holding, key=lambda entry: entry[2].latency_ms.p50)
    equals = [first, *(entry for entry in holding if entry is not first and _as_good(entry, first, speeds))]
    row, pair, found = min(
        equals, key=lambda entry: (entry[0].file.bytes if entry[0].file else 0, entry[2].latency_ms.p50)
    )
    return replace(choice, row=row, pair=pair, measured=found)


def _as_good(other: tuple[Row, Pair, Measured], first: tuple[Row, Pair, Measured], speeds: Mapping[str, Speed]) -> bool:
    """Tell whether another int8 pair is as fast as the first. A float pair is returned only if it is the fastest."""
    if any(entry[0].file is None or entry[0].file.is_float for entry in (other, first)):
        return False
    return not falls_behind(level(speeds[first[1].id].medians(), speeds[other[1].id].medians()))


def _judged(choice: Choice, final: Measurements, parts: Halves, task: Task) -> Judgement | None:
    """Return the accuracy of the chosen pair on the images that did not choose."""
    if choice.pair is None:
        return None
    first, own = _first(final.rows), final.evidence[choice.pair.id]
    same = choice.pair.id == first
    return Judgement(
        images=len(parts.judge),
        score=task.score(rows_of(own, parts.judge)),
        difference=None if same else _difference(task, final.evidence[first], own, parts.judge),
    )


def _difference(task: Task, baseline: Evidence, own: Evidence, images: NDArray[np.int64]) -> Difference:
    return Difference.of(task.difference(rows_of(baseline, images), rows_of(own, images)))


def _stages(steps: list[Step], rows: Sequence[Row], chosen: Row | None) -> list[dict[str, Any]]:
    """Return the stages of a recipe that makes the chosen artifact and the float ones it was compared with."""
    wanted = {row.name for row in rows if row.file is not None and row.file.is_float}
    for step in steps:
        if chosen is not None and step.artifact.name == chosen.name:
            wanted |= {artifact.name for artifact in step.artifact.line()}
    found = []
    for step in steps:
        artifact = step.artifact
        if artifact.parent is None or artifact.name not in wanted:
            continue
        last = artifact.card.lineage[-1]
        found.append(
            {"pass": last.operation, "name": artifact.name, "from": artifact.parent.name, "config": dict(last.config)}
        )
    return found


def _first(rows: Sequence[Row]) -> str:
    """Return the id of the baseline's pair, with which all are compared."""
    return next(pair.id for pair in rows[0].pairs if pair.measured)


def _p50(speed: Speed) -> float:
    return statistics.median(speed.medians())
