"""The command ``workarounds``, which lists the faults of libraries that graph rewrites work around."""

from __future__ import annotations

import sys
from json import dumps
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from serve.common.command_line import reported


def workarounds(
    json: Annotated[bool, typer.Option("--json", help="Print only the records, as JSON.")] = False,
) -> None:
    """List the rewrites of graphs in their order, with the library fault that each of them works around."""
    with reported():
        from optimize.quantization.tables import rows, to_json
        from optimize.report.console import output

        if json:
            sys.stdout.write(dumps(to_json(), indent=2, ensure_ascii=False) + "\n")
            return
        table = Table("stage", "rewrite", "library", "seen in", "what was measured", "issue", box=None, pad_edge=False)
        for row in rows():
            table.add_row(*map(Text, row))
        output().print(table)
