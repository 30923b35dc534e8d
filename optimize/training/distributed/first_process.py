"""Lets the first of torchrun's processes carry out the run, while the others only train with it.

torch is imported only if there are several processes, because the command line starts here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from optimize.training.distributed.environment import Launch, launch
from serve.runtime.card.execution import STARTED_WITH
from serve.runtime.device.cores import cores

_THREADS = "OMP_NUM_THREADS"


def only_first() -> None:
    """Return only in the first of torchrun's processes. The others train with it, and end without returning.

    Nothing happens if torchrun has not started several processes, or in a second call.

    Raises:
        UserError: the program has joined the processes into a group of its own.
        SystemExit: this is not the first process, and its work is done.
    """
    started = launch()
    if started is None:
        return
    if started.rank and "torch" not in sys.modules:
        # If a connection is lost, C++ prints its stack. The first process already reports the loss.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _take_back_one_thread(started)
    from optimize.training.distributed import launch_torchrun

    if started.rank:
        sys.exit(launch_torchrun.follow(started))
    launch_torchrun.lead(started)


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """Apply `only_first` to a whole program. If the program fails, torchrun ends the other processes."""
    only_first()
    try:
        yield
    except BaseException as error:
        if launch() is not None and (not isinstance(error, SystemExit) or error.code):
            from optimize.training.distributed import launch_torchrun

            launch_torchrun.failed()
        raise


def _take_back_one_thread(started: Launch) -> None:
    """Undo torchrun's setting (2.14) of one thread for each of several processes, if the user set none.

    The first process must measure and calibrate as if it were alone, and the training processes share the cores.
    torchrun is our parent process, so its environment shows what the user set.
    """
    if started.local_world == 1 or os.environ.get(_THREADS) != "1":
        return
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        if any(entry.startswith(f"{_THREADS}=".encode()) for entry in said):
            return
    del os.environ[_THREADS]
    STARTED_WITH.pop(_THREADS, None)  # nobody set it
    if torch := sys.modules.get("torch"):  # torch has already read it
        torch.set_num_threads(cores())
