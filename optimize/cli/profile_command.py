"""The command ``profile``."""

from __future__ import annotations

import contextlib
import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from optimize.cli.shared_options import Store
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE
from serve.common.layout import run_and_artifact
from serve.runtime.errors import UserError


def profile(  # noqa: PLR0917 - each is an option of the command line
    name: Annotated[str, typer.Argument(metavar="RUN/ARTIFACT", help="An artifact of a run.")],
    execution: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Engine to profile; by default every engine that can run the artifact.", metavar="ENGINE"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of images in a batch.")] = 1,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write a Chrome trace to this file, for chrome://tracing or Perfetto.", metavar="FILE.json"),
    ] = None,
    tensorboard: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the graph for TensorBoard into this folder (extra tensorboard).", metavar="DIR"),
    ] = None,
    store: Store = DEFAULT_STORE,
    json: Annotated[bool, typer.Option("--json", help="Print only the figures, as JSON.")] = False,
) -> None:
    """Measure the time, MACs and bytes of each layer of an artifact, and its share of the machine's peak.

    Each engine runs in its own process and reports the times. Figures, tables and charts are written beside the run,
    and the charts into its report.
    """
    with reported():
        run, artifact = run_and_artifact(name)
        if not artifact:
            raise UserError(f"profile takes RUN/ARTIFACT, such as {run}/baseline, not only a run")
        from optimize.report.finished_runs import artifact_folder, line_of

        folder = artifact_folder(store, run, artifact)
        from optimize import noise
        from optimize.profiling.profile_files import write_page, write_profile, write_trace
        from optimize.profiling.profile_table import print_profiled
        from optimize.profiling.profiling import float_program, profile_artifact
        from optimize.profiling.tensorboard import write_graphs
        from optimize.report.progress_display import Display
        from optimize.store.atomic_files import check_writable
        from optimize.training.tensorboard_events import tensorboard as require_tensorboard

        if tensorboard is not None:
            require_tensorboard("a graph")
            check_writable(tensorboard)
        if trace is not None:
            check_writable(trace.parent)
            if trace.is_dir():
                raise UserError(f"--trace {trace} is a folder; name a file in it, such as {trace / 'trace.json'}")
        noise.silence()
        with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
            floats = float_program(line_of(store, run, artifact))
            found = profile_artifact(folder, batch=batch, execution=execution, floats=floats, listener=display)
            written = write_profile(found, store, run)
            write_page(store, run)
            if trace is not None:
                write_trace(found, trace)
            if tensorboard is not None:
                write_graphs(found, tensorboard)
        if json:
            sys.stdout.write(dumps(found.to_json(), indent=2) + "\n")
        else:
            print_profiled(found)
            typer.echo(f"charts and tables: {written}")
            if trace is not None:
                typer.echo(f"trace: {trace}")
            if tensorboard is not None:
                typer.echo(f"graph: tensorboard --logdir {tensorboard}")
