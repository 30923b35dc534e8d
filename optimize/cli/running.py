"""Commands that make and measure: ``run``, and ``compare`` of what was made."""

from __future__ import annotations

import contextlib
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console

from optimize.cli.words import (
    AcceptGaps,
    Confidence,
    Every,
    MaxDrop,
    Measure,
    Objective,
    SkipUnreadable,
    Store,
    fraction,
    given,
    uncollected,
)
from optimize.data.formats.base import DEFAULT_DATA
from serve.common import layout
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE, target
from serve.runtime.errors import PipelineError

if TYPE_CHECKING:
    from optimize.measure.rows import Report


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
    class_order: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Which output means which class: data, sorted, natural, checkpoint, or a file with a name a line. "
            "By default what the checkpoint states.",
            metavar="ORDER",
        ),
    ] = None,
    val_images: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Measure accuracy on so many validation images, drawn from each class alike."),
    ] = None,
    augment: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Random changes of training images: none, shift or shift+flip; by default what suits data."),
    ] = None,
    skip_unreadable: SkipUnreadable = False,
    accept_gaps: AcceptGaps = False,
    recipe: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="A YAML file of stages; the default runs fuse, half, dynamic, ptq, qat, onnx, onnx-half and onnx-int8 "
            "(`passes` lists the others)."
        ),
    ] = None,
    store: Store = DEFAULT_STORE,
    device: Annotated[str, typer.Option(help="Where to train and calibrate: auto, cpu, cuda or cuda:N.")] = "auto",
    measure: Measure = "auto",
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
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Pixels that an image's shorter side is scaled to; or 224x192 (HxW): both sides, without a crop.",
            metavar="PIXELS",
        ),
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
    pixel_max: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What is white in greys of more than 8 bits, such as 4095.", metavar="NUMBER"),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="The run's name; by default made of model and data.")] = None,  # noqa: UP045
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a run of this name, even if it is of another model or data.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    processes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            help="Processes that train together, on this machine; on GPUs each has one. One by default; under "
            "torchrun, those that it has started.",
        ),
    ] = None,
    tensorboard: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the curves of what trains for TensorBoard into this folder.", metavar="DIR"),
    ] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure the speed of everything anew.")] = False,
    objective: Objective = None,
    max_drop: MaxDrop = None,
    confidence: Confidence = None,
    trust_checkpoint: Annotated[
        bool, typer.Option("--trust-checkpoint", help="Let the checkpoint's pickle run code. Only for files you made.")
    ] = False,
    every: Every = False,
    json: Annotated[bool, typer.Option("--json", help="Print report.json on stdout, and nothing else.")] = False,
) -> None:
    """Run a recipe on a model: build, measure, pack and report."""
    with reported("interrupted; what was finished is kept, the same command goes on from there"):
        with uncollected():
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
            class_order=class_order,
            val_images=val_images,
            augment=augment,
            skip_unreadable=skip_unreadable,
            accept_gaps=accept_gaps,
            recipe=recipe,
            store=store,
            device=device,
            measure=measure,
            image_size=image_size,
            weights=weights,
            weights_key=weights_key,
            preprocessing=Wish(
                parse_preprocessing(
                    {
                        "resize": resize,
                        "crop": crop,
                        "mean": mean,
                        "std": std,
                        "interpolation": interpolation,
                        "pixel_max": pixel_max,
                    },
                    "--{}",
                )
            ),
            run=name,
            replace=replace,
            trust_checkpoint=trust_checkpoint,
            seed=seed,
            processes=processes,
            tensorboard=tensorboard,
            remeasure=remeasure,
            recommend=given(objective=objective, max_drop=fraction(max_drop), confidence=confidence),
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


def compare(  # noqa: PLR0917 - each is an option of the command line
    names: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Runs, or RUN/ARTIFACT; the first is the measure.")
    ],
    store: Store = DEFAULT_STORE,
    measure: Measure = "auto",
    objective: Objective = None,
    max_drop: MaxDrop = None,
    confidence: Confidence = None,
    every: Every = False,
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

        rule = Recommend(**given(objective=objective, max_drop=fraction(max_drop), confidence=confidence))
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
