"""Artifacts of several runs side by side: sizes and answers as they are stored, speed and memory measured anew.

Latencies of two sessions do not compare, however alike their machines are: here all take turns in one. Top-1
compares where the runs were judged by the same images; each answer to each image is in the store, so that the
difference is a paired one even between two models.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from optimize.listener import Listener
from optimize.measure.accuracy import Answers, accuracy, load_answers
from optimize.measure.footprint import FootprintMeter
from optimize.measure.latency import compare, measure_speed
from optimize.measure.rows import Footprint, Measured, Measurement, Pair, Report, Results, Row, Skip
from optimize.measure.timing import Timing
from optimize.report.runs import report_of
from optimize.run.recommendation import Recommend, recommend
from optimize.run.turns import turns
from optimize.store.objects import Store
from serve import layout
from serve.runs import sample_image
from serve.runtime.card import read_card
from serve.runtime.engines.base import pair_id, preferred
from serve.runtime.errors import EngineError, UserError, did_you_mean
from serve.runtime.images import load
from serve.runtime.predictor import Predictor

_MAX_BATCH = 64


@dataclass(frozen=True)
class _Contestant:
    """An artifact of a run, and the pair of it that was recommended or is its best: ``name`` is ``run/artifact``."""

    run: str
    report: Report
    row: Row
    pair: Pair
    measured: Measured
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.run}/{self.row.name}"


@dataclass(frozen=True)
class _Opened:
    """A contestant that runs here, and its own input at every batch size; ``id`` is the pair's."""

    id: str
    predictor: Predictor
    batches: Mapping[int, torch.Tensor]

    def call(self, batch: torch.Tensor) -> torch.Tensor:
        """Answer as many images as ``batch`` has; each network has its own input size."""
        return self.predictor.probabilities(self.batches[len(batch)])


def compare_runs(
    store: Path, names: Sequence[str], *, timing: Timing, rule: Recommend, device: torch.device, listener: Listener
) -> Results:
    """Compare artifacts across runs.

    Args:
        store: where the runs are.
        names: ``RUN`` stands for its baseline and its recommended artifact, ``RUN/ARTIFACT`` for that one; each is run
            by the execution that was recommended, or was its fastest. The first is what the others are compared with.
        timing: how speed is measured.
        rule: of the recommendation.
        device: where to run them.
        listener: told of the measurements.

    Raises:
        UserError: a run or artifact does not exist or was not measured, or they were judged by different images;
            what differs is named.
    """
    contestants = list({c.name: c for name in names for c in _contestants(store, name)}.values())
    if len(contestants) < 2:
        raise UserError("compare needs at least two artifacts: name two runs, or RUN/ARTIFACT twice")
    _check_comparable(contestants)
    answers = {c.name: _answers(Store(store), c) for c in contestants}
    opened: dict[str, _Opened] = {}
    skips: dict[str, Skip] = {}
    for contestant in contestants:
        try:
            opened[contestant.name] = _open(store, contestant, device, timing)
        except EngineError as error:
            skips[contestant.name] = Skip(kind="cannot_run_here", reason=str(error))
    first = contestants[0].name
    if first in skips:
        raise UserError(f"{first}, with which the others are compared, cannot run here: {skips[first].reason}")
    listener.started("memory")
    footprints = _footprints([c for c in contestants if c.name in opened], device, timing, listener)
    listener.ended("memory", 0.0, cached=False, skipped=None)
    listener.started("speed")
    begun = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {o.id: o.call for o in opened.values()}
    # Each call has its images; of the batch it reads the size alone.
    speeds = measure_speed(calls, torch.empty, device, timing, listener)
    taken = sum(sum(map(sum, turns)) for speed in speeds.values() for turns in speed.rounds.values()) / 1e3
    listener.ended("speed", taken, cached=False, skipped=None)
    floats = [opened[c.name].id for c in contestants if c.name in opened and c.row.file and c.row.file.is_float]
    every = turns(speeds, floats=floats, baseline=[opened[first].id])

    def pair(contestant: _Contestant) -> Pair:
        name, parent = contestant.name, opened.get(f"{contestant.run}/{contestant.row.parent}")
        own = opened[name]
        measured = Measured(
            **dict(every.timed(own.id)),
            accuracy=accuracy(
                answers[name],
                answers[first] if name != first else None,
                contestant.measured.accuracy.answers,
            ),
            footprint=footprints[name],
            vs_parent=compare(speeds[parent.id], speeds[own.id]) if parent else None,
        )
        engine = own.predictor.engine
        return Pair(id=own.id, execution=own.predictor.execution, provider=engine.provider, measured=measured)

    rows = [
        c.row.model_copy(
            update={
                "name": c.name,
                "parent": f"{c.run}/{c.row.parent}" if c.row.parent else None,
                "pairs": () if c.name in skips else (pair(c),),
                "skip": skips.get(c.name),
            }
        )
        for c in contestants
    ]
    right = {each.id: answers[name].first.numpy() for name, each in opened.items()}
    return Results(
        title=" and ".join(dict.fromkeys(c.run for c in contestants)),
        rows=tuple(rows),
        yardstick=every.yardstick,
        eager=every.eager,
        recommendation=recommend(rows, speeds, rule, right),
        measurement=Measurement(timing=timing, taken=begun, seconds=taken, cached=False),
    )


