"""Where torchrun has started several processes, the first carries out the run, and the others train with it.

torch is imported only where a process is one of several: a command line begins here.
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
    """Go on in the first of torchrun's processes alone. The others do not come back: they train with it, and end.

    Nothing happens where torchrun has not started several, or the second time.

    Raises:
        UserError: the program has joined the processes into a group of its own.
        SystemExit: this is another than the first, which has ended.
    """
    started = launch()
    if started is None:
        return
    if started.rank and "torch" not in sys.modules:
        # Of a connection that is lost C++ prints its stack, and of what is lost the first process tells.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _take_back_one_thread(started)
    from optimize.training.distributed import launch_torchrun

    if started.rank:
        sys.exit(launch_torchrun.follow(started))
    launch_torchrun.lead(started)


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """`only_first`, for a whole program whose end tells how it went: where it fails, torchrun ends the others."""
    only_first()
    try:
        yield
    except BaseException as error:
        if launch() is not None and (not isinstance(error, SystemExit) or error.code):
            from optimize.training.distributed import launch_torchrun

            launch_torchrun.failed()
        raise


def _take_back_one_thread(started: Launch) -> None:
    """Undo that torchrun (2.14) has each of several processes compute with one thread where the user says nothing.

    The first measures and calibrates as it does alone, and those that train share the cores. torchrun is our parent:
    what the user has said stands in the environment that it was started with.
    """
    if started.local_world == 1 or os.environ.get(_THREADS) != "1":
        return
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        if any(entry.startswith(f"{_THREADS}=".encode()) for entry in said):
            return
    del os.environ[_THREADS]
    STARTED_WITH.pop(_THREADS, None)  # nobody has said it
    if torch := sys.modules.get("torch"):  # which has read it
        torch.set_num_threads(cores())
