"""What torchrun's processes say to each other between trainings: a few words, by the store that torchrun keeps."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from optimize.training.distributed import environment
from optimize.training.distributed.environment import Launch
from serve.runtime.errors import PipelineError

#: Seconds between two looks into the store: of one that waits for a call, and of one that calls.
_IDLE, _CALLING = 0.5, 0.05

#: Seconds that the first waits until all have heard it: one may still be importing, or ending what it trained.
_PATIENCE = 300.0

#: Seconds that the first stays for the others at its end, where the store ends with it.
_LINGERING = 30.0

_OVER, _LEFT = "over", "left"


class Post:
    """What one of the processes hears and says. For one thread.

    Each but the first has a box, under a name that is nobody's before or after it: what was said to a process that
    torchrun has ended is not heard by the one that takes its place, though the store is the same (torch 2.14).

    All methods raise `distributed.DistError` where the store is gone.
    """

    def __init__(self, started: Launch) -> None:
        self._started = started
        self._serving = environment.serves(started)
        self._whole = environment.reach(serving=self._serving)  # which lives as long as this
        self._store = environment.within("optimize", self._whole)
        self._box = ""
        if started.rank:
            self._box = uuid.uuid4().hex
            self._store.set(_name(started.rank), self._box)
        else:
            self._store.delete_key(_OVER)  # of the first that was before this one

    # --- the others ---

    @property
    def called(self) -> bool:
        """Whether a call is waiting for this process."""
        return bool(self._store.check([self._box]))

    def next_call(self) -> dict[str, Any] | None:
        """The next call, which is waited for as long as it takes; None: the first process has ended."""
        while not self.called:
            if self._store.check([_OVER]):
                self._store.add(_LEFT, 1)
                return None
            time.sleep(_IDLE)
        found: dict[str, Any] = json.loads(self._store.get(self._box))
        self._store.delete_key(self._box)  # by which the first knows that it was heard
        return found

    def report(self, training: str, value: Mapping[str, Any]) -> None:
        """Tell the first how this process's part in a training has ended."""
        self._store.set(f"{training}/{self._started.rank}", json.dumps(value))
        self._store.add(f"{training}/ended", 1)

    # --- the first ---

    def call(self, what: Mapping[str, Any]) -> None:
        """Say something to all others, and wait until each has heard it.

        Raises:
            PipelineError: one does not listen.
        """
        body, last = json.dumps(what), time.monotonic() + _PATIENCE
        told: dict[int, str] = {}
        waiting = set(range(1, self._started.world))
        while True:
            for number in sorted(waiting):
                box = self._read(_name(number))
                if box is not None and box != told.get(number):  # it has come, or has taken another's place
                    self._store.set(box, body)
                    told[number] = box
                elif box is not None and not self._store.check([box]):
                    waiting.remove(number)
            if not waiting:
                return
            if time.monotonic() > last:
                raise PipelineError(
                    f"process {min(waiting)} of the {self._started.world} that torchrun has started does not answer "
                    f"(for {_PATIENCE:.0f} s); each must run the same command or script, up to its first call of this "
                    "library"
                )
            time.sleep(_CALLING)

    def reported(self, training: str, known: Collection[int]) -> dict[int, dict[str, Any]]:
        """How the parts of the others in a training have ended, but for those that are known; by their numbers."""
        if self._store.add(f"{training}/ended", 0) == len(known):  # one question, however many they are
            return {}
        others = [number for number in range(1, self._started.world) if number not in known]
        said = {number: self._read(f"{training}/{number}") for number in others}
        return {number: json.loads(value) for number, value in said.items() if value is not None}

    def say_over(self) -> None:
        """Tell the others that there is no more to train."""
        self._store.set(_OVER, "")
        last = time.monotonic() + _LINGERING
        while self._serving and self._store.add(_LEFT, 0) < self._started.world - 1 and time.monotonic() < last:
            time.sleep(_CALLING)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def _name(number: int) -> str:
    """Where the name of a process's box stands."""
    return f"box-{number}"
