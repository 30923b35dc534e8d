"""Finds an engine that hangs: it works on one job for longer than any client waits for the answer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from serve.asgi.http.served_models import Served

#: Seconds between two checks.
LOOK_S: Final = 1.0
# Requests time out at the limit. The watchdog waits a little longer, to tell a hanging engine from a slow one.
_GRACE_S = 2.0


class Watchdog:
    """Tells a hanging engine from a slow one, by the job of each model at each check. Call it every `LOOK_S` seconds.

    Time is counted in checks, not in seconds. If the process or its machine was suspended, that time does not count.

    Args:
        most_s: longest time for a job, if shorter than the model's ``response_timeout_s``.
    """

    def __init__(self, most_s: float = math.inf) -> None:
        self._most_s = most_s
        self._seen: dict[int, tuple[int, float]] = {}  # by the model's id: its job, and for how many seconds

    def look(self, jobs: Iterable[tuple[Served, int]]) -> tuple[Served, str] | None:
        """Record the jobs of all models. Return the first model that hangs, and the reason for the log.

        Args:
            jobs: models that are at work, each with the unique number of its job.
        """
        before, self._seen = self._seen, {}
        for served, job in jobs:
            known, seconds = before.get(id(served), (None, 0.0))
            seconds = seconds + LOOK_S if known == job else 0.0
            self._seen[id(served)] = job, seconds
            if seconds > min(served.serving.response_timeout_s, self._most_s) + _GRACE_S:
                return served, f"it has worked on the same images for {seconds:.0f} s while others wait"
        return None
