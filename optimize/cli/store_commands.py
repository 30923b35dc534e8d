"""Commands about the contents of a store: ``list``, ``show``, ``verify``, ``prune``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from optimize.cli.shared_options import Every, Store
from serve.common import layout
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE
from serve.runtime.errors import PipelineError, UserError

_MOST_LINES = 30


def list_runs(store: Store = DEFAULT_STORE) -> None:
    """List the runs of a store."""
    with reported():
        from optimize.report.console import output
        from optimize.report.finished_runs import HEADS, RunSummary, read_runs

        if store.exists() and not store.is_dir():
            raise UserError(f"the store {store} is not a folder; choose another one with --store")
        table = Table(*HEADS, box=None, pad_edge=False)
        for entry in read_runs(store):
            if isinstance(entry, RunSummary):
                table.add_row(*map(Text, entry.cells()))
            else:
                typer.echo(f"left out: {entry}", err=True)
        if not table.row_count:
            typer.echo(f"no runs in {store}")
            return
        output().print(table)
        # The same network takes a different time on another day, or while another run is measured.
        typer.echo(
            "speed is relative to the fastest float execution of each run; `compare RUN RUN` measures runs together"
        )


def show(
    name: Annotated[str, typer.Argument(help="A run, or RUN/ARTIFACT.")],
    store: Store = DEFAULT_STORE,
    every: Every = False,
) -> None:
    """Show a run's table, or an artifact's card."""
    with reported():
        from optimize.report.finished_runs import card_of, report_of
        from optimize.report.table import print_table

        run, artifact = layout.run_and_artifact(name)
        if artifact is not None:
            if every:
                raise UserError(
                    "--all lists the executions of a run; for an artifact, `show` prints its card, which has none"
                )
            Console().print_json(card_of(store, run, artifact))
        else:
            print_table(report_of(store, run), every=every)
            typer.echo(store / run / layout.PAGE_FILE)


def verify(name: Annotated[str, typer.Argument(help="A run, or RUN/ARTIFACT.")], store: Store = DEFAULT_STORE) -> None:
    """Check every file of a run against its SHA-256, and list extra files. Exit code 1 if a file is wrong."""
    with reported():
        from optimize.report.finished_runs import faults_of
        from serve.common.progress import shown

        with shown("verify") as bar:
            checked, faults = faults_of(store, name, bar.progressed)
        for fault in faults:
            typer.echo(fault, err=True)
        if faults:
            parts = {_part(fault.name) for fault in faults}
            count = f"{len(faults)} files" if None in parts else f"{len(parts)} of {checked}"
            raise PipelineError(f"{count} are damaged; run the model again to rebuild them")
        typer.echo(f"{checked} artifacts and archives are whole")


def _part(name: str) -> str | None:
    """Return the artifact folder or archive that a run's file belongs to, or None if it belongs to the run itself."""
    folder, _, rest = name.partition("/")
    if folder == layout.ARTIFACTS:
        return f"{folder}/{rest.partition('/')[0]}"
    return layout.archive_of(Path(name)).as_posix() if folder == layout.ARCHIVES else None


def prune(
    store: Store = DEFAULT_STORE,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without confirmation.")] = False,
) -> None:
    """Show what no run, server or program uses in the store, and remove it if you agree."""
    with reported():
        from optimize.store import store_pruning
        from optimize.store.objects import Store

        if not store.is_dir():
            raise UserError(f"there is no store {store}")
        opened = Store(store)
        found = store_pruning.prunable(opened)
        lines = found.lines()
        more = [f"and {len(lines) - _MOST_LINES} more kinds"] if len(lines) > _MOST_LINES else []
        for line in (*lines[:_MOST_LINES], *more, *found.kept):
            typer.echo(f"  {line}")
        if not found.objects:
            typer.echo("nothing to remove: every object is used")
            return
        amount = f"{len(found.objects)} objects, {found.size / 1e6:.1f} MB"
        if not yes:
            if not sys.stdin.isatty():
                raise UserError(f"would remove {amount}; add --yes to remove them without confirmation")
            if not typer.confirm(f"remove {amount}?"):
                return
        removed = store_pruning.prune(opened, found)
        typer.echo(f"removed {len(removed.objects)} objects, {removed.size / 1e6:.1f} MB")
