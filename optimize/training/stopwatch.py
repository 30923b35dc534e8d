"""Measures where a training's time goes. Each moment belongs to one part, and the parts add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from optimize.store.training_history import Times

Part = Literal["data", "compute", "communication", "judgement", "checkpoints"]

#: The number of GPU events that are waited for together: a large one, so that the host is not delayed.
_TOGETHER = 512


class Stopwatch:
    """Counts the seconds of each part.

    On a GPU these are seconds of its stream. The host runs ahead of it, and its work meanwhile costs nothing.

    Args:
        device: the device of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._part: Part = "data"
        self._marks: list[tuple[Part, torch.cuda.Event]] = []
        self._since = self._now()

    def to(self, part: Part) -> Part:
        """Count time from now on for ``part``. Returns the previous part."""
        now, before = self._now(), self._part
        if isinstance(now, float):
            assert isinstance(self._since, float)
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
            self._since = now
        else:
            self._marks.append((before, now))
            if len(self._marks) >= _TOGETHER:
                self._settle()
        self._part = part
        return before

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Count the time within the block for ``part``."""
        before = self.to(part)
        try:
            yield
        finally:
            self.to(before)

    def taken(self) -> Times:
        """Return the times since the last call."""
        self.to(self._part)
        self._settle()
        seconds, self._seconds = self._seconds, {}
        return Times(**seconds)

    def _now(self) -> float | torch.cuda.Event:
        if not self._stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _settle(self) -> None:
        """Count the events that the stream has reached, or will have."""
        for part, event in self._marks:
            event.synchronize()
            assert isinstance(self._since, torch.cuda.Event)
            self._seconds[part] = self._seconds.get(part, 0.0) + self._since.elapsed_time(event) / 1e3
            self._since = event
        self._marks.clear()
