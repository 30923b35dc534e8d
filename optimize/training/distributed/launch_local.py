"""Starts the processes that train together on this machine. `worker` is the code that runs in each.

torch's own launcher, `torch.distributed.launcher.api.elastic_launch` (2.14), was tried instead, with two gloo processes
on two busy cores (November 2026):

- From start to end, two processes that only meet take 4.2 to 4.4 s. Here it is 3.9 to 4.0 s (medians of five).
- It listens at two ports on all interfaces, also with the endpoint 127.0.0.1, and requires no token. Here the processes
  meet by a file, and gloo listens only on loopback.
- If the program that starts them is killed, its processes continue training. Here they end with it, because their input
  closes.
- It logs each end on stderr, and the reason of a failure is a page of text in its exception. Here it is one line.

It would replace only `here`. `Rank` is also needed under torchrun, because each training there has its own processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

#: Files of a process's folder, which the processes of one machine share: the task (from the first), the result (from
#: the first), and their meeting point.
TASK, RESULT, RENDEZVOUS = "task.pickle", "result.pt", "rendezvous"


@dataclass(frozen=True)
class Place:
    """The place of a process among the others, and where they meet.

    Attributes:
        rank: its number, from 0.
        world: the number of processes.
        device: its device: ``cpu``, ``cuda:1``.
        meeting: the training's name in torchrun's store. None: they meet by a file in their shared folder.
    """

    rank: int
    world: int
    device: str
    meeting: str | None = None


@dataclass(frozen=True)
class Ended:
    """How a process has ended.

    Attributes:
        code: 0, its exit code, or minus the signal that ended it.
        kind: the kind of its exception: ``user``, ``pass`` or ``other``. Empty if it left none.
        message: the exception's message, or the last line of its errors.
        host: its host, if that may not be the caller's.
    """

    code: int
    kind: str = ""
    message: str = ""
    host: str = ""


class Ranks(Protocol):
    """The processes of a training, as their caller sees them.

    Attributes:
        world: the number of processes.
        events: the progress of the first, one JSON object a line.
    """

    @property
    def world(self) -> int: ...  # noqa: D102

    @property
    def events(self) -> IO[str]: ...  # noqa: D102

    def ended(self) -> dict[int, Ended]:
        """Return the processes that have ended, by their numbers."""


class Rank:
    """One of the processes. It ends with this process, however that ends.

    Args:
        folder: the folder of its files.
        place: its place among the others.
        one_host: whether all are on this machine.
    """

    def __init__(self, folder: Path, place: Place, *, one_host: bool) -> None:
        self._folder, self._place = folder, place
        root = str(Path(__file__).parents[3])
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        if one_host:
            # Otherwise gloo looks up the machine's own name, which many containers cannot resolve.
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        words = [str(folder), json.dumps(dataclasses.asdict(place))]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "optimize.training.distributed.worker", *words],
                stdin=subprocess.PIPE,  # closes with this process, however it ends
                stdout=subprocess.PIPE if place.rank == 0 else errors,
                stderr=errors,
                text=True,
                env=os.environ | variables,
                start_new_session=True,  # this process handles Ctrl-C and ends them
            )

    @property
    def events(self) -> IO[str]:
        """Return the progress of the first process."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def _errors(self) -> Path:
        return self._folder / f"errors-{self._place.rank}.txt"

    def ended(self, seconds: float = 0.0) -> Ended | None:
        """Wait up to ``seconds`` for its end, and return how it ended. None if it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        code = self._process.returncode
        if not code:
            return None if code is None else Ended(code)
        if (said := failure(self._folder, self._place.rank)).is_file():
            return Ended(code, **json.loads(said.read_text(encoding="utf-8")))
        return Ended(code, message=" ".join(self._errors.read_text(errors="replace").strip().splitlines()[-1:]))

    def kill(self) -> Ended:
        """Kill it if it still runs, and return how it ended."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        ended = self.ended()
        assert ended is not None
        return ended


@dataclass(frozen=True)
class _Here:
    ranks: list[Rank]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def events(self) -> IO[str]:
        return self.ranks[0].events

    def ended(self) -> dict[int, Ended]:
        found = {number: rank.ended() for number, rank in enumerate(self.ranks)}
        return {number: ended for number, ended in found.items() if ended is not None}


@contextmanager
def here(folder: Path, count: int, kind: str) -> Iterator[Ranks]:
    """Start ``count`` processes on this machine's devices of a kind. Those that still run at the end are killed."""
    ranks: list[Rank] = []
    try:
        for number in range(count):
            device = f"cuda:{number}" if kind == "cuda" else kind
            ranks.append(Rank(folder, Place(number, count, device), one_host=True))
        yield _Here(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def failure(folder: Path, number: int) -> Path:
    """Return the file where the process ``number`` reports its failure: ``{"kind": …, "message": …}``."""
    return folder / f"failure-{number}.json"
