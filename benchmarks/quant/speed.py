"""How long each way quantizes, and one image takes in each engine, in turns: for a machine that does nothing else."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.quant.record import RowRecord, SubjectRecord, Timed
from benchmarks.quant.ways import Bed, Way
from optimize.measure.bench import Bench, Candidate
from optimize.measure.process_pool import Pool
from optimize.passes.base import pass_of
from serve.runtime.card.execution import Execution


def seconds_of(bed: Bed, way: Way) -> float:
    """How long the passes of a way take, made once more into a folder that is thrown away, while nobody else measures.

    Raises:
        UserError: see `Pool.alone`.
    """
    made = bed.made(way)
    context = bed.base.session.context
    total = 0.0
    with Pool((1,), 1, context.listener) as pool, pool.alone(), tempfile.TemporaryDirectory() as scratch:
        for number, (parent, config) in enumerate(zip(made, way.stages, strict=False)):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            torch.manual_seed(context.seed)
            start = time.perf_counter()
            pass_of(config).apply(parent.artifact, config, context, folder)
            total += time.perf_counter() - start
    return total


def timed(bed: Bed, ways: Sequence[Way], record: SubjectRecord, bench: Bench) -> SubjectRecord:
    """The record with the times of one image in all engines that answered, all taken in turns.

    Args:
        bed: what the ways start from.
        ways: those of the record's rows that were made.
        record: what is known.
        bench: what measures.
    """
    running: float | None = os.getloadavg()[0]
    rows = {row.name: row for row in record.rows}
    candidates = [
        Candidate(bed.made(way)[-1].artifact, Execution(engine)) for way in ways for engine in rows[way.name].answered
    ]
    kept = bench.speed(candidates, beside_eager=False)
    taken = datetime.datetime.fromisoformat(kept.created)
    if kept.cached:  # what runs now says nothing of then
        running = record.timed.running if record.timed is not None and record.timed.taken == taken else None
    medians: dict[str, dict[str, tuple[float, ...]]] = {way.name: {} for way in ways}
    for candidate in candidates:
        if candidate.id in kept.value.speeds:
            found = tuple(kept.value.speeds[candidate.id].medians())
            medians[candidate.artifact.name][candidate.execution.engine] = found
    return record.model_copy(
        update={
            "rows": tuple(_with_medians(row, medians) for row in record.rows),
            "timed": Timed(
                taken=taken,
                rounds=bench.timing.rounds,
                seconds=bench.timing.seconds,
                running=running,
            ),
        }
    )


def _with_medians(row: RowRecord, medians: Mapping[str, Mapping[str, tuple[float, ...]]]) -> RowRecord:
    return row.model_copy(update={"medians": dict(medians.get(row.name, {}))})
