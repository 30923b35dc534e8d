"""The command line ``python -m optimize``: words in, words out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperOption

from optimize.data.formats.base import DEFAULT_DATA
from optimize.run.drop import drop_of
from serve.command_line import OneLineGroup, reported
from serve.hints import DEFAULT_STORE, command, target
from serve.runtime.errors import PipelineError, UserError

if TYPE_CHECKING:
    from optimize.certify.records import Engine
    from optimize.measure.rows import Report

app = typer.Typer(
    cls=OneLineGroup,
    help="Turn a trained vision model into measured, deployable artifacts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Store = Annotated[Path, typer.Option(help="Where runs are kept.")]
_MOST_LINES = 30


class _ListsData(TyperCommand):
    """A command whose help lists the data formats, which are looked for when the help is shown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the formats behind what ``--data`` is for."""
        from optimize.data.formats.base import usages

        for option in self.params:
            if isinstance(option, TyperOption) and option.name == "data":
                option.help = f"{option.help} One of {', '.join(usages())}."
        super().format_help(ctx, formatter)


_Every = Annotated[bool, typer.Option("--all", help="List every execution of each artifact, and not its best alone.")]
_Measure = Annotated[
    str, typer.Option(help="Where to measure: auto (every device that there is), or a list such as cpu,cuda.")
]
_Execution = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="The engine that trials run by; by default the one that runs int8 fastest.", metavar="ENGINE"),
]
_Objective = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="What the recommended artifact is best at: latency, p95, throughput or size."),
]
_MaxDrop = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="Loss of top-1 that it must be shown not to have: a fraction up to 0.05, or points such as 0.5pp.",
        metavar="FRACTION",
    ),
]
_Confidence = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(help="With which that is shown: 0.95.", metavar="FRACTION"),
]


@app.command(cls=_ListsData)
def run(  # noqa: PLR0917 - each is an option of the command line
    model: Annotated[
        str,
        typer.Argument(help="A torchvision classifier, timm:NAME, path/to/file.py:factory or some.module:factory."),
    ],
    checkpoint: Annotated[
        Optional[Path],  # noqa: UP045 - Typer reads it at run time
        typer.Option(
            help="Trained weights: .pt, .pth, .ckpt, .th, .tar or .safetensors. Without them the baseline is trained."
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="The images to train, calibrate and measure with.")] = DEFAULT_DATA,
    classes: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A text file with the classes' names, one a line, instead of the data's own."),
    ] = None,
    val_images: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Measure accuracy on so many validation images, drawn from each class alike."),
    ] = None,
    augment: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Random changes of training images: none, shift or shift+flip; by default what suits data."),
    ] = None,
    skip_unreadable: Annotated[
        bool,
        typer.Option(
            "--skip-unreadable", help="Measure without the validation images that cannot be read; they are counted."
        ),
    ] = False,
    recipe: Annotated[Optional[Path], typer.Option(help="A YAML file of stages; the default runs every pass.")] = None,  # noqa: UP045
    store: _Store = DEFAULT_STORE,
    device: Annotated[str, typer.Option(help="Where to train and calibrate: auto, cpu, cuda or cuda:N.")] = "auto",
    measure: _Measure = "auto",
    image_size: Annotated[
        Optional[int], typer.Option(min=1, help="Side of the network's input in pixels.")  # noqa: UP045
    ] = None,
    weights: Annotated[
        Optional[str], typer.Option(help="torchvision's own weights, such as DEFAULT.")  # noqa: UP045
    ] = None,
    weights_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Which weights of the checkpoint: model, ema …, or a prefix such as teacher."),
    ] = None,
    resize: Annotated[
        Optional[str], typer.Option(help="Pixels that an image's shorter side is scaled to.", metavar="PIXELS")  # noqa: UP045
    ] = None,
    crop: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Pixels cut from the centre, the input's size: 224, or 224x192 (HxW).", metavar="PIXELS"),
    ] = None,
    mean: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of each channel in [0, 1]: 0.485,0.456,0.406; one number for grey.", metavar="NUMBERS"),
    ] = None,
    std: Annotated[
        Optional[str], typer.Option(help="That each channel is divided by, as --mean.", metavar="NUMBERS")  # noqa: UP045
    ] = None,
    interpolation: Annotated[
        Optional[str], typer.Option(help="How images are scaled: nearest, bilinear or bicubic.")  # noqa: UP045
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="The run's name; by default made of model and data.")] = None,  # noqa: UP045
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a run of this name, even if it is of another model or data.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Time everything anew.")] = False,
    objective: _Objective = None,
    max_drop: _MaxDrop = None,
    confidence: _Confidence = None,
    trust_checkpoint: Annotated[
        bool, typer.Option("--trust-checkpoint", help="Let the checkpoint's pickle run code. Only for files you made.")
    ] = False,
    every: _Every = False,
    json: Annotated[bool, typer.Option("--json", help="Print report.json on stdout, and nothing else.")] = False,
) -> None:
    """Run a recipe on a model: build, measure, pack and report."""
    with reported("interrupted; what was finished is kept, the same command goes on from there"):
        with _uncollected():
            from optimize import noise
            from optimize.models.preprocessing import Wish, parse_preprocessing
            from optimize.report.terminal import Display
            from optimize.run.job import Job
            from optimize.run.pipeline import run as run_job

        job = Job(
            model=model,
            checkpoint=checkpoint,
            data=data,
            classes=classes,
            val_images=val_images,
            augment=augment,
            skip_unreadable=skip_unreadable,
            recipe=recipe,
            store=store,
            device=device,
            measure=measure,
            image_size=image_size,
            weights=weights,
            weights_key=weights_key,
            preprocessing=Wish(
                parse_preprocessing(
                    {"resize": resize, "crop": crop, "mean": mean, "std": std, "interpolation": interpolation}, "--{}"
                )
            ),
            run=name,
            replace=replace,
            trust_checkpoint=trust_checkpoint,
            seed=seed,
            remeasure=remeasure,
            recommend=_given(objective=objective, max_drop=_fraction(max_drop), confidence=confidence),
        )
        noise.silence()
        # A model of the user's own may print; standard output is for the result alone.
        with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
            outcome = run_job(job, display)
        if json:
            sys.stdout.write((outcome.folder / "report.json").read_text(encoding="utf-8"))
        else:
            _print_outcome(outcome.report, outcome.folder, every=every)
        if outcome.failed:
            raise PipelineError(f"failed: {', '.join(outcome.failed)}; the reasons stand in the report")


@app.command("list")
def list_runs(store: _Store = DEFAULT_STORE) -> None:
    """List the runs of a store."""
    with reported():
        from optimize.report.runs import HEADS, RunSummary, read_runs

        table = Table(*HEADS, box=None, pad_edge=False)
        for entry in read_runs(store):
            if isinstance(entry, RunSummary):
                table.add_row(*map(Text, entry.cells()))
            else:
                typer.echo(f"left out: {entry}", err=True)
        if not table.row_count:
            typer.echo(f"no runs in {store}")
            return
        console = Console()
        (console if console.is_terminal else Console(width=1000)).print(table)
        # Two days, or two runs at once, and the same network takes another time.
        typer.echo("speed is to each run's own fastest float execution; `compare RUN RUN` measures runs together")


@app.command()
def compare(  # noqa: PLR0917 - each is an option of the command line
    names: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Runs, or RUN/ARTIFACT; the first is the measure.")
    ],
    store: _Store = DEFAULT_STORE,
    measure: _Measure = "auto",
    objective: _Objective = None,
    max_drop: _MaxDrop = None,
    confidence: _Confidence = None,
    every: _Every = False,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")] = False,
) -> None:
    """Compare runs that were judged by the same images; their speeds are measured anew, together.

    RUN stands for its baseline and its recommended artifact. Exit code 2 if they do not compare: what differs is said.
    """
    with reported():
        from optimize import noise
        from optimize.measure.machine import measured_devices, resolve_device
        from optimize.measure.timing import Timing
        from optimize.report.table import print_table
        from optimize.report.terminal import Display
        from optimize.run.comparing import compare_runs
        from optimize.run.recommendation import Recommend

        rule = Recommend(**_given(objective=objective, max_drop=_fraction(max_drop), confidence=confidence))
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


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A run, or run/artifact.")],
    store: _Store = DEFAULT_STORE,
    every: _Every = False,
) -> None:
    """Show a run's table, or an artifact's card."""
    with reported():
        from optimize.report.runs import card_of, report_of
        from optimize.report.table import print_table

        if "/" in name.rstrip("/"):
            Console().print_json(card_of(store, name))
        else:
            print_table(report_of(store, name.rstrip("/")), every=every)
            typer.echo(store / name / "report.html")


@app.command()
def verify(name: Annotated[str, typer.Argument(help="A run, or run/artifact.")], store: _Store = DEFAULT_STORE) -> None:
    """Check every file of a run against its SHA-256; exit code 1 if one does not match."""
    with reported():
        from optimize.report.runs import faults_of

        checked, faults = faults_of(store, name)
        for fault in faults:
            typer.echo(fault, err=True)
        if faults:
            raise PipelineError(f"{len(faults)} of {checked} are damaged; run the model again to rebuild them")
        typer.echo(f"{checked} artifacts and archives are whole")


@app.command()
def prune(
    store: _Store = DEFAULT_STORE,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """Show what no run, server or program uses in the store, and remove it if you agree."""
    with reported():
        from optimize.store import pruning
        from optimize.store.objects import Store

        if not store.is_dir():
            raise UserError(f"there is no store {store}")
        opened = Store(store)
        found = pruning.prunable(opened)
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
                raise UserError(f"would remove {amount}; say --yes to remove them without being asked")
            if not typer.confirm(f"remove {amount}?"):
                return
        removed = pruning.prune(opened, found)
        typer.echo(f"removed {len(removed.objects)} objects, {removed.size / 1e6:.1f} MB")


@app.command()
def lint(
    file: Annotated[Path, typer.Argument(help="A quantized ONNX graph, of whatever tool.", metavar="FILE.onnx")],
    target: Annotated[
        str,
        typer.Option(
            help="What it is for: cpu (ONNX Runtime and OpenVINO, with VNNI), x86 (any x86 CPU: 7 bits) or tensorrt."
        ),
    ] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, and nothing else.")] = False,
) -> None:
    """Look for what is wrong with a quantized ONNX graph; exit code 1 if anything is.

    Only its structure and constants are looked at: nothing runs.
    """
    with reported():
        from optimize.lint.base import TARGETS, read_graph
        from optimize.lint.base import lint as judge

        chosen = next((name for name in TARGETS if name == target), None)
        if chosen is None:
            raise UserError(f"--target is one of {', '.join(TARGETS)}, not {target!r}")
        findings = judge(read_graph(file), chosen)
        if json:
            found = [dataclasses.asdict(finding) for finding in findings]
            sys.stdout.write(dumps({"file": str(file), "target": target, "findings": found}, indent=2) + "\n")
        else:
            for finding in findings:
                typer.echo(f"{finding.severity}: {finding.node}: {finding.said}; {finding.remedy} [{finding.rule}]")
            typer.echo(
                f"{len(findings)} findings" if findings else f"nothing found: {file} is well-formed for {target}"
            )
        if findings:
            raise typer.Exit(1)


@app.command()
def sensitivity(  # noqa: PLR0917 - each is an option of the command line
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run, or run/artifact: one that ptq made, or a module.")],
    store: _Store = DEFAULT_STORE,
    measure: _Measure = "auto",
    execution: _Execution = None,
    device: Annotated[str, typer.Option(help="Where to calibrate: auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="That the run was made with.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Measure what each layer of a run's network costs and wins in int8: alone, and as the only one that is not.

    Interrupted, it goes on where it was; table, chart and figures are written beside the run.
    """
    with reported("interrupted; what was measured is kept, the same command goes on from there"):
        with _uncollected():
            from optimize import noise
            from optimize.measure.machine import measured_devices
            from optimize.precision.files import write_sensitivity
            from optimize.precision.sensitivity import one_image, subject
            from optimize.precision.sensitivity import sensitivity as look
            from optimize.precision.table import print_sensitivity
            from optimize.report.terminal import Display
            from optimize.run.reopened import artifact_of, reopen_run

        noise.silence()
        run_name, _, artifact = name.rstrip("/").partition("/")
        with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
            session, report = reopen_run(store, run_name, display, seed=seed, device=device)
            with contextlib.closing(session):
                first = next((row.name for row in report.rows if row.operation == "ptq" and row.file), None)
                step = artifact_of(session, report, run_name, artifact or first or report.baseline.name)
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


