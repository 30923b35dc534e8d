"""Turns steps into the rows of a report: the figures of each pair, and its comparison with its relatives."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.listener import Listener
from optimize.measure.accuracy import Answers, accuracy, parity
from optimize.measure.bench import Bench, Candidate, Kept, SpeedTable, Weighed, eager_origin
from optimize.measure.figures import Measured
from optimize.measure.latency import compare, disturbance_of
from optimize.measure.rows import Measurement, ModelFile, Pair, Reference, Row, Skip
from optimize.passes.base import pass_of
from optimize.run.certification.parity_certificates import UNCERTIFIED, certify, reference_origin
from optimize.run.float_references import float_references
from optimize.run.relative_speeds import Turns, fastest, turns
from optimize.run.session import Step
from optimize.statistics import PairedDifference
from optimize.store.artifact import Artifact
from optimize.store.layer_effects import read_effects
from optimize.tasks.base import Evidence, Task
from serve.common.config import Config
from serve.runtime.card.execution import Execution
from serve.runtime.errors import EngineError, PipelineError, UserError, message_of
from serve.runtime.outputs import Outputs

_T = TypeVar("_T")


@dataclass(frozen=True)
class Measurements:
    """The measurements of a set of artifacts.

    Attributes:
        rows: one per step, in their order.
        references: one per reference.
        references_of: the artifact whose eager module they run.
        measurement: how the speeds were measured.
        turns: every time by pair's id or reference's name, without skipped ones.
        evidence: what the task keeps of each image's answer, by measured pair's id. The first pair is the one that all
            are compared with.
        left_out: rows of the validation split that cannot be read, which no evidence has.
        first: the outputs for the first image, ``(1, …)`` each, by measured pair's id. Pairs that could not read it are
            left out.
        keys: keys of the stored objects with these measurements.
    """

    rows: tuple[Row, ...]
    references: tuple[Reference, ...]
    references_of: str | None
    measurement: Measurement
    turns: Turns
    evidence: Mapping[str, Evidence]
    left_out: tuple[int, ...]
    first: Mapping[str, Outputs]
    keys: frozenset[str]

    def differences(self, task: Task) -> dict[str, PairedDifference]:
        """Return the difference of each measured pair's score to that of the first, by id, its own included."""
        first = next(pair.id for row in self.rows for pair in row.pairs if pair.measured is not None)
        return {pair: task.difference(self.evidence[first], own) for pair, own in self.evidence.items()}


def measure(
    steps: Sequence[Step | Row],
    bench: Bench,
    graph_of: Callable[[Artifact], Step] | None = None,
    *,
    certifying: bool = False,
) -> Measurements:
    """Measure everything that this machine can run. The other artifacts get a row with the reason and no figures.

    Args:
        steps: unique names, parents before children. The first is the baseline that the others are compared with. A row
            stands for a stage that was not made.
        bench: see `Bench`. Its processes have ended when this returns.
        graph_of: makes the float graph of an eager artifact, which becomes a reference if no artifact is a float graph.
        certifying: whether artifacts with static integers get their parity certificates.

    Raises:
        PipelineError: the first cannot be measured.
    """
    listener = bench.context.listener
    artifacts = [step.artifact for step in steps if isinstance(step, Step)]
    with bench:
        pairs, refused, skips, probes = _candidates(artifacts, bench)

        def remaining() -> list[Candidate]:
            return [pair for group in pairs.values() for pair in group if pair.id not in skips]

        weighed, skipped = _each("memory", remaining(), bench.footprint, listener)
        skips |= skipped
        _must_remain(pairs[artifacts[0].name], skips)
        answers, skipped = _each("accuracy", remaining(), bench.answers, listener)
        skips |= skipped
        known = _must_remain(pairs[artifacts[0].name], skips)
        if "checkpoint" in artifacts[0].card.lineage[0].config:  # a model trained here cannot have another order
            _remark(answers[known[0]].value, bench.context)
        floats = float_references(remaining(), eager_origin(artifacts[0]), bench, graph_of)
        listener.started("speed")
        speed = bench.speed([*remaining(), *floats.pairs.values()])
        listener.ended("speed", speed.seconds, cached=speed.cached, skipped=None)
    certified = UNCERTIFIED
    if certifying and any(reference_origin(artifact) for artifact in artifacts):
        listener.started("certificates")
        certified = certify(artifacts, pairs, answers, skips, bench)
        listener.ended("certificates", certified.seconds, cached=certified.cached, skipped=None)
    skips |= {
        pair.id: Skip(kind="failed", reason=f"measuring its speed failed: {speed.value.skipped[pair.id]}")
        for pair in remaining()
        if pair.id in speed.value.skipped
    }
    baseline = _must_remain(pairs[artifacts[0].name], skips)
    every = _Every(
        pairs=pairs,
        answers=answers,
        weighed=weighed,
        task=bench.context.task,
        turns=turns(
            floats.named(speed.value.speeds),
            floats=[
                *speed.value.references,
                *floats.pairs,
                *(pair.id for pair in remaining() if _is_float(pair.artifact)),
            ],
            baseline=baseline,
        ),
        skips=skips,
    )
    rows = [step if isinstance(step, Row) else _row(step, every, refused.get(step.artifact.name)) for step in steps]
    rows = [row.model_copy(update={"certificate": certified.certificates.get(row.name)}) for row in rows]
    return Measurements(
        rows=tuple(rows),
        references=(*_references(speed.value, every.turns), *floats.references(speed.value, every.turns)),
        references_of=eager.name if (eager := eager_origin(artifacts[0])) else None,
        measurement=Measurement(
            timing=bench.timing,
            taken=datetime.datetime.fromisoformat(speed.created),
            seconds=speed.seconds,
            cached=speed.cached,
            **dataclasses.asdict(disturbance_of(speed.value.speeds.values(), "measure again with --remeasure")),
        ),
        turns=every.turns,
        evidence={pair.id: answers[pair.id].value.evidence for pair in remaining()},
        left_out=tuple(answers[every.baseline.id].value.left_out.tolist()),
        first={
            pair.id: tuple(output[:1] for output in answers[pair.id].value.outputs)
            for pair in remaining()
            if 0 not in answers[pair.id].value.left_out and len(answers[pair.id].value.outputs[0])
        },
        keys=frozenset(
            {speed.key, *probes, *floats.keys, *certified.keys}
            | {kept.key for kept in answers.values()}
            | {kept.key for kept in weighed.values()}
        ),
    )


