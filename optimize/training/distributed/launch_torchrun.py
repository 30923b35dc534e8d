"""Trains with the processes that torchrun has started: the first calls the others to each training.

A call is a short message (`mailbox`). When the processes have met, the first sends the task to the others (`worker`).
So they need no shared folder. Nobody waits within a sum of tensors, which has a time-out, although the first may
measure for hours between two trainings. Each training has its own processes, as without torchrun. So a failed one ends
the training and not the run, and none holds a GPU while the first measures.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from torch import distributed

from optimize.training.distributed.environment import Launch
from optimize.training.distributed.launch_local import Ended, Place, Rank, Ranks
from optimize.training.distributed.mailbox import Mailbox
from serve.runtime.errors import PipelineError, UserError, first_line

#: Seconds between two checks of a training process for a call that ends it.
_LOOKING = 0.3


@dataclass
class _First:
    """The first process's own state."""

    mailbox: Mailbox | None = None
    failed: bool = False


_first = _First()


def lead(started: Launch) -> None:
    """Act as the first process, and tell the others when the program ends well.

    Raises:
        UserError: the program has joined the processes into a group of its own.
    """
    if _first.mailbox is None:
        if distributed.is_initialized():
            raise UserError(
                "torch.distributed is already initialized in this process, but each training initializes it "
                "itself; leave it out, or start without torchrun"
            )
        _first.mailbox = Mailbox(started)
        atexit.register(_say_over)


def failed() -> None:
    """Let torchrun end the other processes, and restart all if it is set to."""
    _first.failed = True


def _say_over() -> None:
    if _first.mailbox is not None and not _first.failed and getattr(sys, "last_value", None) is None:
        with contextlib.suppress(distributed.DistError):
            _first.mailbox.say_over()


@contextmanager
def everywhere(folder: Path, started: Launch, kind: str) -> Iterator[Ranks]:
    """Start one training process for each torchrun process. The first's is started here.

    Args:
        folder: folder of the first's files.
        started: this process, the first.
        kind: the kind of devices: ``cpu`` or ``cuda``.

    Raises:
        PipelineError: one of the others does not come, or torchrun's store is gone.
    """
    lead(started)
    mailbox, training = _first.mailbox, uuid.uuid4().hex
    assert mailbox is not None
    with _reachable():
        mailbox.call({"training": training, "kind": kind})
    rank = Rank(folder, place_of(started, training, kind), one_host=not started.several_hosts)
    try:
        yield _Everywhere(started, mailbox, training, rank)
    except Exception:
        rank.kill()
        with _reachable():
            mailbox.call({})  # the others are free for the next training once they have received it
        raise
    finally:
        rank.kill()


@dataclass(frozen=True)
class _Everywhere:
    started: Launch
    mailbox: Mailbox
    training: str
    first: Rank
    others: dict[int, Ended] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.started.world

    @property
    def events(self) -> IO[str]:
        return self.first.events

    def ended(self) -> dict[int, Ended]:
        with _reachable():
            reports = self.mailbox.reported(self.training, self.others)
        self.others.update({number: Ended(**report) for number, report in reports.items()})
        own = self.first.ended()
        return self.others if own is None else {0: own, **self.others}


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except distributed.DistError as error:
        raise PipelineError(f"the store of torchrun no longer answers: {first_line(error)}") from None


def place_of(started: Launch, training: str, kind: str) -> Place:
    """Return the place of one of torchrun's processes in a training."""
    device = f"cuda:{started.local_rank}" if kind == "cuda" else kind
    return Place(started.rank, started.world, device, meeting=training)


# --- the others ------------------------------------------------------------------------------------------------------


def follow(started: Launch) -> int:
    """Take part in each training of the first process, until that ends.

    Returns:
        The exit code of this process: 0, or 1 if the first was lost without a message.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # sent by torchrun, which reports why
        signal.signal(number, _end_at_once)
    try:
        mailbox = Mailbox(started)
        while (call := mailbox.next_call()) is not None:
            if "training" in call:
                _take_part(started, mailbox, call["training"], call["kind"])
    except distributed.DistError:
        sys.stderr.write(f"process {started.rank} on {socket.gethostname()} has lost process 0 and stops\n")
        return 1
    return 0


def _take_part(started: Launch, mailbox: Mailbox, training: str, kind: str) -> None:
    """Train until it ends, or until another call arrives."""
    with tempfile.TemporaryDirectory(prefix="training-") as folder:
        rank = Rank(Path(folder), place_of(started, training, kind), one_host=not started.several_hosts)
        try:
            while (ended := rank.ended(_LOOKING)) is None and not mailbox.called:
                pass
        finally:
            killed = rank.kill()
        host = socket.gethostname() if started.several_hosts else ""
        mailbox.report(training, dataclasses.asdict(ended or killed) | {"host": host})


def _end_at_once(number: int, frame: object) -> None:
    sys.exit(128 + number)
