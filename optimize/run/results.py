"""From steps to the rows of a report: what was measured of each pair, and how it compares to its relatives."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from optimize.listener import Listener
from optimize.measure.accuracy import Answers, accuracy, parity
from optimize.measure.bench import Bench, Kept, SpeedTable, eager_origin
from optimize.measure.latency import Speed, compare
from optimize.measure.rows import Footprint, Measured, Measurement, ModelFile, Pair, Reference, Row, Skip
from optimize.measure.timing import Timing
from optimize.run.halves import Right
from optimize.run.session import Step
from optimize.run.turns import Turns, fastest, turns
from optimize.store.artifact import Artifact
from serve.runtime.engines.base import pair_id, preferred
from serve.runtime.errors import EngineError, PipelineError, UserError, one_line
from serve.runtime.execution import Execution

_T = TypeVar("_T")


@dataclass(frozen=True)
class Measurements:
    """What was measured of a set of artifacts.

    Attributes:
        rows: one per step, in their order.
        references: one per eager reference.
        references_of: the artifact whose eager module they run.
        measurement: how the speeds were taken.
        turns: every time that was taken, by pair's id or reference's name; a skipped one is absent.
        right: whether each image was answered correctly, ``bool (n,)``, by measured pair's id.
        keys: of the objects in the store that hold all this.
    """

    rows: tuple[Row, ...]
    references: tuple[Reference, ...]
    references_of: str | None
    measurement: Measurement
    turns: Turns
    right: Right
    keys: frozenset[str]


@dataclass(frozen=True)
class _Candidate:
    """A pair that is to be measured."""

    artifact: Artifact
    execution: Execution

    @property
    def id(self) -> str:
        return pair_id(self.artifact.name, self.execution)


def measure(steps: Sequence[Step | Row], bench: Bench, timing: Timing, listener: Listener) -> Measurements:
    """Measure what this machine can run; the others keep their row, with the reason and no number.

    Args:
        steps: unique names, parents before children; the first is the baseline that the others are compared
            with. A row stands for a stage that was not made.
        bench: see `Bench`.
        timing: how speed is measured.
        listener: told of each measurement.

    Raises:
        PipelineError: the first cannot be measured.
    """
    artifacts = [step.artifact for step in steps if isinstance(step, Step)]
    pairs: dict[str, list[_Candidate]] = {artifact.name: [] for artifact in artifacts}
    refused: dict[str, Skip] = {}
    for artifact in artifacts:
        try:
            if (reason := bench.refuses(artifact)) is not None:
                refused[artifact.name] = Skip(kind="cannot_run_here", reason=reason)
            else:
                pairs[artifact.name] = [_Candidate(artifact, preferred(artifact.card, str(bench.context.device)))]
        except EngineError as error:
            refused[artifact.name] = Skip(kind="cannot_run_here", reason=str(error))
    baseline = artifacts[0].name
    if (skip := refused.get(baseline)) is not None:
        raise PipelineError(f"{baseline}, with which all others are compared, {skip.reason}")
    skips: dict[str, Skip] = {}

    def remaining() -> list[_Candidate]:
        return [pair for group in pairs.values() for pair in group if pair.id not in skips]

    answers, skipped = _each("accuracy", remaining(), lambda pair: bench.answers(pair.artifact), listener)
    skips |= skipped
    batch = timing.batch_sizes[-1]
    with bench.footprint_meter() as meter:
        footprints, skipped = _each(
            "memory", remaining(), lambda pair: bench.footprint(pair.artifact, batch, meter), listener
        )
    skips |= skipped
    measured = remaining()
    listener.started("speed")
    speed = bench.speed([pair.artifact for pair in measured], timing)
    listener.ended("speed", speed.seconds, cached=speed.cached, skipped=None)
    speeds = {pair.id: speed.value.speeds[pair.artifact.name] for pair in measured}
    references = {name: own for name, own in speed.value.speeds.items() if name not in speed.value.providers}
    every = _Every(
        pairs=pairs,
        answers=answers,
        footprints=footprints,
        providers={pair.id: speed.value.providers[pair.artifact.name] for pair in measured},
        turns=turns(
            speeds | references,
            floats=[*references, *(pair.id for pair in measured if _is_float(pair.artifact))],
            baseline=[pair.id for pair in pairs[baseline]],
        ),
        skips=skips,
    )
    rows = [step if isinstance(step, Row) else _row(step, every, refused.get(step.artifact.name)) for step in steps]
    return Measurements(
        rows=tuple(rows),
        references=tuple(_references(references, speed.value, every.turns)),
        references_of=eager.name if (eager := eager_origin(artifacts[0])) else None,
        measurement=Measurement(
            timing=timing,
            taken=datetime.datetime.fromisoformat(speed.created),
            seconds=speed.seconds,
            cached=speed.cached,
        ),
        turns=every.turns,
        right={pair.id: answers[pair.id].value.first.numpy() for pair in measured},
        keys=frozenset(
            {speed.key, *(kept.key for kept in answers.values()), *(kept.key for kept in footprints.values())}
        ),
    )


@dataclass(frozen=True)
class _Every:
    """All that was measured: ``pairs`` by artifact's name, the baseline's first, the rest by pair's id."""

    pairs: Mapping[str, Sequence[_Candidate]]
    answers: Mapping[str, Kept[Answers]]
    footprints: Mapping[str, Kept[Footprint]]
    providers: Mapping[str, str]
    turns: Turns
    skips: Mapping[str, Skip]

    def measured(self, artifact: str) -> list[_Candidate]:
        """The artifact's pairs that were."""
        return [pair for pair in self.pairs.get(artifact, ()) if pair.id in self.turns.speeds]

    @property
    def baseline(self) -> _Candidate:
        """What all accuracies are compared with: the pair of the first artifact that is preferred."""
        return self.measured(next(iter(self.pairs)))[0]


