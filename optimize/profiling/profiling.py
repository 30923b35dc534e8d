"""Profiles an artifact with every execution that reports layers, each in its own process, one after the other."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from optimize.listener import SILENT, Listener
from optimize.measure.machine import machine, versions
from optimize.measure.process_pool import Pool
from optimize.profiling.base import readers
from optimize.profiling.profile_records import Profile, Profiled
from optimize.profiling.profiling_process import in_process
from optimize.store.keys import content
from serve.runtime.card.card import Card, load_card
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import execution_id, executions_for, find_engine
from serve.runtime.errors import CardError, PipelineError, UserError

#: The largest batch. It is held as bytes, with every activation.
MOST_IMAGES: Final = 1024

#: Why engines are not read.
_UNREAD: Final = (
    "it cannot time single layers, because its graph is compiled or recorded as a whole; profile the same file "
    "with another engine"
)


def profile_artifact(
    folder: Path,
    *,
    batch: int = 1,
    execution: str | Execution | None = None,
    floats: Path | None = None,
    listener: Listener = SILENT,
) -> Profiled:
    """Measure the work and the time of each layer of an artifact, with the executions on the CPU that report it.

    The images are noise: a layer does the same operations on any image, and takes as long on a CPU, except for
    subnormal numbers, which are slow. No other run on this machine measures at the same time.

    Args:
        folder: the artifact's folder, whose files are checked.
        batch: the number of images in one batch.
        execution: the name of an engine, which stands for its default settings, or one execution. By default all that
            can run the artifact.
        floats: its float program (see `float_program`), which names the layers of an int8 artifact.
        listener: receives the progress.

    Raises:
        UserError: the folder is not a complete artifact, the batch is not a number of images, or no requested execution
            runs it or reports layers.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MOST_IMAGES:
        raise UserError(f"batch: must be a whole number of images from 1 to {MOST_IMAGES:,}, found {batch!r}")
    try:
        card = load_card(folder)
    except CardError as error:
        raise UserError(f"{folder} cannot be profiled: {error}") from None
    chosen = _chosen(card, execution)
    noise = torch.randint(0, 256, (batch, *card.preprocessing.shape), dtype=torch.uint8, generator=_seeded())
    profiles: list[Profile] = []
    unable: dict[str, str] = {}
    with Pool((batch,), batch, listener) as pool:
        for by in chosen:
            name = execution_id(by)
            if (reason := _untold(by)) is not None:
                unable[name] = reason
                continue
            listener.started(name)
            started = time.monotonic()
            try:
                with pool.alone():
                    body = pool.another().invoke(
                        in_process,
                        noise,
                        folder=str(folder.resolve()),
                        execution=by.to_json(),
                        batch=batch,
                        floats=str(floats.resolve()) if floats is not None else None,
                    )
                pool.close()
            except UserError:
                raise
            except PipelineError as error:  # an engine that is not installed here is one of several
                unable[name] = str(error)
                listener.ended(name, 0.0, cached=False, skipped=str(error))
                continue
            profiles.append(Profile.from_json(body))
            listener.ended(name, time.monotonic() - started, cached=False, skipped=None)
    if not profiles:
        raise UserError("; ".join(f"{name}: {reason}" for name, reason in unable.items()))
    return Profiled(
        title=f"{card.model} on {card.data.get('name', 'unknown data')}",
        artifact=card.name,
        content=content(card),
        precision=card.precision,
        batch=batch,
        profiles=tuple(profiles),
        unable=unable,
        cpu=str(machine(torch.device("cpu"))["cpu"]),
        versions={name: version for name, version in versions().items() if version},
        taken=datetime.datetime.now(datetime.UTC),
    )


def float_program(line: Iterable[tuple[Path, Card]]) -> Path | None:
    """Return the nearest float program among an artifact (last) and its ancestors."""
    found = None
    for folder, card in line:
        if card.format == "exported_program" and card.precision == "float32":
            found = folder / card.file
    return found


def _chosen(card: Card, wanted: str | Execution | None) -> list[Execution]:
    """Return the executions to profile.

    Raises:
        UserError: the engine is unknown, or does not run the artifact here.
    """
    if wanted is None:
        found = executions_for(card)
        if not found:
            raise UserError(f"{card.name}: no engine runs it on a CPU here, and only CPUs can be profiled")
        return found
    entry = find_engine(wanted if isinstance(wanted, str) else wanted.engine)
    by = Execution(wanted, entry.devices[0]) if isinstance(wanted, str) else wanted
    entry.settings(by.options)
    if _untold(by) is None and (reason := entry.refuses(card, "cpu")) is not None:
        raise UserError(f"{card.name}: {reason}")
    return [by]


def _untold(by: Execution) -> str | None:
    """Say why an execution is not profiled, before anything is opened."""
    if by.engine not in readers():
        return _UNREAD
    if by.device_type != "cpu":
        return f"layers are profiled on the CPU, not on {by.device}"
    return "an execution with batch buckets cannot be profiled; leave them out" if by.buckets else None


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
