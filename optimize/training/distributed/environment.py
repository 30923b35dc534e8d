"""What torchrun says of a process that it has started: its number among the others, and the store they share.

torch is imported only where a process is one of several: a command line begins here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve.runtime.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


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