def _remark(answers: Answers, context: Context) -> None:
    """Say what the task finds strange in a checkpoint's answers."""
    read = torch.ones(len(context.data.val), dtype=torch.bool)
    read[answers.left_out] = False
    for said in context.task.remarks(answers.evidence, context.data.val.labels[read], context.data.classes):
        context.listener.said(said)


def _must_remain(pairs: Sequence[Candidate], skips: Mapping[str, Skip]) -> list[str]:
    """Return the ids of the pairs that are not skipped.

    Raises:
        PipelineError: there are none. The pairs are those of the artifact that all others are compared with.
    """
    remaining = [pair.id for pair in pairs if pair.id not in skips]
    if not remaining:
        raise PipelineError(f"{pairs[0].artifact.name}: {skips[pairs[0].id].reason}")
    return remaining


def _candidates(
    artifacts: Sequence[Artifact], bench: Bench
) -> tuple[dict[str, list[Candidate]], dict[str, Skip], dict[str, Skip], set[str]]:
    """Return the pairs of each artifact, the reasons against artifacts and against pairs, and the keys of the probes.

    Raises:
        PipelineError: no pair of the first artifact, with which the others are compared, can be measured.
    """
    pairs: dict[str, list[Candidate]] = {artifact.name: [] for artifact in artifacts}
    refused: dict[str, Skip] = {}
    skips: dict[str, Skip] = {}
    probed: dict[tuple[str, str], Skip | str] = {}
    for artifact in artifacts:
        try:
            pairs[artifact.name] = bench.candidates(artifact, baseline=artifact is artifacts[0])
        except EngineError as error:
            refused[artifact.name] = Skip(kind="cannot_run_here", reason=str(error))
        for pair in pairs[artifact.name]:
            engine = pair.execution.engine, pair.execution.device_type
            if engine not in probed:
                probed[engine] = _probe(pair.execution, bench)
            if isinstance(skip := probed[engine], Skip):
                skips[pair.id] = skip
    first = artifacts[0].name
    if all(pair.id in skips for pair in pairs[first]):
        why = refused.get(first) or skips[pairs[first][0].id]
        raise PipelineError(f"{first}, the reference of all comparisons, {why.reason}")
    return pairs, refused, skips, {key for key in probed.values() if isinstance(key, str)}


def _probe(execution: Execution, bench: Bench) -> Skip | str:
    try:
        return bench.probe(execution)
    except PipelineError as error:
        return Skip(kind="cannot_run_here", reason=str(error))


@dataclass(frozen=True)
class _Every:
    """All measurements: ``pairs`` by artifact's name, the baseline's first, the rest by pair's id."""

    pairs: Mapping[str, Sequence[Candidate]]
    answers: Mapping[str, Kept[Answers]]
    weighed: Mapping[str, Kept[Weighed]]
    task: Task
    turns: Turns
    skips: Mapping[str, Skip]

    def measured(self, artifact: str) -> list[Candidate]:
        """Return the artifact's measured pairs."""
        return [pair for pair in self.pairs.get(artifact, ()) if pair.id in self.turns.speeds]

    @property
    def baseline(self) -> Candidate:
        """Return the pair that all accuracies are compared with: the preferred one of the first artifact."""
        return self.measured(next(iter(self.pairs)))[0]