@app.command(cls=_ListsData)
def search(  # noqa: PLR0917 - each is an option of the command line
    model: Annotated[
        str,
        typer.Argument(help="A torchvision classifier, timm:NAME, path/to/file.py:factory or some.module:factory."),
    ],
    max_drop: Annotated[
        str, typer.Option(help="Largest loss of top-1, in percentage points: 0.5, or 0.5pp.", metavar="POINTS")
    ] = "0.5",
    max_latency_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Longest median latency of one image, in milliseconds.", metavar="MS"),
    ] = None,
    bits: Annotated[
        str, typer.Option(help="Precisions that layers may have: 8 and 16 or 32 or both.", metavar="8,16,32")
    ] = "8,32",
    method: Annotated[str, typer.Option(help="How layers are looked for: greedy or halving.")] = "greedy",
    max_trials: Annotated[Optional[int], typer.Option(min=1, help="Most trials.")] = None,  # noqa: UP045
    execution: _Execution = None,
    checkpoint: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Trained weights, as for `run`. Without them the baseline is trained."),
    ] = None,
    data: Annotated[str, typer.Option(help="The images to train, calibrate and measure with.")] = DEFAULT_DATA,
    val_images: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=2, help="Measure accuracy on so many validation images, drawn from each class alike."),
    ] = None,
    weights: Annotated[
        Optional[str], typer.Option(help="torchvision's own weights, such as DEFAULT.")  # noqa: UP045
    ] = None,
    weights_key: Annotated[
        Optional[str], typer.Option(help="Which weights of the checkpoint, as for `run`.")  # noqa: UP045
    ] = None,
    image_size: Annotated[
        Optional[int], typer.Option(min=1, help="Side of the network's input in pixels.")  # noqa: UP045
    ] = None,
    recipe: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A recipe whose baseline, preprocessing and first ptq stage are taken."),
    ] = None,
    store: _Store = DEFAULT_STORE,
    device: Annotated[str, typer.Option(help="Where to train and calibrate: auto, cpu, cuda or cuda:N.")] = "auto",
    measure: _Measure = "auto",
    name: Annotated[Optional[str], typer.Option(help="What to call it; by default made of model and data.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    trust_checkpoint: Annotated[
        bool, typer.Option("--trust-checkpoint", help="Let the checkpoint's pickle run code. Only for files you made.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON, and nothing else.")] = False,
) -> None:
    """Choose the precision of each layer under a budget, by measured accuracy and measured latency.

    Interrupted, it goes on where it was. A recipe that makes what was found is written. Exit code 1 if nothing keeps
    the budget.
    """
    with reported("interrupted; every trial is kept, the same command goes on from there"):
        with _uncollected():
            from optimize import noise
            from optimize.precision.command import search_job
            from optimize.precision.search import Search
            from optimize.precision.table import print_search
            from optimize.report.terminal import Display
            from optimize.run.job import Job

        words = [word.strip() for word in bits.split(",")]
        if not all(word.isascii() and word.isdigit() for word in words):
            raise UserError(f"--bits takes numbers such as 8,32, not {bits!r}")
        asked: dict[str, Any] = {
            "max_drop": drop_of(max_drop, plain="points"),
            "max_latency_ms": max_latency_ms,
            "bits": tuple(map(int, words)),
            "method": method,
            "max_trials": max_trials,
            "execution": execution,
        }
        by = Search(**asked)
        job = Job(
            model=model,
            checkpoint=checkpoint,
            data=data,
            val_images=val_images,
            recipe=recipe,
            store=store,
            device=device,
            measure=measure,
            image_size=image_size,
            weights=weights,
            weights_key=weights_key,
            run=name,
            trust_checkpoint=trust_checkpoint,
            seed=seed,
        )
        noise.silence()
        with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
            found, folder = search_job(job, by, display)
        if json:
            sys.stdout.write(dumps(found.to_json(), indent=2) + "\n")
        else:
            print_search(found)
            if found.pair:
                again = command(f"optimize run {model} --recipe {folder / 'recipe.yaml'}", store)
                artifact = found.pair.partition("@")[0]
                typer.echo(f"pack it, with the same checkpoint and data: {again}; its artifact is called {artifact}")
        if found.pair is None:
            raise PipelineError("nothing keeps the budget")


