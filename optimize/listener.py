"""Who is told how a run goes on: a terminal, a notebook, nobody."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Told of every step of a run; each method returns at once."""

    def started(self, name: str) -> None:
        """A stage or measurement begins."""

    def progressed(self, fraction: float, message: str) -> None:
        """How far the step that is under way has come, in [0, 1]."""

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """A step is done; ``seconds`` is what it took when it was made, if it was in the cache now."""

    def said(self, message: str) -> None:
        """Something worth a line."""


class Silent:
    """A `Listener` that says nothing."""

    def started(self, name: str) -> None:
        """Say nothing."""

    def progressed(self, fraction: float, message: str) -> None:
        """Say nothing."""

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """Say nothing."""

    def said(self, message: str) -> None:
        """Say nothing."""


#: The one instance that is needed of it.
SILENT = Silent()