def _each(
    name: str, pairs: Sequence[Candidate], measure_one: Callable[[Candidate], Kept[_T]], listener: Listener
) -> tuple[dict[str, Kept[_T]], dict[str, Skip]]:
    """Take one kind of measurement of every pair. Returns results and failures by pair's id."""
    listener.started(name)
    found: dict[str, Kept[_T]] = {}
    skips: dict[str, Skip] = {}
    for done, pair in enumerate(pairs, start=1):
        try:
            found[pair.id] = measure_one(pair)
        except (UserError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - a library's failure on one file must not cost the other artifacts
            said = message_of(error)
            reason = f"measuring its {name} failed: {said}"
            # An inactive provider is a lack of this machine, not a fault of the artifact.
            skips[pair.id] = Skip(kind="cannot_run_here" if isinstance(error, EngineError) else "failed", reason=reason)
        listener.progressed(done / len(pairs), pair.id)
    seconds = sum(kept.seconds for kept in found.values())
    listener.ended(name, seconds, cached=all(kept.cached for kept in found.values()), skipped=None)
    return found, skips


def _row(step: Step, every: _Every, refused: Skip | None) -> Row:
    artifact = step.artifact
    last = artifact.card.lineage[-1]
    pairs = tuple(_pair(pair, every) for pair in every.pairs[artifact.name])
    skips = [pair.skip for pair in pairs]
    return Row(
        name=artifact.name,
        operation=last.operation,
        config=dict(last.config),
        parent=artifact.parent.name if artifact.parent else None,
        cached=step.cached,
        made=datetime.datetime.fromisoformat(step.created),
        seconds=step.seconds,
        file=_file(artifact),
        pairs=pairs,
        skip=refused or (skips[0] if all(skips) else None),
        notes=artifact.card.notes,
        effects=read_effects(artifact.folder),
        training=step.training,
    )


def _file(artifact: Artifact) -> ModelFile:
    return ModelFile(
        path=str(artifact.path),
        bytes=artifact.path.stat().st_size,
        key=artifact.key,
        format=artifact.card.format,
        precision=artifact.card.precision,
    )


def _is_float(artifact: Artifact) -> bool:
    return _file(artifact).is_float


def _pair(pair: Candidate, every: _Every) -> Pair:
    skip = every.skips.get(pair.id)
    return Pair(
        id=pair.id,
        execution=pair.execution,
        provider=every.weighed[pair.id].value.provider if pair.id in every.weighed else None,
        measured=None if skip else _measured(pair, every),
        skip=skip,
    )


def _measured(pair: Candidate, every: _Every) -> Measured:
    speeds, answers, baseline = every.turns.speeds, every.answers, every.baseline
    parents = every.measured(pair.artifact.parent.name) if pair.artifact.parent else []
    # Answers are compared on the same engine, so that the difference is the artifact's. Speed is compared with the
    # best.
    alike = next((each for each in parents if each.execution == pair.execution), parents[0] if parents else None)
    best = fastest(speeds, [each.id for each in parents])
    timed = every.turns.timed(pair.id)
    own = answers[pair.id]
    return Measured(
        **dict(timed),
        accuracy=accuracy(
            own.value, None if pair.id == baseline.id else answers[baseline.id].value, own.key, every.task
        ),
        footprint=every.weighed[pair.id].value.footprint,
        parity=parity(answers[alike.id].value, own.value, alike.id, every.task, pair.artifact.card.outputs)
        if alike
        else None,
        vs_parent=compare(speeds[best], speeds[pair.id]) if best else None,
    )


def _references(speed: SpeedTable, every: Turns) -> list[Reference]:
    skipped = [name for name in speed.skipped if "@" not in name]
    return [
        *(Reference(name=name, measured=every.timed(name)) for name in speed.references),
        *(Reference(name=name, skip=Skip(kind="cannot_run_here", reason=speed.skipped[name])) for name in skipped),
    ]


def skip_of(error: Exception) -> Skip:
    """Return the reason, in one line, for an exception that ended a pass."""
    kind: Literal["not_applicable", "cannot_run_here", "failed"] = "failed"
    if isinstance(error, NotApplicableError):
        kind = "not_applicable"
    elif isinstance(error, EngineError):  # no kernels for it on this machine
        kind = "cannot_run_here"
    return Skip(kind=kind, reason="; ".join(line.strip() for line in message_of(error).splitlines() if line.strip()))


def not_made(name: str, config: Config, parent: str, skip: Skip) -> Row:
    """Return the row of a stage that was not made."""
    settings = config.model_dump(mode="json")
    return Row(name=name, operation=pass_of(config).name, config=settings, parent=parent, skip=skip)
