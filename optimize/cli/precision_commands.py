"""Commands about each layer's precision: ``sensitivity`` and ``search``."""

from __future__ import annotations

import contextlib
import sys
from json import dumps
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from optimize.cli.shared_options import Execution, Measure, SkipUnreadable, Store, uncollected
from optimize.run.job import Job
from optimize.run.recommendation.accuracy_drop import drop_of
from serve.common.command_line import reported
from serve.common.command_options import with_options
from serve.common.hints import DEFAULT_STORE
from serve.common.layout import run_and_artifact
from serve.runtime.errors import PipelineError, UserError

#: The options of `optimize run` that `optimize search` has too.
_OF_A_SEARCH = (
    *("model", "checkpoint", "data", "val_images", "skip_unreadable", "weights", "weights_key", "outputs"),
    "image_size",
    *("recipe", "store", "device", "measure", "run", "seed", "trust_checkpoint"),
)


def sensitivity(  # noqa: PLR0917 - each is an option of the command line
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, or RUN/ARTIFACT: a module, or an artifact of ptq.")
    ],
    store: Store = DEFAULT_STORE,
    measure: Measure = "auto",
    execution: Execution = None,
    device: Annotated[str, typer.Option(help="Where to calibrate: auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    skip_unreadable: SkipUnreadable = False,
    json: Annotated[bool, typer.Option("--json", help="Print only the figures, as JSON.")] = False,
) -> None:
    """Measure the accuracy and time of each layer of a run's network in int8: alone, and as the only float layer.

    If it is interrupted, the same command continues. The table, the chart and the figures are written beside the run.
    """
    with reported("interrupted; the measurements are kept, and the same command continues"):
        with uncollected():
            from optimize import noise
            from optimize.measure.machine import measured_devices
            from optimize.precision.precision_table import print_sensitivity
            from optimize.precision.search_files import write_sensitivity
            from optimize.precision.sensitivity import one_image, subject
            from optimize.precision.sensitivity import sensitivity as look
            from optimize.report.progress_display import Display
            from optimize.run.finished_run import artifact_of, reopen_run

        noise.silence()
        run_name, artifact = run_and_artifact(name)
        with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
            session, report = reopen_run(
                store, run_name, display, seed=seed, device=device, skip_unreadable=skip_unreadable
            )
            with contextlib.closing(session):
                first = next((row.name for row in report.rows if row.operation == "ptq" and row.file), None)
                step = artifact_of(session, run_name, artifact or first or report.baseline.name)
                parent, config = subject(step.artifact, None)
                devices = measured_devices(measure, session.context.device)
                timing = one_image(report.measurement.timing)
                found, keys = look(session, parent, config, timing=timing, devices=devices, execution=execution)
                folder = write_sensitivity(found, keys, session.store, run_name)
        if json:
            sys.stdout.write(dumps(found.to_json(), indent=2) + "\n")
        else:
            print_sensitivity(found)
            typer.echo(f"chart: {folder / 'sensitivity.svg'}   table: {folder / 'sensitivity.md'}")


@with_options(Job, "job", only=_OF_A_SEARCH)
def search(
    *,
    max_drop: Annotated[
        str, typer.Option(help="Largest loss of accuracy, in percentage points: 0.5, or 0.5pp.", metavar="POINTS")
    ] = "0.5",
    max_latency_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Longest median latency of one image, in milliseconds.", metavar="MS"),
    ] = None,
    bits: Annotated[
        str, typer.Option(help="Allowed precisions of layers: 8, and 16 or 32 or both.", metavar="8,16,32")
    ] = "8,32",
    method: Annotated[str, typer.Option(help="How to search for layers: greedy or halving.")] = "greedy",
    max_trials: Annotated[Optional[int], typer.Option(min=1, help="Maximum number of trials.")] = None,  # noqa: UP045
    execution: Execution = None,
    job: Job,
    json: Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")] = False,
) -> None:
    """Choose the precision of each layer under a budget, by measured accuracy and measured latency.

    If it is interrupted, the same command continues. It writes a recipe that makes the result. From --recipe it uses
    the baseline, the preprocessing and the first ptq stage. Exit code 1 if no trial meets the budget.
    """
    with reported("interrupted; every trial is kept, and the same command continues"):
        with uncollected():
            from optimize import noise
            from optimize.precision.precision_table import print_search
            from optimize.precision.search import Search
            from optimize.precision.search_job import search_job, to_pack
            from optimize.report.progress_display import Display

        words = [word.strip() for word in bits.split(",")]
        if not all(word.isascii() and word.isdigit() for word in words):
            raise UserError(f"--bits must be numbers such as 8,32, not {bits!r}")
        asked: dict[str, Any] = {
            "max_drop": drop_of(max_drop, plain="points"),
            "max_latency_ms": max_latency_ms,
            "bits": tuple(map(int, words)),
            "method": method,
            "max_trials": max_trials,
            "execution": execution,
        }
        by = Search(**asked)
        noise.silence()
        with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
            found, folder = search_job(job, by, display)
        if json:
            sys.stdout.write(dumps(found.to_json(), indent=2) + "\n")
        else:
            print_search(found)
            if found.pair:
                artifact = found.pair.partition("@")[0]
                typer.echo(f"pack it, as the artifact {artifact}: {to_pack(job, folder)}")
        if found.pair is None:
            raise PipelineError("no trial meets the budget")
