"""The commands ``run`` and ``compare``."""

from __future__ import annotations

import contextlib
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from optimize.cli.shared_options import Every, Measure, Store, uncollected
from optimize.run.job import Job
from optimize.run.recommendation.rule import Recommend
from serve.common import layout
from serve.common.command_line import reported
from serve.common.command_options import with_options
from serve.common.hints import DEFAULT_STORE, target
from serve.runtime.errors import PipelineError

if TYPE_CHECKING:
    from optimize.measure.rows import Report


@with_options(Job, "job")
def run(
    *,
    job: Job,
    every: Every = False,
    json: Annotated[bool, typer.Option("--json", help="Print only report.json on stdout.")] = False,
) -> None:
    """Run a recipe on a model: build, measure, pack and report."""
    with reported("interrupted; finished steps are kept, and the same command continues"):
        with uncollected():
            from optimize import noise
            from optimize.report.progress_display import Display
            from optimize.run.pipeline import run as run_job

        noise.silence()
        # A user's own model may print. Standard output is only for the result.
        with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
            outcome = run_job(job, display)
        if json:
            sys.stdout.write((outcome.folder / "report.json").read_text(encoding="utf-8"))
        else:
            _print_outcome(outcome.report, outcome.folder, every=every)
        if outcome.failed:
            raise PipelineError(f"failed: {', '.join(outcome.failed)}; see the report for the reasons")


@with_options(Recommend, "rule")
def compare(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Runs, or RUN/ARTIFACT; the others are compared with the first.")
    ],
    *,
    store: Store = DEFAULT_STORE,
    measure: Measure = "auto",
    rule: Recommend,
    every: Every = False,
    json: Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")] = False,
) -> None:
    """Compare runs that were judged by the same images. Their speeds are measured again, together.

    RUN stands for its baseline and its recommended artifact. Exit code 2 if they cannot be compared. The message
    names the difference.
    """
    with reported():
        from optimize import noise
        from optimize.measure.machine import measured_devices, resolve_device
        from optimize.measure.timing import Timing
        from optimize.report.progress_display import Display
        from optimize.report.table import print_table
        from optimize.run.run_comparison import compare_runs

        noise.silence()
        with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
            results = compare_runs(
                store,
                names,
                timing=Timing(),
                rule=rule,
                devices=measured_devices(measure, resolve_device("auto")),
                listener=display,
            )
        if json:
            sys.stdout.write(dumps(results.to_json(), indent=2) + "\n")
        else:
            print_table(results, every=every)


def _print_outcome(report: Report, folder: Path, *, every: bool) -> None:
    from optimize.report.table import print_table

    print_table(report, every=every)
    typer.echo(f"report: {folder / layout.PAGE_FILE}   archives: {folder / 'archives'}")
    typer.echo(f"serve it: {target('serve', f'serve start {folder.name}', folder.parent, RUN=folder.name)}")
