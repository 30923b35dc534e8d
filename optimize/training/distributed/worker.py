"""One of the training processes: ``python -m optimize.training.distributed.worker FOLDER PLACE``.

The first reads the task from its folder, and sends it to the others. Each ends with its parent.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pickle
import socket
import sys
import threading
import warnings
from pathlib import Path

import torch
from torch import distributed

from optimize.data.sources import out_of_reach
from optimize.errors import PassError
from optimize.listener import Silent
from optimize.training.distributed import environment, group
from optimize.training.distributed.api import Task, other_random
from optimize.training.distributed.launch_local import RENDEZVOUS, RESULT, TASK, Place, failure
from optimize.training.loop import train
from optimize.training.randomness import restore_random_states
from serve.runtime.errors import UserError, one_line

#: How long a process waits for the others in a sum. Another may be decoding a large data set for the first time.
_PATIENCE = datetime.timedelta(hours=1)


class _Reporter(Silent):
    """Reports to the parent, one JSON object a line."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")

    def progressed(self, fraction: float, message: str) -> None:
        """Report the progress of the current step."""
        self._stream.write(json.dumps({"fraction": fraction, "message": message}) + "\n")

    def said(self, message: str) -> None:
        """Report a line for the user."""
        self._stream.write(json.dumps({"said": message}) + "\n")


def main(folder: Path, place: Place) -> None:
    """Train as one of several. The first writes the result."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener: Silent = Silent()
    if place.rank == 0:
        listener = _Reporter(os.dup(1))
        os.dup2(2, 1)  # prints of the user's code must not reach the parent
    device = torch.device(place.device)
    if device.type == "cuda":
        _take(device, place)
    by_file = {"init_method": f"file://{folder / RENDEZVOUS}"}
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        **(by_file if place.meeting is None else {"store": environment.within(place.meeting, environment.reach())}),
        rank=place.rank,
        world_size=place.world,
        timeout=_PATIENCE,
    )
    task = _handed_out(folder / TASK, place)
    torch.set_num_threads(task.threads)
    if place.rank == 0:
        restore_random_states(task.random, device)
    else:
        other_random(task.context.seed, place.rank)
    context = dataclasses.replace(task.context, device=device, listener=listener)
    result = train(task.module, context, task.config, **vars(task.manner))
    if place.rank == 0:
        torch.save({"module": task.module.cpu().state_dict(), "result": dataclasses.asdict(result)}, folder / RESULT)
    distributed.barrier()
    distributed.destroy_process_group()


def _take(device: torch.device, place: Place) -> None:
    """Select a GPU.

    Raises:
        UserError: it does not exist.
    """
    count = torch.cuda.device_count()
    if device.index >= count:
        raise UserError(
            f"processes: process {place.rank} should train on GPU {device.index} of {socket.gethostname()}, which "
            f"has {count}; each process needs its own GPU"
        )
    torch.cuda.set_device(device)


def _handed_out(file: Path, place: Place) -> Task:
    """Return the task, which the first reads from a file and sends to the others.

    Raises:
        UserError: the images cannot be read from this host.
    """
    body = b""
    if place.rank == 0:
        body = file.read_bytes()
        file.unlink()  # it may contain all images, and would remain if this process is killed
    task: Task = pickle.loads(group.of_the_first(body))  # from our own parent
    if place.rank and (missing := out_of_reach(task.context.data.train.sources)) is not None:
        raise UserError(
            f"{task.context.data.name}: {missing} cannot be read on {socket.gethostname()}, where process "
            f"{place.rank} trains; the images must have the same path on each host"
        )
    return task


def _end_with_parent() -> None:
    os.read(0, 1)  # not through a Python stream, whose lock would be held when the interpreter ends
    os._exit(1)


def _begin() -> int:
    folder, place = Path(sys.argv[1]), Place(**json.loads(sys.argv[2]))
    warnings.simplefilter("ignore")
    try:
        main(folder, place)
    except Exception as error:
        kind = "user" if isinstance(error, UserError) else "pass" if isinstance(error, PassError) else "other"
        reason = {"kind": kind, "message": str(error) if kind != "other" else one_line(error)}
        failure(folder, place.rank).write_text(json.dumps(reason), encoding="utf-8")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(_begin())
