"""The reference page of the rewrites of graphs, and of the faults that they work around, from their tables."""

from __future__ import annotations

from typing import Any, Final

from optimize.quantization.tables import TABLES
from optimize.tracing.rewrite_table import Fault, Table

_HEAD: Final = """# Rewrites, and the faults that they work around

Graphs are rewritten between your network and a file, in the order of this page. A rewrite names the faults of libraries
that it works around. You see the version that the fault was seen in, and what was measured without the rewrite. A
rewrite without a fault is needed whatever libraries do.

`python -m optimize workarounds` prints the same records. `make check-workarounds` runs the network of each workaround
in the installed libraries, with it and without it. It says which workarounds are no longer needed.
"""


def engine_faults_page() -> str:
    """Return the page of rewrites: a table for each stage."""
    return "\n".join([_HEAD, *map(_section, TABLES)])


def _section(table: Table[Any, Any]) -> str:
    lines = [
        f"## {table.stage[0].upper()}{table.stage[1:]}",
        "",
        "| rewrite | what it does | faults |",
        "|---|---|---|",
    ]
    for record in table.records:
        after = f" Runs after {', '.join(f'`{name}`' for name in record.after)}." if record.after else ""
        faults = "<br>".join(map(_said, record.faults)) or "none"
        lines.append(f"| `{record.name}` | {record.does}{after} | {faults} |")
    return "\n".join([*lines, ""])


def _said(fault: Fault) -> str:
    issue = f" ({fault.issue})" if fault.issue else ""
    cost = "" if fault.costs == "answers" else f" {fault.costs}:"
    return f"{fault.library} {fault.seen}:{cost} {fault.damage}{issue}"
