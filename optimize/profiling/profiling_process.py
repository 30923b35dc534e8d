"""The process that profiles an artifact: one for each execution, with the execution's own threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from optimize.export.macs import Work
from optimize.profiling.base import WARM_CALLS, Piece, Subject, readers
from optimize.profiling.layer_names import float_layers
from optimize.profiling.peaks import copy_rate, peak
from optimize.profiling.profile_records import Layer, Profile
from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution, settle
from serve.runtime.engines.base import execution_id, find_engine, unavailable
from serve.runtime.errors import EngineError

#: Seconds of timed calls, for whole calls and for calls with measurement inside, and their least and largest number.
_SECONDS: Final = 1.0
_FEWEST, _MOST = 5, 100


def in_process(
    payload: bytearray, *, folder: str, execution: Mapping[str, Any], batch: int, floats: str | None = None
) -> dict[str, Any]:
    """Profile an artifact with an execution. Returns a `Profile` as JSON values.

    Args:
        payload: ``uint8 (batch, C, H, W)`` images, as raw memory.
        folder: the artifact's folder.
        execution: the execution.
        batch: the number of images in one batch.
        floats: its float program, for the names of its layers.

    Raises:
        EngineError: the engine does not run it here.
        PipelineError: the engine's report cannot be read.
    """
    by = Execution.from_json(execution)
    entry, reader = find_engine(by.engine), readers()[by.engine]
    settle(by, computes_with_torch=entry.computes_with_torch)
    if (reason := unavailable(by.engine, by.device_type)) is not None:
        raise EngineError(reason)
    card = load_card(Path(folder))
    images = torch.frombuffer(payload, dtype=torch.uint8).view(batch, *card.preprocessing.shape)
    provider, times = _whole_calls(Subject(Path(folder), card, by, images, _MOST))
    call_ms = statistics.median(times)
    calls = max(_FEWEST, min(_MOST, int(_SECONDS * 1e3 / call_ms)))
    known = float_layers(Path(floats), batch, card.preprocessing.shape) if floats is not None else ()
    reading = reader.read(Subject(Path(folder), card, by, images, calls, tuple(known)))
    layers = tuple(map(_layer, reading.pieces))
    precisions = sorted({layer.precision for layer in layers if layer.macs and layer.precision})
    return Profile(
        runs_on=execution_id(by),
        execution=by,
        provider=provider,
        calls=calls,
        call_ms=call_ms,
        layers=layers,
        left_macs=reading.left_macs,
        peaks=tuple(peak(precision, reader, by.cores) for precision in precisions),
        copy_bytes_per_s=copy_rate(by.cores),
        note=reading.note,
    ).to_json()


def _whole_calls(subject: Subject) -> tuple[str, list[float]]:
    """Return the library that executes it, and milliseconds of calls without measurement inside."""
    engine = subject.open()
    for _ in range(WARM_CALLS):
        subject.call(engine)
    times: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(times) < _FEWEST or (time.perf_counter() < until and len(times) < subject.calls):
        started = time.perf_counter()
        subject.call(engine)
        times.append((time.perf_counter() - started) * 1e3)
    return engine.provider, times


def _layer(piece: Piece) -> Layer:
    work: Work | None = piece.work
    return Layer(
        name=piece.name,
        kind=piece.kind,
        precision=piece.precision,
        ms=statistics.median(piece.ms),
        macs=work.macs if work else None,
        weights=work.weights if work else None,
        read=work.read if work else None,
        written=work.written if work else None,
        start_ms=piece.start_ms,
        after=piece.after,
    )
