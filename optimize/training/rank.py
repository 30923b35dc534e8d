"""One of the processes that train together: ``python -m optimize.training.rank FOLDER NUMBER COUNT``.

What it is to do lies in the folder, which its parent made (`together`); it ends with its parent.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pickle
import sys
import threading
import warnings
from pathlib import Path

import torch
from torch import distributed

from optimize.errors import PassError
from optimize.listener import Silent
from optimize.training.loop import train
from optimize.training.randomness import restore_random_states
from optimize.training.together import RENDEZVOUS, RESULT, TASK, Task, failure, other_random
from serve.runtime.errors import UserError, one_line

#: How long one waits for the others in a sum; another may be decoding a large data set for the first time.
_PATIENCE = datetime.timedelta(hours=1)


class _Telling(Silent):
    """Tells the parent, a JSON object a line."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")

    def progressed(self, fraction: float, message: str) -> None:
        """Of the step that is under way."""
        self._stream.write(json.dumps({"fraction": fraction, "message": message}) + "\n")

    def said(self, message: str) -> None:
        """A line for the user."""
        self._stream.write(json.dumps({"said": message}) + "\n")


def main(folder: Path, number: int, count: int) -> None:
    """Train as the process ``number`` of ``count``; the first leaves the result."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener: Silent = Silent()
    if number == 0:
        listener = _Telling(os.dup(1))
        os.dup2(2, 1)  # what the user's code prints is not for the parent
    task: Task = pickle.loads((folder / TASK).read_bytes())  # of our own parent
    torch.set_num_threads(task.threads)
    device = torch.device("cuda", number) if task.context.device.type == "cuda" else task.context.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder / RENDEZVOUS}",
        rank=number,
        world_size=count,
        timeout=_PATIENCE,
    )
    if number == 0:
        restore_random_states(task.random, device)
    else:
        other_random(task.context.seed, number)
    context = dataclasses.replace(task.context, device=device, listener=listener)
    result = train(task.module, context, task.config, **vars(task.manner))
    if number == 0:
        torch.save({"module": task.module.cpu().state_dict(), "result": dataclasses.asdict(result)}, folder / RESULT)
    distributed.barrier()
    distributed.destroy_process_group()


def _end_with_parent() -> None:
    os.read(0, 1)  # not through a Python stream, whose lock would be held when the interpreter ends
    os._exit(1)


def _begin() -> int:
    folder, number, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    try:
        main(folder, number, count)
    except Exception as error:
        kind = "user" if isinstance(error, UserError) else "pass" if isinstance(error, PassError) else "other"
        reason = {"kind": kind, "message": str(error) if kind != "other" else one_line(error)}
        failure(folder, number).write_text(json.dumps(reason), encoding="utf-8")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(_begin())
