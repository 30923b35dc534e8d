"""From steps to the rows of a report: what was measured of each artifact, and how it compares to its relatives."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from optimize.listener import Listener
from optimize.measure.accuracy import Answers, accuracy, parity
from optimize.measure.bench import Bench, Kept, SpeedTable, eager_origin
from optimize.measure.latency import Speed, compare
from optimize.measure.rows import Execution, Footprint, Measured, Measurement, ModelFile, Reference, Row, Skip
from optimize.measure.timing import Timing
from optimize.run.session import Step
from optimize.store.artifact import Artifact
from serve.runtime.errors import EngineError, PipelineError, UserError, one_line

_T = TypeVar("_T")


@dataclass(frozen=True)
class Measurements:
    """What was measured of a set of artifacts.

    Attributes:
        rows: one per step, in their order.
        references: one per eager reference.
        references_of: the artifact whose eager module they run.
        measurement: how the speeds were taken.
        speeds: every time that was taken, by row's or reference's name; a skipped one is absent.
        keys: of the objects in the store that hold all this.
    """

    rows: tuple[Row, ...]
    references: tuple[Reference, ...]
    references_of: str | None
    measurement: Measurement
    speeds: Mapping[str, Speed]
    keys: frozenset[str]


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
    skips = {
        artifact.name: Skip(kind="cannot_run_here", reason=reason)
        for artifact in artifacts
        if (reason := bench.refuses(artifact)) is not None
    }
    if (skip := skips.get(artifacts[0].name)) is not None:
        raise PipelineError(f"{artifacts[0].name}, with which all others are compared, {skip.reason}")

    def remaining() -> list[Artifact]:
        return [artifact for artifact in artifacts if artifact.name not in skips]

    answers, skipped = _each("accuracy", remaining(), bench.answers, listener)
    skips |= skipped
    batch = timing.batch_sizes[-1]
    with bench.footprint_meter() as meter:
        footprints, skipped = _each(
            "memory", remaining(), lambda artifact: bench.footprint(artifact, batch, meter), listener
        )
    skips |= skipped
    listener.started("speed")
    speed = bench.speed(remaining(), timing)
    listener.ended("speed", speed.seconds, cached=speed.cached, skipped=None)
    every = _Every(artifacts[0].name, answers, footprints, speed.value)
    rows = [step if isinstance(step, Row) else _row(step, every, skips.get(step.artifact.name)) for step in steps]
    return Measurements(
        rows=tuple(rows),
        references=tuple(_references(speed.value, every.baseline)),
        references_of=eager.name if (eager := eager_origin(artifacts[0])) else None,
        measurement=Measurement(
            timing=timing,
            taken=datetime.datetime.fromisoformat(speed.created),
            seconds=speed.seconds,
            cached=speed.cached,
        ),
        speeds=speed.value.speeds,
        keys=frozenset(
            {speed.key, *(kept.key for kept in answers.values()), *(kept.key for kept in footprints.values())}
        ),
    )


@dataclass(frozen=True)
class _Every:
    """All that was measured, by artifact's name."""

    baseline: str
    answers: Mapping[str, Kept[Answers]]
    footprints: Mapping[str, Kept[Footprint]]
    speed: SpeedTable


def _each(
    name: str, artifacts: Sequence[Artifact], measure_one: Callable[[Artifact], Kept[_T]], listener: Listener
) -> tuple[dict[str, Kept[_T]], dict[str, Skip]]:
    """One kind of measurement, of every artifact; and where it fails, why.

    Raises:
        PipelineError: it fails for the first artifact, with which all others are compared.
    """
    listener.started(name)
    found: dict[str, Kept[_T]] = {}
    skips: dict[str, Skip] = {}
    for done, artifact in enumerate(artifacts, start=1):
        try:
            found[artifact.name] = measure_one(artifact)
        except (UserError, OSError):
            raise
        except Exception as error:  # a library's failure on one file must not cost the other artifacts
            said = str(error) if isinstance(error, PipelineError) else one_line(error)
            reason = f"measuring its {name} failed: {said}"
            if artifact is artifacts[0]:
                raise PipelineError(f"{artifact.name}: {reason}") from error
            # A provider that is not active is this machine's lack, and not the artifact's fault.
            skips[artifact.name] = Skip(
                kind="cannot_run_here" if isinstance(error, EngineError) else "failed", reason=reason
            )
        listener.progressed(done / len(artifacts), artifact.name)
    seconds = sum(kept.seconds for kept in found.values())
    listener.ended(name, seconds, cached=all(kept.cached for kept in found.values()), skipped=None)
    return found, skips


def _row(step: Step, every: _Every, skip: Skip | None) -> Row:
    artifact = step.artifact
    last = artifact.card.lineage[-1]
    return Row(
        name=artifact.name,
        operation=last.operation,
        config=dict(last.config),
        parent=artifact.parent.name if artifact.parent else None,
        cached=step.cached,
        made=datetime.datetime.fromisoformat(step.created),
        seconds=step.seconds,
        file=ModelFile(
            path=str(artifact.path),
            bytes=artifact.path.stat().st_size,
            key=artifact.key,
            format=artifact.card.format,
            precision=artifact.card.precision,
        ),
        measured=None if skip else _measured(artifact, every),
        skip=skip,
        notes=artifact.card.notes,
    )


def _measured(artifact: Artifact, every: _Every) -> Measured:
    name, speeds, answers = artifact.name, every.speed.speeds, every.answers
    parent = artifact.parent.name if artifact.parent and artifact.parent.name in speeds else None
    baseline = answers[every.baseline].value if name != every.baseline else None
    timed = speeds[name].against(speeds[every.baseline])
    return Measured(
        latency_ms=timed.latency_ms,
        throughput=timed.throughput,
        speedup=timed.speedup,
        accuracy=accuracy(answers[name].value, baseline, answers[name].key),
        footprint=every.footprints[name].value,
        execution=Execution(provider=every.speed.providers[name], threads=torch.get_num_threads()),
        parity=parity(answers[parent].value, answers[name].value, parent) if parent else None,
        vs_parent=compare(speeds[parent], speeds[name]) if parent else None,
    )


def _references(speed: SpeedTable, baseline: str) -> list[Reference]:
    ran = [
        Reference(name=name, measured=own.against(speed.speeds[baseline]))
        for name, own in speed.speeds.items()
        if name not in speed.providers
    ]
    absent = [
        Reference(name=name, skip=Skip(kind="cannot_run_here", reason=reason)) for name, reason in speed.skipped.items()
    ]
    return ran + absent
