"""Reads torchrun's environment of a process: its rank, and the store that all processes share.

torch is imported only if there are several processes, because the command line starts here.
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
    """The place of this process among torchrun's processes.

    Attributes:
        rank: its number, from 0.
        world: the number of processes on all hosts.
        local_rank: its number on its host, which is also the number of its GPU.
        local_world: the number of processes on its host.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def several_hosts(self) -> bool:
        """Return whether there are processes on another host."""
        return self.local_world < self.world


def launch() -> Launch | None:
    """Return torchrun's facts about this process. None if it was started otherwise, or alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    found = Launch(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    return found if found.world > 1 else None


def processes(asked: int | None) -> int:
    """Return how many processes train together: all of torchrun's, otherwise as many as requested, by default one.

    Raises:
        UserError: torchrun has started another number.
    """
    started = launch()
    if started is None:
        return asked or 1
    if asked is not None and asked != started.world:
        raise UserError(
            f"processes: {asked} requested, but torchrun has started {started.world}; leave --processes out, or "
            "start without torchrun"
        )
    return started.world


def serves(started: Launch) -> bool:
    """Return whether this process must be the store: the first, if torchrun was set not to be it (2.14)."""
    return started.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def reach(*, serving: bool = False) -> TCPStore:
    """Connect to the store of all torchrun processes. With ``serving`` this process is the store itself.

    A value may have 8 MiB. A longer one ends the connection (torch 2.14).
    """
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: TCPStore = distributed.TCPStore(  # type: ignore[attr-defined]  # torch (2.14) does not declare the export
        host, port, is_master=serving, wait_for_workers=False
    )
    return store


def within(name: str, whole: Store) -> PrefixStore:
    """Return the part of a store whose keys begin with a name."""
    from torch import distributed

    part: PrefixStore = distributed.PrefixStore(name, whole)  # type: ignore[attr-defined]
    return part
