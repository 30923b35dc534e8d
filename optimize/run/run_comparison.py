"""Compares artifacts of several runs: sizes and answers come from the store, speed and memory are measured again.

Latencies of two sessions are not comparable, even on similar machines, so all take turns in one session. Top-1 is
comparable if the runs used the same images. The store has the answer to each image, so the difference is a paired one
even between two models.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from optimize.listener import Listener
from optimize.measure.accuracy import Answers, accuracy, load_answers
from optimize.measure.contention import Watch
from optimize.measure.figures import Measured
from optimize.measure.latency import Turn, compare, disturbance_of, measure_speed
from optimize.measure.machine import machine
from optimize.measure.process_pool import MAX_BATCH, Loaded, Pool
from optimize.measure.processes import Worker
from optimize.measure.rows import Machine, Measurement, Pair, Report, Results, Row, Skip
from optimize.measure.timing import Timing
from optimize.report.finished_runs import report_of
from optimize.run.recommendation.rule import Recommend
from optimize.run.recommendation.selection import recommend
from optimize.run.relative_speeds import turns
from optimize.store.objects import Store
from optimize.tasks.base import find_task
from serve.common import layout
from serve.runs import sealed_files
from serve.runs.stored_runs import sample_image
from serve.runtime.card.card import read_card
from serve.runtime.engines.base import executions_for, pair_id
from serve.runtime.errors import EngineError, PipelineError, UserError, did_you_mean
from serve.runtime.images.image_preprocessing import load


@dataclass(frozen=True)
class _Contestant:
    """An artifact of a run with its recommended or best pair. ``name`` is ``run/artifact``."""

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
    """A contestant that is open in its process. ``id`` is the pair's id."""

    id: str
    loaded: Loaded


def compare_runs(
    store: Path, names: Sequence[str], *, timing: Timing, rule: Recommend, devices: Sequence[str], listener: Listener
) -> Results:
    """Compare artifacts across runs, each with the execution that was best in its own run.

    Args:
        store: the folder of the runs.
        names: ``RUN`` means its baseline and its recommended artifact, ``RUN/ARTIFACT`` that artifact. Each runs with
            its recommended execution, or else its fastest. All are compared with the first.
        timing: how to measure speed.
        rule: the rule of the recommendation.
        devices: where to run them. If the best execution is for another device, the preferred engine that works here is
            used.
        listener: receives the progress.

    Returns:
        The measurements. A remark names answers that come from another machine.

    Raises:
        UserError: a run or artifact does not exist or was not measured, or the runs used different images. The message
            names the difference.
    """
    contestants = list({c.name: c for name in names for c in _contestants(store, name)}.values())
    if len(contestants) < 2:
        raise UserError("compare needs at least two artifacts: name two runs, or RUN/ARTIFACT twice")
    _check_comparable(contestants)
    task = find_task(contestants[0].report.task)
    answers = {c.name: _answers(Store(store), c) for c in contestants}
    opened: dict[str, _Opened] = {}
    skips: dict[str, Skip] = {}
    begun = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    with Pool(timing.batch_sizes, MAX_BATCH, listener) as pool:
        listener.started("memory")
        for done, contestant in enumerate(contestants, start=1):
            try:
                opened[contestant.name] = _open(pool, contestant, devices)
            except EngineError as error:
                skips[contestant.name] = Skip(kind="cannot_run_here", reason=str(error))
            listener.progressed(done / len(contestants), contestant.name)
        listener.ended("memory", 0.0, cached=False, skipped=None)
        first = contestants[0].name
        if first in skips:
            raise UserError(f"{first}, the reference of this comparison, cannot run here: {skips[first].reason}")
        listener.started("speed")
        with pool.alone():
            by_id = {opened[c.name].id: c for c in contestants if c.name in opened}
            takers = {
                name: _turn(store, contestant, opened[contestant.name].loaded.worker, timing)
                for name, contestant in by_id.items()
            }
            speeds = measure_speed(
                takers,
                timing,
                listener,
                renew=lambda name: _turn(store, by_id[name], pool.renew(by_id[name].name), timing),
                watch=Watch(pool.pids),
            )
        taken = sum(sum(map(sum, turns)) for speed in speeds.values() for turns in speed.rounds.values()) / 1e3
        listener.ended("speed", taken, cached=False, skipped=None)
    for name, each in opened.items():
        if each.id not in speeds:
            skips[name] = Skip(kind="failed", reason="its process ended while it was timed")
    if first in skips:
        raise PipelineError(f"{first}, the reference of this comparison: {skips[first].reason}")
    timed = {name: each for name, each in opened.items() if name not in skips}
    floats = [timed[c.name].id for c in contestants if c.name in timed and c.row.file and c.row.file.is_float]
    every = turns(speeds, floats=floats, baseline=[timed[first].id])

    def pair(contestant: _Contestant) -> Pair:
        name, parent = contestant.name, timed.get(f"{contestant.run}/{contestant.row.parent}")
        own, loaded = timed[name], timed[name].loaded
        measured = Measured(
            **dict(every.timed(own.id)),
            accuracy=accuracy(
                answers[name], answers[first] if name != first else None, contestant.measured.accuracy.answers, task
            ),
            footprint=loaded.footprint,
            vs_parent=compare(speeds[parent.id], speeds[own.id]) if parent else None,
        )
        return Pair(id=own.id, execution=loaded.execution, provider=loaded.provider, measured=measured)

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
    recommendation = recommend(
        rows,
        speeds,
        rule,
        task,
        differences={
            timed[name].id: task.difference(answers[first].evidence, answers[name].evidence) for name in timed
        },
        classes=contestants[0].report.data.classes,
    )
    remarks = (*recommendation.remarks, *_from_elsewhere(contestants))
    return Results(
        task=task.name,
        title=" and ".join(dict.fromkeys(c.run for c in contestants)),
        rows=tuple(rows),
        yardstick=every.yardstick,
        eager=every.eager,
        recommendation=recommendation.model_copy(update={"remarks": remarks}),
        measurement=Measurement(
            timing=timing,
            taken=begun,
            seconds=taken,
            cached=False,
            **dataclasses.asdict(disturbance_of(speeds.values(), "compare them again")),
        ),
    )


