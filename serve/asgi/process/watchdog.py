"""Finds an engine that hangs: it is at one job for longer than anybody waits for an answer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from serve.asgi.http.served_models import Served

#: Seconds from one look to the next.
LOOK_S: Final = 1.0
# Requests are given up at the limit; what hangs in an engine is told from what is slow a little later.
_GRACE_S = 2.0


class Watchdog:
    """Tells an engine that hangs from a slow one, by looks at what each model is at, `LOOK_S` apart.

    Time is counted in looks: seconds in which nobody looked are not the engine's, for the process was stopped, or its
    machine was.

    Args:
        most_s: for how long anybody waits, where that is shorter than the model's ``response_timeout_s``.
    """

    def __init__(self, most_s: float = math.inf) -> None:
        self._most_s = most_s
        self._seen: dict[int, tuple[int, float]] = {}  # by the model: its job, and for how long

    def look(self, jobs: Iterable[tuple[Served, int]]) -> tuple[Served, str] | None:
        """Note what models are at; the first that hangs, and what is to be said of it.

        Args:
            jobs: models that are at something, with the number of that, which is given once.
        """
        before, self._seen = self._seen, {}
        for served, job in jobs:
            known, seconds = before.get(id(served), (None, 0.0))
            seconds = seconds + LOOK_S if known == job else 0.0
            self._seen[id(served)] = job, seconds
            if seconds > min(served.serving.response_timeout_s, self._most_s) + _GRACE_S:
                return served, f"it is at the same images for {seconds:.0f} s, and others wait"
        return None
