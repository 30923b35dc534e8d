"""An artifact profiled by every execution that tells: each in a process of its own, one after the other."""

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

#: Images at most; a batch is held as bytes, and every activation of it.
MOST_IMAGES: Final = 1024

#: Why engines are not read.
_UNREAD: Final = (
    "it does not say what single layers take: its graph is compiled or recorded as a whole; "
    "the same file by another engine can be profiled"
)


def profile_artifact(
    folder: Path,
    *,
    batch: int = 1,
    execution: str | Execution | None = None,
    floats: Path | None = None,
    listener: Listener = SILENT,
) -> Profiled:
    """What each layer of an artifact takes, by the executions on the CPU that tell.

    The images are noise: a layer does the same operations on any, and but for subnormal numbers, which are slow, a CPU
    takes as long for them. No other run of this machine measures meanwhile.

    Args:
        folder: the artifact's, whose files are checked.
        batch: images that are run together.
        execution: an engine's name, for it with its usual settings, or one execution; by default all that run it.
        floats: the float program that it was made from (see `float_program`): layers of an int8 artifact are called as
            there.
        listener: told of each.

    Raises:
        UserError: the folder is no whole artifact, the batch is no number of images, or nothing that was asked for runs
            it, or tells.
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
    """Of an artifact and what it was made from, nearest last, the nearest float program."""
    found = None
    for folder, card in line:
        if card.format == "exported_program" and card.precision == "float32":
            found = folder / card.file
    return found


def _chosen(card: Card, wanted: str | Execution | None) -> list[Execution]:
    """The executions that are profiled.

    Raises:
        UserError: the engine is unknown, or does not run the artifact here.
    """
    if wanted is None:
        found = executions_for(card)
        if not found:
            raise UserError(f"{card.name}: no engine runs it on a CPU here, and profiles are of CPUs")
        return found
    entry = find_engine(wanted if isinstance(wanted, str) else wanted.engine)
    by = Execution(wanted, entry.devices[0]) if isinstance(wanted, str) else wanted
    entry.settings(by.options)
    if _untold(by) is None and (reason := entry.refuses(card, "cpu")) is not None:
        raise UserError(f"{card.name}: {reason}")
    return [by]


def _untold(by: Execution) -> str | None:
    """Why an execution is not profiled, before anything is opened."""
    if by.engine not in readers():
        return _UNREAD
    if by.device_type != "cpu":
        return f"layers are profiled on the CPU, not on {by.device}"
    return "an execution with batch buckets cannot be profiled; leave them out" if by.buckets else None


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
