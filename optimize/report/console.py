"""The console that tables are printed to."""

from __future__ import annotations

import io
from typing import Final

from rich.console import Console, RenderableType

from serve.common.progress import in_notebook

#: The characters in a line if nobody limits them.
UNBOUNDED: Final = 1000


def output() -> Console:
    """Return standard output: as wide as the terminal or the notebook's cell, else without a limit."""
    # rich knows the width of notebooks (115). But it would also display all output itself. And it takes notebook
    # kernels, which set FORCE_COLOR (ipykernel 7), for terminals of 80 characters (rich 15).
    if in_notebook():
        return Console(force_jupyter=False, width=Console(force_jupyter=True).width)
    console = Console()
    return console if console.is_terminal else Console(width=UNBOUNDED)


def text(shown: RenderableType) -> str:
    """Return what `output` would print, without colours."""
    console = Console(file=io.StringIO(), width=output().width, force_jupyter=False, force_terminal=False)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