def _contestants(store: Path, name: str) -> Iterator[_Contestant]:
    run, _, artifact = name.rstrip("/").partition("/")
    report = report_of(store, run)
    rows = {row.name: row for row in report.rows}
    if artifact and artifact not in rows:
        raise UserError(
            f"run {run!r} has no artifact {artifact!r}{did_you_mean(artifact, rows)}; it has {', '.join(rows)}"
        )
    start = report.baseline.name
    chosen = [artifact] if artifact else dict.fromkeys((start, report.recommended or start))
    for each in chosen:
        row = rows[each]
        pair = report.chosen_pair if row is report.chosen else row.best
        if pair is None or pair.measured is None:
            raise UserError(f"{run}/{each} was not measured: {row.skip}")
        yield _Contestant(run, report, row, pair, pair.measured, layout.artifact_folder(store, run, each))


def _check_comparable(contestants: Sequence[_Contestant]) -> None:
    """Refuse runs that were judged by different images, saying by which each was.

    Raises:
        UserError: see above.
    """
    by_images: dict[tuple[str, int], list[_Contestant]] = {}
    for contestant in contestants:
        judged = contestant.report.data.val_fingerprint, contestant.measured.accuracy.images
        by_images.setdefault(judged, []).append(contestant)
    if len(by_images) > 1:
        said = "; ".join(
            f"{' and '.join(dict.fromkeys(c.run for c in group))} by {images:,} of {group[0].report.data.name} "
            f"({fingerprint[:12]})"
            for (fingerprint, images), group in by_images.items()
        )
        raise UserError(f"these runs do not compare, they were judged by different images: {said}")


def _answers(store: Store, contestant: _Contestant) -> Answers:
    stored = store.open(contestant.measured.accuracy.answers)
    if stored is None:
        raise UserError(f"the answers of {contestant.name} are not in the store any more; run {contestant.run} again")
    return load_answers(stored.folder)


def _open(store: Path, contestant: _Contestant, device: torch.device, timing: Timing) -> _Opened:
    execution = contestant.pair.execution
    if execution.device_type != device.type:
        execution = preferred(read_card(contestant.folder), str(device))
    predictor = Predictor(contestant.folder, execution, max_batch=_MAX_BATCH)
    predictor.warm_up(timing.batch_sizes)
    sample = sample_image(store, contestant.run)
    if sample is None:
        raise UserError(f"{store / contestant.run} has no sample image; run {contestant.run} again")
    image = load(sample.read_bytes(), predictor.card.preprocessing)
    batches = {size: image.expand(size, -1, -1, -1).contiguous() for size in timing.batch_sizes}
    return _Opened(pair_id(contestant.name, execution), predictor, batches)


def _footprints(
    contestants: Sequence[_Contestant], device: torch.device, timing: Timing, listener: Listener
) -> dict[str, Footprint]:
    found = {}
    with FootprintMeter(str(device), torch.get_num_threads()) as meter:
        for done, contestant in enumerate(contestants, start=1):
            found[contestant.name] = meter.measure(contestant.folder, timing.batch_sizes[-1])
            listener.progressed(done / len(contestants), contestant.name)
    return found
