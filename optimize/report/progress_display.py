"""Shows a run in a terminal: a line for each finished step, and a bar for a long current one."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape

from serve.common.progress import ProgressBar, surface


class Display:
    """A `Listener` on a Rich console. In a log (no terminal) only the lines appear."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = ProgressBar(surface(console))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def started(self, name: str) -> None:
        """See `Listener`."""
        self._bar.started(name)

    def progressed(self, fraction: float, message: str) -> None:
        """See `Listener`."""
        self._bar.progressed(fraction, message)

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """See `Listener`."""
        self._bar.ended(name, seconds, cached=cached, skipped=skipped)
        if skipped is not None:
            self._line(f"  [yellow]-[/yellow] {name:<16} skipped: {escape(skipped)}")
        else:
            took = f"from the cache (took {seconds:.1f} s when made)" if cached else f"{seconds:.1f} s"
            self._line(f"  [green]+[/green] {name:<16} {took}")

    def said(self, message: str) -> None:
        """See `Listener`."""
        self._line(escape(message))

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)  # a log's lines are not cut at 80 columns
