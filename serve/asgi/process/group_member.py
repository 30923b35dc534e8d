"""One process of a group: its place in the group, and its messages to the parent process."""

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
    """All wanted models are served."""


@dataclass(frozen=True)
class Change:
    """A command to read the wanted models again. The number tells it apart: several signals may arrive as one."""

    number: int


@dataclass(frozen=True)
class Changed:
    """The `Change` of this number is finished, and all before it, whether something changed or not."""

    number: int


@dataclass(frozen=True)
class Failed:
    """Why the process ends. ``users``: whether the user made a mistake."""

    message: str
    users: bool


@dataclass(frozen=True)
class Alive:
    """The event loop runs. It is the answer to a question in the pipe."""


# A process blocks these signals from its start until it can handle them.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Message = Notice | Ready | Changed | Failed | Alive


@dataclass(frozen=True)
class Member:
    """The place of one process in the group.

    Attributes:
        number: number of the process, from 0.
        count: number of processes.
        port: the port of the group.
        opened: a socket that listens there already. None: this process opens its own when it is ready.
        parent: pipe to the parent process. The parent sends None to ask whether this process answers, or a `Change`.
            The end of the pipe means that the parent has ended.
        folder: folder for the sockets of the group.
    """

    number: int
    count: int
    port: int
    opened: socket.socket | None
    parent: Connection
    folder: Path

    def tell(self, message: Message) -> None:
        """Send a message to the parent. It is dropped if the parent has ended."""
        with contextlib.suppress(OSError):
            self.parent.send(message)

    def siblings(self) -> MetricsExchange:
        """Return the exchange of metrics with the other processes."""
        return MetricsExchange(self.folder, self.number, self.count)