def _contestants(store: Path, name: str) -> Iterator[_Contestant]:
    run, artifact = layout.run_and_artifact(name)
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
    """Refuse runs that used different images, and name the images of each.

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
        raise UserError(f"these runs cannot be compared, because they were judged by different images: {said}")


def _from_elsewhere(contestants: Sequence[_Contestant]) -> list[str]:
    """Name the runs whose stored answers come from another machine."""
    here = Machine.from_json(machine(torch.device("cpu")))
    return [
        (
            f"The answers of {run} come from another machine ({report.machine.cpu}), but speed and memory from this "
            f"one ({here.cpu}): other kernels may give other answers."
        )
        for run, report in {c.run: c.report for c in contestants}.items()
        if (report.machine.cpu, report.machine.isa) != (here.cpu, here.isa)
    ]


def _answers(store: Store, contestant: _Contestant) -> Answers:
    stored = store.open(contestant.measured.accuracy.answers)
    if stored is None:
        raise UserError(f"the answers of {contestant.name} are no longer in the store; run {contestant.run} again")
    return load_answers(stored.folder)


def _open(pool: Pool, contestant: _Contestant, devices: Sequence[str]) -> _Opened:
    """Open a contestant with the execution of its measurement, or with the next one that works here.

    Raises:
        EngineError: none works. The message has each reason.
    """
    card = read_card(contestant.folder)
    usual = [execution for device in devices for execution in executions_for(card, device)]
    if contestant.pair.execution.device in devices:
        usual.insert(0, contestant.pair.execution)
    reasons = []
    for execution in usual:
        try:
            loaded = pool.load(contestant.name, contestant.folder, execution)
        except EngineError as error:
            reasons.append(str(error))
        else:
            return _Opened(pair_id(contestant.name, execution), loaded)
    raise EngineError("; ".join(dict.fromkeys(reasons)) or f"runs on {card.device} only")


def _turn(store: Path, contestant: _Contestant, worker: Worker, timing: Timing) -> Turn:
    """Send a contestant images of its own input size, and warm it up."""
    sample = sample_image(store, contestant.run)
    if sample is None:
        raise UserError(f"{store / contestant.run} has no sample image; run {contestant.run} again")
    sealed_files.require(store / contestant.run, sample.name)
    image = load(sample.read_bytes(), read_card(contestant.folder).preprocessing)
    for size in timing.batch_sizes:
        worker.keep(image.expand(size, -1, -1, -1))
    worker.warm(timing.batch_sizes)
    return functools.partial(worker.turn, timing=timing)
