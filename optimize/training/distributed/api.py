"""Starts training in several processes. `worker` is the code that runs in each.

The processes are started on this machine. Under torchrun there is one for each of its processes, on one host or
several.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import random
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from optimize.context import Context
from optimize.errors import PassError
from optimize.listener import SILENT, Listener
from optimize.models.pickling import pickled_by_value
from optimize.store.training_history import History
from optimize.training.checkpoints import load_state
from optimize.training.config import TrainingConfig
from optimize.training.distributed.environment import Launch, launch
from optimize.training.distributed.launch_local import RESULT, TASK, Ended, Ranks, here
from optimize.training.distributed.launch_torchrun import everywhere
from optimize.training.randomness import random_states
from optimize.training.results import Manner, TrainingResult
from serve.runtime.errors import UserError, one_line

#: Seconds for the other processes to end by themselves after one has failed.
_PARTING = 4.0

#: Seconds between two checks whether one has ended.
_LOOKING = 0.2

_KINDS: dict[str, type[Exception]] = {"user": UserError, "pass": PassError}


@dataclass(frozen=True)
class Task:
    """The work of each process: the arguments of `train`, and settings of the caller's process.

    Attributes:
        manner: how to train, besides the settings.
        random: the caller's random states, from which the first process continues.
        threads: the number of threads of each process.
    """

    module: nn.Module
    context: Context
    config: TrainingConfig
    manner: Manner
    random: dict[str, Any]
    threads: int


def train_together(module: nn.Module, context: Context, config: TrainingConfig, manner: Manner) -> TrainingResult:
    """Run `train` in ``context.processes`` processes with parts of every batch, and load the result into ``module``.

    Raises:
        UserError: there are more processes than GPUs, or than images in a step, or the module cannot be sent. Or as in
            `train`.
        PassError: as in `train`, or a process ended unexpectedly.
        PipelineError: torchrun's processes do not answer.
    """
    started = launch()
    _check(context, config, started)
    of_this_host = started.local_world if started else context.processes
    threads = max(1, torch.get_num_threads() // of_this_host)
    task = Task(module.cpu(), _of_all(context, started), config, manner, random_states(context.device), threads)
    try:
        body = pickled_by_value(task)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything
        raise UserError(
            f"processes: this model or its data cannot be sent to other processes ({one_line(error)}); train in one"
        ) from None
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        folder = Path(name)
        (folder / TASK).write_bytes(body)
        with _ranks(folder, context, started) as ranks:
            _relay(ranks, context.listener)
        found = torch.load(folder / RESULT, map_location="cpu", weights_only=True)
    load_state(module, found["module"])
    module.to(context.device).eval()
    result = found["result"]
    return TrainingResult(**{**result, "history": History.from_json(result["history"])})


def _ranks(folder: Path, context: Context, started: Launch | None) -> AbstractContextManager[Ranks]:
    if started is None:
        return here(folder, context.processes, context.device.type)
    return everywhere(folder, started, context.device.type)


def _of_all(context: Context, started: Launch | None) -> Context:
    """Return the context for all processes, without the store's folders if some are on another host."""
    if started is None or not started.several_hosts:
        return dataclasses.replace(context, listener=SILENT)
    return dataclasses.replace(context, listener=SILENT, store=None, scratch=None)


def _check(context: Context, config: TrainingConfig, started: Launch | None) -> None:
    count = context.processes
    if started is None and context.device.type == "cuda" and count > torch.cuda.device_count():
        raise UserError(f"processes: {count} exceeds the {torch.cuda.device_count()} GPUs of this machine")
    if config.batch_size < 2 * count * config.accumulate:
        parts = f" in each of its {config.accumulate} parts (accumulate)" if config.accumulate > 1 else ""
        raise UserError(
            f"processes: {count} cannot share steps of {config.batch_size} images (batch_size): each needs at "
            f"least two{parts}"
        )


def _relay(ranks: Ranks, listener: Listener) -> None:
    """Pass the first process's progress to the listener, until all processes have ended well."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(ranks.events, lines), daemon=True)
    reader.start()
    while True:
        ended = ranks.ended()
        if any(each.code for each in ended.values()):
            raise _reason(_parted(ranks), ranks.world)
        over = len(ended) == ranks.world
        with contextlib.suppress(queue.Empty):
            while True:
                _tell(json.loads(lines.get(timeout=0.0 if over else _LOOKING)), listener)
        if over and not reader.is_alive():
            while not lines.empty():
                _tell(json.loads(lines.get()), listener)
            return


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        lines.put(line)


def _tell(event: dict[str, Any], listener: Listener) -> None:
    if "said" in event:
        listener.said(event["said"])
    else:
        listener.progressed(event["fraction"], event["message"])


def _parted(ranks: Ranks) -> dict[int, Ended]:
    """Return how the processes have ended. After one fails the others soon follow. Running ones are left out."""
    last = time.monotonic() + _PARTING
    while len(ended := ranks.ended()) < ranks.world and time.monotonic() < last:
        time.sleep(_LOOKING)
    return ended


def _reason(ended: Mapping[int, Ended], world: int) -> Exception:
    """Return the error of the process that failed first: others may only report a lost connection."""
    failed = {number: each for number, each in sorted(ended.items()) if each.code}
    for each in failed.values():
        if each.kind in _KINDS:
            return _KINDS[each.kind](each.message)
    # A process that failed may only have lost the connection to one that was killed.
    number = next((number for number, each in failed.items() if each.code < 0), min(failed))
    end = failed[number]
    where = f" on {end.host}" if end.host else ""
    how = f"was ended by {signal.Signals(-end.code).name}" if end.code < 0 else f"failed: {end.message or 'no message'}"
    return PassError(f"process {number} of the {world} training processes{where} {how}")


def other_random(seed: int, number: int) -> None:
    """Set the random states of a process other than the first, as functions of the run's seed."""
    torch.manual_seed(seed * 1_000_003 + number)
    random.seed(seed * 1_000_003 + number)
