"""Receivers of a run's progress: a terminal, a notebook, or nobody."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Receives the progress of a run's steps. Each method must return at once."""

    def started(self, name: str) -> None:
        """A stage or a measurement begins."""

    def progressed(self, fraction: float, message: str) -> None:
        """The current step has reached ``fraction``, in [0, 1]."""

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """A step is done. ``seconds`` is how long it took to make, even if it now came from the cache."""

    def said(self, message: str) -> None:
        """A message for the user, one line."""


class Silent:
    """A `Listener` that ignores everything."""

    def started(self, name: str) -> None:
        """Ignore it."""

    def progressed(self, fraction: float, message: str) -> None:
        """Ignore it."""

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """Ignore it."""

    def said(self, message: str) -> None:
        """Ignore it."""


#: The only instance that is needed.
SILENT = Silent()