@app.command()
def certify(  # noqa: PLR0917 - each is an option of the command line
    name: Annotated[str, typer.Argument(metavar="RUN/ARTIFACT", help="An INT8 artifact of a run.")],
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Run each layer alone, by every engine, on the integers that the reference has."),
    ] = False,
    images: Annotated[int, typer.Option(min=1, help="With --layers: validation images that the integers are of.")] = 8,
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="With --layers: other images than those of the run."),
    ] = None,
    store: _Store = DEFAULT_STORE,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON, and nothing else.")] = False,
) -> None:
    """Show how near engines come to what an artifact's integers mean, end to end, and layer by layer.

    Exit code 1 if a layer computes something else: a saturating kernel, a lost clamp. A tie that is rounded to the
    other side is said, and is no fault.
    """
    with reported():
        from optimize.report.certified import print_engines, print_parity
        from optimize.run.certifiable import subject

        certified = subject(store, name)
        parity = certified.card.certificate
        found: tuple[Engine, ...] = ()
        if layers:
            from optimize import noise
            from optimize.report.terminal import Display
            from optimize.run.certifying import certify_layers

            noise.silence()
            with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
                found = certify_layers(store, certified, images=images, data=data, listener=display)
        if json:
            document = {
                "artifact": name,
                "certificate": parity.to_json() if parity else None,
                "layers": [engine.to_json() for engine in found],
            }
            sys.stdout.write(dumps(document, indent=2) + "\n")
        else:
            print_engines(found)
            print_parity(name, parity)
        if not all(engine.sound for engine in found) or (layers and not any(engine.layers for engine in found)):
            raise typer.Exit(1)


