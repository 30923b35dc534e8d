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
    file: Annotated[Path, typer.Argument(help="A quantized ONNX graph, of whatever tool.", metavar="FILE.onnx")],
    target: Annotated[
        str,
        typer.Option(help="What it is for: cpu (ONNX Runtime and OpenVINO, with VNNI), x86 (any x86 CPU) or tensorrt."),
    ] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, and nothing else.")] = False,
) -> None:
    """Look for what is wrong with a quantized ONNX graph; exit code 1 if anything is.

    Its structure and constants are looked at, and ONNX Runtime opens it: nothing runs. Exit code 2 if it is no valid
    graph, if ONNX Runtime refuses it, or if a part could not be judged.
    """
    with reported():
        from optimize.lint.base import TARGETS, lint_file

        chosen = next((name for name in TARGETS if name == target), None)
        if chosen is None:
            raise UserError(f"--target is one of {', '.join(TARGETS)}, not {target!r}")
        verdict = lint_file(file, chosen)
        if json:
            sys.stdout.write(dumps({"file": str(file), "target": target, **verdict.to_json()}, indent=2) + "\n")
        else:
            _print_verdict(file, target, verdict)
        for why in verdict.refused:
            typer.echo(f"error: {file} is not well-formed: {why}", err=True)
        for entry in verdict.failures:
            typer.echo(f"error: {file}: not judged: {entry.what}: {entry.why}", err=True)
        if not verdict.whole:
            raise typer.Exit(2)
        if verdict.findings:
            raise typer.Exit(1)


def _print_verdict(file: Path, target: str, verdict: Verdict) -> None:
    for finding in verdict.findings:
        typer.echo(f"{finding.severity}: {finding.node}: {finding.said}; {finding.remedy} [{finding.rule}]")
    for entry in verdict.unjudged:
        if not entry.failed:
            typer.echo(f"not judged: {entry.what}: {entry.why}")
    if verdict.findings:
        typer.echo(f"{len(verdict.findings)} findings")
    elif verdict.whole and not verdict.unjudged:
        typer.echo(f"nothing found: {file} is well-formed for {target}")
    elif not verdict.refused:
        typer.echo(f"nothing found in what was judged of {file} for {target}")


def certify(  # noqa: PLR0917 - each is an option of the command line
    name: Annotated[str, typer.Argument(metavar="RUN/ARTIFACT", help="An INT8 artifact of a run.")],
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Run each layer alone, by every engine, on the integers that the reference has."),
    ] = False,
    images: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help=f"With --layers: validation images that the integers are of; {_IMAGES} by default."),
    ] = None,
    data: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="With --layers: other images than those of the run."),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="With --layers: that the run was made with, if it was given one."),
    ] = None,
    store: Store = DEFAULT_STORE,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON, and nothing else.")] = False,
) -> None:
    """Show how near engines come to what an artifact's integers mean, end to end, and layer by layer.

    Exit code 1 if a layer computes something else (a saturating kernel, a lost clamp), or if no engine here could run
    one. A tie that is rounded to the other side is said, and is no fault.
    """
    with reported():
        if not layers and (named := given(images=images, data=data, seed=seed)):
            asked = " and ".join(f"--{option}" for option in named)
            raise UserError(f"{asked}: only layers are run on images of your choice; add --layers")
        from optimize.report.certification_table import print_engines, print_parity
        from optimize.run.certification.subject import subject

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
            print_parity(name, parity)
        if not all(engine.sound for engine in found) or (layers and not any(engine.layers for engine in found)):
            raise typer.Exit(1)
