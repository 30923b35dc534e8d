"""How a run shows itself in a terminal: a line for each step that ends, and a bar for the one under way."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_SHOWN_AFTER = 0.05  # seconds between two updates of the bar


class Display:
    """A `pipeline.Listener` on a Rich console; in a log (no terminal) only the lines appear."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("  {task.fields[name]:<16}"),
            BarColumn(40),
            TextColumn("{task.fields[message]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._updated = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, name: str) -> None:
        """A step begins."""
        self._task = self._bar.add_task("", total=1.0, name=name, message="")

    def progressed(self, fraction: float, message: str) -> None:
        """The step under way has come so far."""
        now = time.monotonic()
        if self._task is not None and now - self._updated > _SHOWN_AFTER:
            self._bar.update(self._task, completed=fraction, message=message)
            self._updated = now

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """A step is done."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if skipped is not None:
            self._line(f"  [yellow]-[/yellow] {name:<16} skipped: {escape(skipped)}")
        else:
            took = f"from the cache (took {seconds:.1f} s when made)" if cached else f"{seconds:.1f} s"
            self._line(f"  [green]+[/green] {name:<16} {took}")

    def said(self, message: str) -> None:
        """Something worth a line."""
        self._line(escape(message))

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)  # a log's lines are not cut at 80 columns
