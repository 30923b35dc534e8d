"""Training in several processes of one machine, from the side that starts them; `rank` is what runs there."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from optimize.context import Context
from optimize.errors import PassError
from optimize.listener import SILENT, Listener
from optimize.models.by_value import pickled_by_value
from optimize.store.history import History
from optimize.training.checkpoints import load_state
from optimize.training.config import TrainingConfig
from optimize.training.randomness import random_states
from optimize.training.records import Manner, TrainingResult
from serve.runtime.errors import UserError, one_line

#: Files of the folder that the processes share.
TASK, RESULT, RENDEZVOUS = "task.pickle", "result.pt", "rendezvous"

#: Seconds that the others are given to end by themselves after one has failed.
_PARTING = 2.0

_KINDS: dict[str, type[Exception]] = {"user": UserError, "pass": PassError}


@dataclass(frozen=True)
class Task:
    """What each process is to do: the arguments of `train`, and what the caller's process had set.

    Attributes:
        manner: how it is trained beside the settings.
        random: the caller's random states, which the first process goes on from.
        threads: that each computes with.
    """

    module: nn.Module
    context: Context
    config: TrainingConfig
    manner: Manner
    random: dict[str, Any]
    threads: int


def train_together(module: nn.Module, context: Context, config: TrainingConfig, manner: Manner) -> TrainingResult:
    """`train` in ``context.processes`` processes, each with a part of every batch; ``module`` gets what they find.

    Raises:
        UserError: there are more processes than GPUs, or images in a step; the module cannot be sent; or as `train`.
        PassError: as `train`, or a process ended otherwise.
    """
    _check(context, config)
    threads = max(1, torch.get_num_threads() // context.processes)
    quiet = replace(context, listener=SILENT)
    task = Task(module.cpu(), quiet, config, manner, random_states(context.device), threads)
    try:
        body = pickled_by_value(task)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything
        raise UserError(
            f"processes: this model or its data cannot be sent to other processes ({one_line(error)}); train in one"
        ) from None
    with tempfile.TemporaryDirectory(prefix="training-") as name:
        folder = Path(name)
        (folder / TASK).write_bytes(body)
        with _started(folder, context.processes) as ranks:
            _relay(ranks, folder, context.listener)
        found = torch.load(folder / RESULT, map_location="cpu", weights_only=True)
    load_state(module, found["module"])
    module.to(context.device).eval()
    result = found["result"]
    return TrainingResult(**{**result, "history": History.from_json(result["history"])})


def refuse_torchrun() -> None:
    """Refuse to be one of several processes that torchrun has started.

    Each would be a run of its own, from opening the data to measuring: only the trainings are to be shared.

    Raises:
        UserError: this is one.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" in os.environ and count > 1:
        raise UserError(
            f"torchrun has started this run {count} times, and each would make and measure everything; start it once, "
            f"with --processes {count} (processes={count} in Python): it starts the processes of each training itself"
        )


def failure(folder: Path, number: int) -> Path:
    """Where the process ``number`` says why it fails: ``{"kind": …, "message": …}``."""
    return folder / f"failure-{number}.json"


def _check(context: Context, config: TrainingConfig) -> None:
    count = context.processes
    if context.device.type == "cuda" and count > torch.cuda.device_count():
        raise UserError(f"processes: {count} are more than the {torch.cuda.device_count()} GPUs that there are")
    if config.batch_size < 2 * count * config.accumulate:
        parts = f" and each part of {config.accumulate} (accumulate)" if config.accumulate > 1 else ""
        raise UserError(
            f"processes: {count} cannot share steps of {config.batch_size} images (batch_size), two at least for "
            f"each{parts}"
        )


@contextlib.contextmanager
def _started(folder: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes; whichever still runs at the end is killed."""
    ranks: list[subprocess.Popen[str]] = []
    root = str(Path(__file__).parents[2])
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        # Gloo looks for the machine's own name otherwise, which many containers cannot resolve.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    try:
        for number in range(count):
            with (folder / f"errors-{number}.txt").open("w") as errors:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "optimize.training.rank", str(folder), str(number), str(count)],
                        stdin=subprocess.PIPE,  # which closes with us, however we end
                        stdout=subprocess.PIPE if number == 0 else errors,
                        stderr=errors,
                        text=True,
                        env=os.environ | variables,
                        start_new_session=True,  # Ctrl-C is for us, who end them
                    )
                )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _relay(ranks: Sequence[subprocess.Popen[str]], folder: Path, listener: Listener) -> None:
    """Tell the listener what the first process tells, until all have ended well."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert ranks[0].stdout is not None
    reader = threading.Thread(target=_read, args=(ranks[0].stdout, lines), daemon=True)
    reader.start()
    while True:
        codes = [process.poll() for process in ranks]
        if any(code not in (None, 0) for code in codes):
            _raise(ranks, folder)
        with contextlib.suppress(queue.Empty):
            while True:
                _tell(json.loads(lines.get(timeout=0.0 if None not in codes else 0.2)), listener)
        if None not in codes and not reader.is_alive():
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


def _raise(ranks: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    """Raise what a process failed with; of those that only miss another, the other counts."""
    for process in ranks:  # which soon miss each other
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PARTING)
    failed = [number for number, process in enumerate(ranks) if process.poll() not in (None, 0)]
    reasons = {
        number: json.loads(failure(folder, number).read_text(encoding="utf-8"))
        for number in failed
        if failure(folder, number).is_file()
    }
    for reason in reasons.values():
        if reason["kind"] in _KINDS:
            raise _KINDS[reason["kind"]](reason["message"])
    killed = [number for number in failed if (ranks[number].returncode or 0) < 0]
    if killed:
        name = signal.Signals(-(ranks[killed[0]].returncode or 0)).name
        raise PassError(f"process {killed[0]} of {len(ranks)} that train was ended by {name}")
    number = failed[0]
    last = (folder / f"errors-{number}.txt").read_text(errors="replace").strip().splitlines()[-1:]
    message = reasons[number]["message"] if number in reasons else " ".join(last) or "no message"
    raise PassError(f"process {number} of {len(ranks)} that train failed: {message}")


def other_random(seed: int, number: int) -> None:
    """Give a process that is not the first random states of its own, functions of the run's seed."""
    torch.manual_seed(seed * 1_000_003 + number)
    random.seed(seed * 1_000_003 + number)