def _each(
    name: str, pairs: Sequence[_Candidate], measure_one: Callable[[_Candidate], Kept[_T]], listener: Listener
) -> tuple[dict[str, Kept[_T]], dict[str, Skip]]:
    """One kind of measurement, of every pair, by its id; and where it fails, why.

    Raises:
        PipelineError: it fails for the first pair, with which all others are compared.
    """
    listener.started(name)
    found: dict[str, Kept[_T]] = {}
    skips: dict[str, Skip] = {}
    for done, pair in enumerate(pairs, start=1):
        try:
            found[pair.id] = measure_one(pair)
        except (UserError, OSError):
            raise
        except Exception as error:  # a library's failure on one file must not cost the other artifacts
            said = str(error) if isinstance(error, PipelineError) else one_line(error)
            reason = f"measuring its {name} failed: {said}"
            if pair is pairs[0]:
                raise PipelineError(f"{pair.artifact.name}: {reason}") from error
            # A provider that is not active is this machine's lack, and not the artifact's fault.
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


def _pair(pair: _Candidate, every: _Every) -> Pair:
    skip = every.skips.get(pair.id)
    return Pair(
        id=pair.id,
        execution=pair.execution,
        provider=every.providers.get(pair.id),
        measured=None if skip else _measured(pair, every),
        skip=skip,
    )


def _measured(pair: _Candidate, every: _Every) -> Measured:
    speeds, answers, baseline = every.turns.speeds, every.answers, every.baseline
    parents = every.measured(pair.artifact.parent.name) if pair.artifact.parent else []
    # Answers are compared where the engine is the same, so that the difference is the artifact's; speed at its best.
    alike = next((each for each in parents if each.execution == pair.execution), parents[0] if parents else None)
    best = fastest(speeds, [each.id for each in parents])
    timed = every.turns.timed(pair.id)
    own = answers[pair.id]
    return Measured(
        **dict(timed),
        accuracy=accuracy(own.value, None if pair.id == baseline.id else answers[baseline.id].value, own.key),
        footprint=every.footprints[pair.id].value,
        parity=parity(answers[alike.id].value, own.value, alike.id) if alike else None,
        vs_parent=compare(speeds[best], speeds[pair.id]) if best else None,
    )


def _references(ran: Mapping[str, Speed], speed: SpeedTable, every: Turns) -> list[Reference]:
    return [
        *(Reference(name=name, measured=every.timed(name)) for name in ran),
        *(
            Reference(name=name, skip=Skip(kind="cannot_run_here", reason=reason))
            for name, reason in speed.skipped.items()
        ),
    ]
