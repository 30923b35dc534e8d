"""The processes that train together, from the side that starts them; `worker` is what runs in each.

torch's own launcher, `torch.distributed.launcher.api.elastic_launch` (2.14), was tried in the place of this one, with
two gloo processes on two busy cores (November 2026):

- From start to end two processes that only meet take 4.2 to 4.4 s, and 3.9 to 4.0 s here (medians of five).
- It listens at two ports on all interfaces, also with the endpoint 127.0.0.1, and asks nobody for a token. Here the
  processes meet by a file, and gloo listens on loopback alone.
- When the program that starts them is killed, its processes train on. Here they end with it, by their closed input.
- It logs each end on stderr, and the reason of a failure is a page of text in its exception. Here it is one line.

It would replace `here` alone. `Rank` is needed under torchrun, too: each training there has processes of its own.
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

#: Files of the folder that a process has, which those of one machine share: what is to be done (the first's), what came
#: of it (the first's), and where they meet.
TASK, RESULT, RENDEZVOUS = "task.pickle", "result.pt", "rendezvous"


@dataclass(frozen=True)
class Place:
    """Which of the processes one is, and where it meets the others.

    Attributes:
        rank: its number, from 0.
        world: how many there are.
        device: that it computes on: ``cpu``, ``cuda:1``.
        meeting: the training's name in torchrun's store; None: they meet by a file of the folder that they share.
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
        kind: of its exception: ``user``, ``pass`` or ``other``; empty where it has left none.
        message: the exception's, or the last line of its errors.
        host: where it ran, if that may be another than the caller's.
    """

    code: int
    kind: str = ""
    message: str = ""
    host: str = ""


class Ranks(Protocol):
    """The processes of a training, as the one sees them that is told how it goes on.

    Attributes:
        world: how many there are.
        events: what the first tells, a JSON object a line.
    """

    @property
    def world(self) -> int: ...  # noqa: D102

    @property
    def events(self) -> IO[str]: ...  # noqa: D102

    def ended(self) -> dict[int, Ended]:
        """Those that have ended, by their numbers."""


class Rank:
    """One of the processes; it ends with this one, however that ends.

    Args:
        folder: where its files lie.
        place: which one it is.
        one_host: whether all are on this machine.
    """

    def __init__(self, folder: Path, place: Place, *, one_host: bool) -> None:
        self._folder, self._place = folder, place
        root = str(Path(__file__).parents[3])
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        if one_host:
            # Gloo looks for the machine's own name otherwise, which many containers cannot resolve.
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        words = [str(folder), json.dumps(dataclasses.asdict(place))]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "optimize.training.distributed.worker", *words],
                stdin=subprocess.PIPE,  # which closes with us, however we end
                stdout=subprocess.PIPE if place.rank == 0 else errors,
                stderr=errors,
                text=True,
                env=os.environ | variables,
                start_new_session=True,  # Ctrl-C is for us, who end them
            )

    @property
    def events(self) -> IO[str]:
        """What the first tells."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def _errors(self) -> Path:
        return self._folder / f"errors-{self._place.rank}.txt"

    def ended(self, seconds: float = 0.0) -> Ended | None:
        """How it has ended, which is waited for so long; None: it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        code = self._process.returncode
        if not code:
            return None if code is None else Ended(code)
        if (said := failure(self._folder, self._place.rank)).is_file():
            return Ended(code, **json.loads(said.read_text(encoding="utf-8")))
        return Ended(code, message=" ".join(self._errors.read_text(errors="replace").strip().splitlines()[-1:]))

    def kill(self) -> Ended:
        """End it at once, if it still runs."""
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
    """``count`` processes of this machine, on its devices of a kind; whichever still runs at the end is killed."""
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
    """Where the process ``number`` says why it fails: ``{"kind": …, "message": …}``."""
    return folder / f"failure-{number}.json"
