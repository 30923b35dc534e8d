"""A process that torchrun has started as one of several: the first carries out the run, the others train with it.

torch is imported only where a process is one of several: a command line begins here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serve.runtime.cores import cores
from serve.runtime.errors import UserError
from serve.runtime.execution import STARTED_WITH

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Launch:
    """Which of torchrun's processes this is, by torchrun's own words.

    Attributes:
        rank: its number, from 0.
        world: how many there are, on all hosts.
        local_rank: its number on its host; on GPUs that of its own.
        local_world: how many there are on its host.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def several_hosts(self) -> bool:
        """Whether there are others on another host."""
        return self.local_world < self.world


def launch() -> Launch | None:
    """What torchrun says of this process; None: it has not started it, or has started it alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    found = Launch(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    return found if found.world > 1 else None


def processes(asked: int | None) -> int:
    """How many are to train together: all that torchrun has started; otherwise as many as asked for, one by default.

    Raises:
        UserError: torchrun has started another number.
    """
    started = launch()
    if started is None:
        return asked or 1
    if asked is not None and asked != started.world:
        raise UserError(
            f"processes: {asked} are asked for, and torchrun has started {started.world}, which train together; leave "
            f"--processes out, or start without torchrun"
        )
    return started.world


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
    from optimize.training import following

    if started.rank:
        sys.exit(following.follow(started))
    following.lead(started)


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """`only_first`, for a whole program whose end tells how it went: where it fails, torchrun ends the others."""
    only_first()
    try:
        yield
    except BaseException as error:
        if launch() is not None and (not isinstance(error, SystemExit) or error.code):
            from optimize.training import following

            following.failed()
        raise


def serves(started: Launch) -> bool:
    """Whether this process is to be the store: the first, where torchrun is asked not to be it itself (2.14)."""
    return started.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def reach(*, serving: bool = False) -> TCPStore:
    """The store that all of torchrun's processes reach: a client of it, or, with ``serving``, the store itself.

    A value may have 8 MiB; a longer one ends the connection (torch 2.14).
    """
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: TCPStore = distributed.TCPStore(  # type: ignore[attr-defined]  # torch (2.14) exports it without saying so
        host, port, is_master=serving, wait_for_workers=False
    )
    return store


def within(name: str, whole: Store) -> PrefixStore:
    """The part of a store whose keys begin with a name."""
    from torch import distributed

    part: PrefixStore = distributed.PrefixStore(name, whole)  # type: ignore[attr-defined]
    return part


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
