"""The console that tables are printed to."""

from __future__ import annotations

import io
from typing import Final

from rich.console import Console, RenderableType

from serve.common.progress import in_notebook

#: Characters that a line may have where nobody limits it.
UNBOUNDED: Final = 1000


def output() -> Console:
    """Standard output: a terminal or a notebook's cell as wide as it is; else the whole, however long the lines."""
    # Of notebooks rich knows how wide they are (115). But it would display there whatever it is given, and knows their
    # kernels, which set FORCE_COLOR (ipykernel 7), as terminals of 80 (rich 15).
    if in_notebook():
        return Console(force_jupyter=False, width=Console(force_jupyter=True).width)
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED)


def text(shown: RenderableType) -> str:
    """What `output` would print, without colours."""
    console = Console(file=io.StringIO(), width=output().width, force_jupyter=False, force_terminal=False)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
