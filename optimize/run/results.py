"""From artifacts to the rows of a report: what was measured of each, and how it compares to parent and baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from optimize.listener import Listener
from optimize.measure import accuracy
from optimize.measure.accuracy import Answers
from optimize.measure.bench import Bench, SpeedTable
from optimize.measure.latency import Timing, compare
from optimize.run.session import Step
from optimize.store.artifact import Artifact
from serve.runtime.errors import EngineError, PipelineError, UserError, one_line

_T = TypeVar("_T")

#: Fields of a row that stay None where nothing was made or measured.
_UNKNOWN = (
    "format",
    "precision",
    "path",
    "archive",
    "key",
    "bytes",
    "top1",
    "top1_delta",
    "top1_delta_ci95",
    "top5",
    "discordant",
    "images",
    "latency_ms",
    "best_batch",
    "latency_samples",
    "parity",
    "vs_parent",
    "speedup",
    "memory_bytes",
    "load_ms",
    "provider",
    "threads",
)


@dataclass
class Entry:
    """A stage and what became of it: ``step`` if it was made, ``skipped`` if it was not made or not measured.

    ``failed`` marks a stage that should have worked and did not.
    """

    name: str
    operation: str
    parent: str | None
    config: Mapping[str, Any]
    step: Step | None = None
    skipped: str | None = None
    failed: bool = False

    @property
    def artifact(self) -> Artifact | None:
        """What was made, or None."""
        return self.step.artifact if self.step else None


@dataclass(frozen=True)
class Measured:
    """The report's rows: one per entry, one per eager reference; and the times behind them."""

    rows: list[dict[str, Any]]
    baselines: list[dict[str, Any]]
    speed: SpeedTable


def measure(entries: Sequence[Entry], bench: Bench, timing: Timing, listener: Listener) -> Measured:
    """Measure what this machine can run; the others keep their row, with the reason and no number.

    The first entry is the baseline that the others are compared with.

    Args:
        entries: unique names, parents before children; ``skipped`` is set for what cannot be measured.
        bench: see `Bench`.
        timing: how speed is measured.
        listener: told of each measurement.
    """
    for entry in entries:
        if entry.artifact is not None:
            entry.skipped = bench.refuses(entry.artifact)
    answers = _each("accuracy", entries, bench.answers, bench, listener)
    batch = timing.batch_sizes[-1]
    with bench.footprint_meter() as meter:
        footprints = _each("memory", entries, lambda artifact: bench.footprint(artifact, batch, meter), bench, listener)
    listener.started("speed")
    speed = bench.speed(_measurable(entries), timing)
    listener.ended("speed", speed.seconds, cached=speed.cached, skipped=None)
    baseline = entries[0].name
    rows = [_row(entry, baseline, answers, speed, footprints) for entry in entries]
    return Measured(rows, _references(speed, baseline), speed)


def _measurable(entries: Sequence[Entry]) -> list[Artifact]:
    return [entry.artifact for entry in entries if entry.artifact is not None and entry.skipped is None]


def _each(
    name: str, entries: Sequence[Entry], measure_one: Callable[[Artifact], _T], bench: Bench, listener: Listener
) -> dict[str, _T]:
    """One kind of measurement, of every artifact; where it fails, the entry is skipped for that reason.

    Raises:
        PipelineError: it fails for the first entry, with which all others are compared.
    """
    listener.started(name)
    begun = len(bench.log)
    found = {}
    artifacts = _measurable(entries)
    by_name = {entry.name: entry for entry in entries}
    for done, artifact in enumerate(artifacts, start=1):
        try:
            found[artifact.name] = measure_one(artifact)
        except (UserError, OSError):
            raise
        except Exception as error:  # a library's failure on one file must not cost the other artifacts
            reason = (
                f"measuring its {name} failed: {str(error) if isinstance(error, PipelineError) else one_line(error)}"
            )
            if artifact.name == entries[0].name:
                raise PipelineError(f"{artifact.name}: {reason}") from error
            entry = by_name[artifact.name]
            # A provider that is not active is this machine's lack, and not the artifact's fault.
            entry.skipped, entry.failed = reason, not isinstance(error, EngineError)
        listener.progressed(done / len(artifacts), artifact.name)
    made = [stored for _, stored in bench.log[begun:]]
    seconds = sum(stored.seconds for stored in made)
    listener.ended(name, seconds, cached=all(stored.cached for stored in made), skipped=None)
    return found


def _row(
    entry: Entry,
    baseline: str,
    answers: Mapping[str, Answers],
    speed: SpeedTable,
    footprints: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": entry.name,
        "pass": entry.operation,
        "config": dict(entry.config),
        "parents": [entry.parent] if entry.parent else [],
        "skipped": entry.skipped,
        "cached": entry.step.cached if entry.step else False,
        "seconds": entry.step.seconds if entry.step else None,
        **dict.fromkeys(_UNKNOWN),
        "throughput": {},
        "notes": [],
    }
    artifact = entry.artifact
    if artifact is None:
        return row
    row |= {
        "format": artifact.card.format,
        "precision": artifact.card.precision,
        "path": str(artifact.path),
        "key": artifact.key,
        "bytes": artifact.path.stat().st_size,
        "notes": list(artifact.card.notes),
    }
    if entry.name not in speed.speeds:
        return row
    own = speed.speeds[entry.name]
    row |= {**own.fields(), **footprints[entry.name], **accuracy.fields(answers[entry.name])}
    row |= accuracy.against_baseline(answers[baseline], answers[entry.name])
    row["speedup"] = compare(speed.speeds[baseline], own)["speedup"]
    row["provider"] = speed.providers[entry.name]
    row["threads"] = torch.get_num_threads()
    if entry.parent is not None and entry.parent in speed.speeds:
        row["parity"] = accuracy.parity(answers[entry.parent], answers[entry.name], entry.parent)
        row["vs_parent"] = compare(speed.speeds[entry.parent], own)
    return row


def _references(speed: SpeedTable, baseline: str) -> list[dict[str, Any]]:
    absent: dict[str, Any] = {"speedup": None, "latency_ms": None, "throughput": {}, "best_batch": None}
    ran = [
        {"name": name, "skipped": None, "speedup": compare(speed.speeds[baseline], own)["speedup"], **own.fields()}
        for name, own in speed.speeds.items()
        if name not in speed.providers
    ]
    return ran + [{"name": name, "skipped": reason, **absent} for name, reason in speed.skipped.items()]
