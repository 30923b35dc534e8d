"""Where profiles are written: a folder beside the run, with figures, tables and charts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from optimize.profiling.chart import profile_svg
from optimize.profiling.records import Profiled
from optimize.profiling.table import markdown
from optimize.profiling.trace import chrome_trace
from optimize.store.files import write_atomically, write_json
from serve.runtime.errors import UserError


def write_profile(found: Profiled, store: Path, run: str) -> Path:
    """Write ``<store>/<run>.profile/``: an artifact's figures and tables, and a chart for each execution.

    Args:
        found: the profiles.
        store: of the run.
        run: its name.

    Returns:
        The folder.
    """
    folder = store / f"{run}.profile"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(found.to_json(), folder / f"{found.artifact}.json")
    write_atomically(folder / f"{found.artifact}.md", markdown(found).encode())
    for one in found.profiles:
        title = f"{found.title}: {found.artifact} by {one.runs_on}, batch {found.batch}"
        write_atomically(folder / f"{chart_name(found.artifact, one.runs_on)}.svg", profile_svg(title, one))
    return folder


def chart_name(artifact: str, runs_on: str) -> str:
    """What the chart of an execution is called, without its ending."""
    return f"{artifact}@{re.sub(r'[^A-Za-z0-9_.=+-]+', '-', runs_on).strip('-')}"


def write_trace(found: Profiled, path: Path) -> None:
    """Write a Chrome trace.

    Raises:
        UserError: it cannot be written there.
    """
    try:
        write_atomically(path, json.dumps(chrome_trace(found), indent=1).encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