@app.command("passes")
def list_passes() -> None:
    """List the passes, what they take, and their settings."""
    with reported():
        from optimize.passes.base import passes
        from optimize.store.artifact import KIND_NAMES
        from serve.config import defaults

        console = Console()
        for step in passes().values():
            accepts = " or ".join(KIND_NAMES[kind] for kind in sorted(step.accepts))
            console.print(f"[bold]{step.name}[/bold]: {step.summary}; takes {accepts}, gives {KIND_NAMES[step.yields]}")
            usual = defaults(step.config)
            for field_name, entry in step.config.model_fields.items():
                console.print(f"    {field_name} = {usual[field_name]!r}: {entry.description}", highlight=False)


def main() -> None:
    """Entry point."""
    app()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage while a million objects are imported, which stay: that takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _fraction(words: str | None) -> float | None:
    """The option ``--max-drop`` of commands where a bare number is a fraction."""
    return None if words is None else drop_of(words, plain="fraction")


def _given(**options: object) -> dict[str, Any]:
    """Those options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _print_outcome(report: Report, folder: Path, *, every: bool) -> None:
    from optimize.report.table import print_table

    print_table(report, every=every)
    typer.echo(f"report: {folder / 'report.html'}   archives: {folder / 'archives'}")
    typer.echo(f"serve it: {target('serve', f'serve start {folder.name}', folder.parent, RUN=folder.name)}")
