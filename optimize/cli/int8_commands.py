"""Commands that judge int8 graphs: ``lint`` and ``certify``."""

from __future__ import annotations

import contextlib
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console

from optimize.cli.shared_options import Store, given
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    from optimize.certify.layer_findings import Engine
    from optimize.lint.base import Verdict

_IMAGES = 8  # the default number of images for ``--layers``


def lint(
    file: Annotated[Path, typer.Argument(help="A quantized ONNX graph, made by any tool.", metavar="FILE.onnx")],
    target: Annotated[
        str,
        typer.Option(
            help="Target of the graph: cpu (ONNX Runtime and OpenVINO, with VNNI), x86 (any x86 CPU) or tensorrt."
        ),
    ] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print only the findings, as JSON.")] = False,
) -> None:
    """Find faults in a quantized ONNX graph. Exit code 1 if there are any.

    Checks its structure and its constants, and opens it with ONNX Runtime. The graph does not run. Exit code 2 if the
    graph is not valid, if ONNX Runtime refuses it, or if a part could not be checked.
    """
    with reported():
        from optimize.lint.base import TARGETS, lint_file

        chosen = next((name for name in TARGETS if name == target), None)
        if chosen is None:
            raise UserError(f"--target must be one of {', '.join(TARGETS)}, not {target!r}")
        verdict = lint_file(file, chosen)
        if json:
            sys.stdout.write(dumps({"file": str(file), "target": target, **verdict.to_json()}, indent=2) + "\n")
        else:
            _print_verdict(file, target, verdict)
        for why in verdict.refused:
            typer.echo(f"error: {file} is not well-formed: {why}", err=True)
        for entry in verdict.failures:
            typer.echo(f"error: {file}: not checked: {entry.what}: {entry.why}", err=True)
        if not verdict.whole:
            raise typer.Exit(2)
        if verdict.findings:
            raise typer.Exit(1)


def _print_verdict(file: Path, target: str, verdict: Verdict) -> None:
    for finding in verdict.findings:
        typer.echo(f"{finding.severity}: {finding.node}: {finding.said}; {finding.remedy} [{finding.rule}]")
    for entry in verdict.unjudged:
        if not entry.failed:
            typer.echo(f"not checked: {entry.what}: {entry.why}")
    if verdict.findings:
        typer.echo(f"{len(verdict.findings)} findings")
    elif verdict.whole and not verdict.unjudged:
        typer.echo(f"nothing found: {file} is well-formed for {target}")
    elif not verdict.refused:
        typer.echo(f"nothing found in the parts of {file} that were checked for {target}")


def certify(  # noqa: PLR0917 - each is an option of the command line
    name: Annotated[str, typer.Argument(metavar="RUN/ARTIFACT", help="An INT8 artifact of a run.")],
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Run each layer alone, with every engine, on the integers of the reference."),
    ] = False,
    images: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help=f"With --layers: number of validation images; {_IMAGES} by default."),
    ] = None,
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="With --layers: data to use instead of the data of the run."),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="With --layers: seed of the run, if it had one."),
    ] = None,
    store: Store = DEFAULT_STORE,
    json: Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")] = False,
) -> None:
    """Compare what engines compute with the exact result of an artifact's integers, end to end and layer by layer.

    Exit code 1 if a layer computes a wrong result (a saturating kernel, a lost clamp), or if no engine here could run
    it. A tie that is rounded to the other side is reported, but is not an error.
    """
    with reported():
        if not layers and (named := given(images=images, data=data, seed=seed)):
            asked = " and ".join(f"--{option}" for option in named)
            raise UserError(f"{asked}: only single layers can run on images of your choice; add --layers")
        from optimize.report.certification_table import print_engines, print_parity
        from optimize.run.certification.subject import subject
        from optimize.tasks.base import find_task

        certified = subject(store, name)
        parity = certified.card.certificate
        found: tuple[Engine, ...] = ()
        if layers:
            from optimize import noise
            from optimize.report.progress_display import Display
            from optimize.run.certification.on_demand import certify_layers

            noise.silence()
            with contextlib.redirect_stdout(sys.stderr), Display(Console(stderr=True)) as display:
                found = certify_layers(
                    store, certified, images=images or _IMAGES, data=data, seed=seed or 0, listener=display
                )
        if json:
            document = {
                "artifact": name,
                "certificate": parity.to_json() if parity else None,
                "layers": [engine.to_json() for engine in found],
            }
            sys.stdout.write(dumps(document, indent=2) + "\n")
        else:
            print_engines(found)
            print_parity(name, parity, find_task(certified.card.task))
        if not all(engine.sound for engine in found) or (layers and not any(engine.layers for engine in found)):
            raise typer.Exit(1)
