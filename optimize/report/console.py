"""The console that tables are printed to."""

from __future__ import annotations

from typing import Final

from rich.console import Console

#: Characters that a line may have where nobody limits it.
UNBOUNDED: Final = 1000


def output() -> Console:
    """Standard output: a terminal as wide as it is; a file or a pipe gets the whole, however long the lines."""
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED)
