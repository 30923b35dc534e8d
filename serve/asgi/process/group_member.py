"""One of the processes that serve together: its place among them, and what it tells the one that has started them."""

from __future__ import annotations

import contextlib
import signal
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from serve.asgi.process.metrics_exchange import MetricsExchange


@dataclass(frozen=True)
class Notice:
    """A line for a person."""

    line: str


@dataclass(frozen=True)
class Ready:
    """All that was wanted is served."""


@dataclass(frozen=True)
class Change:
    """It is to look again at what is to be served, for this time: one signal may stand for several, and no message."""

    number: int


@dataclass(frozen=True)
class Changed:
    """What it was to look at is over, and all before that, whether something was changed or not."""

    number: int


@dataclass(frozen=True)
class Failed:
    """Why it ends; ``users``: by the user's mistake."""

    message: str
    users: bool


@dataclass(frozen=True)
class Alive:
    """Its event loop runs: it was asked, by whatever came through the pipe."""


# A process hears these when it can obey them; from its start to then they wait.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Message = Notice | Ready | Changed | Failed | Alive


@dataclass(frozen=True)
class Member:
    """The place of one process.

    Attributes:
        number: from 0.
        count: of all.
        port: where they listen.
        opened: a socket that listens there already; None: others do, and this one joins them when it is ready.
        parent: a pipe to the process that has started it, which asks there now and then whether this one answers
            (None), and says that it is to look again (`Change`); at its end that one has gone.
        folder: for what they tell each other.
    """

    number: int
    count: int
    port: int
    opened: socket.socket | None
    parent: Connection
    folder: Path

    def tell(self, message: Message) -> None:
        """Tell the parent; nobody, where it has gone."""
        with contextlib.suppress(OSError):
            self.parent.send(message)

    def siblings(self) -> MetricsExchange:
        """The others, and this one."""
        return MetricsExchange(self.folder, self.number, self.count)
