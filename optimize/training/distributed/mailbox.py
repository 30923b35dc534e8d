"""Short messages between torchrun's processes between trainings, in the store that torchrun keeps."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from optimize.training.distributed import environment
from optimize.training.distributed.environment import Launch
from serve.runtime.errors import PipelineError

#: Seconds between two reads of the store: while waiting for a call, and while calling.
_IDLE, _CALLING = 0.5, 0.05

#: Seconds until all must have received a call. One may still be importing, or ending its last training.
_PATIENCE = 300.0

#: Seconds that the first waits for the others at its end, if the store ends with it.
_LINGERING = 30.0

_OVER, _LEFT = "over", "left"


class Mailbox:
    """The messages of one of the processes. Use it from one thread.

    Each process except the first has a box under a unique name. So a message to a process that torchrun has ended does
    not reach its replacement, although the store is the same (torch 2.14). All methods raise `distributed.DistError` if
    the store is gone.
    """

    def __init__(self, started: Launch) -> None:
        self._started = started
        self._serving = environment.serves(started)
        self._whole = environment.reach(serving=self._serving)  # which must live as long as this object
        self._store = environment.within("optimize", self._whole)
        self._box = ""
        if started.rank:
            self._box = uuid.uuid4().hex
            self._store.set(_name(started.rank), self._box)
        else:
            self._store.delete_key(_OVER)  # from an earlier first process

    # --- the others ---

    @property
    def called(self) -> bool:
        """Return whether a call is waiting for this process."""
        return bool(self._store.check([self._box]))

    def next_call(self) -> dict[str, Any] | None:
        """Wait for the next call without a limit, and return it. None: the first process has ended."""
        while not self.called:
            if self._store.check([_OVER]):
                self._store.add(_LEFT, 1)
                return None
            time.sleep(_IDLE)
        found: dict[str, Any] = json.loads(self._store.get(self._box))
        self._store.delete_key(self._box)  # shows the first that it was received
        return found

    def report(self, training: str, value: Mapping[str, Any]) -> None:
        """Tell the first how this process's part in a training has ended."""
        self._store.set(f"{training}/{self._started.rank}", json.dumps(value))
        self._store.add(f"{training}/ended", 1)

    # --- the first ---

    def call(self, what: Mapping[str, Any]) -> None:
        """Send a message to all others, and wait until each has received it.

        Raises:
            PipelineError: one does not answer.
        """
        body, last = json.dumps(what), time.monotonic() + _PATIENCE
        told: dict[int, str] = {}
        waiting = set(range(1, self._started.world))
        while True:
            for number in sorted(waiting):
                box = self._read(_name(number))
                if box is not None and box != told.get(number):  # a new process, or a replacement
                    self._store.set(box, body)
                    told[number] = box
                elif box is not None and not self._store.check([box]):
                    waiting.remove(number)
            if not waiting:
                return
            if time.monotonic() > last:
                raise PipelineError(
                    f"process {min(waiting)} of the {self._started.world} that torchrun has started has not "
                    f"answered for {_PATIENCE:.0f} s; each must run the same command or script, up to its first "
                    "call of this library"
                )
            time.sleep(_CALLING)

    def reported(self, training: str, known: Collection[int]) -> dict[int, dict[str, Any]]:
        """Return how the others' parts in a training have ended, by their numbers, without the known ones."""
        if self._store.add(f"{training}/ended", 0) == len(known):  # one request, for any number of processes
            return {}
        others = [number for number in range(1, self._started.world) if number not in known]
        said = {number: self._read(f"{training}/{number}") for number in others}
        return {number: json.loads(value) for number, value in said.items() if value is not None}

    def say_over(self) -> None:
        """Tell the others that there is no more training."""
        self._store.set(_OVER, "")
        last = time.monotonic() + _LINGERING
        while self._serving and self._store.add(_LEFT, 0) < self._started.world - 1 and time.monotonic() < last:
            time.sleep(_CALLING)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def _name(number: int) -> str:
    """Return the key under which the name of a process's box is stored."""
    return f"box-{number}"
