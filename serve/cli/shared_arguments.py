"""Arguments and helpers that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from serve.common.command_options import with_options
from serve.common.options import ServingOptions
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    from serve.runs.stored_runs import DeviceChoice
    from serve.torchserve.state import RunningServer

Store = Annotated[Path, typer.Option(help="The folder that holds the runs.", show_default=True)]
Run = Annotated[str, typer.Argument(help="Name of the run, or its model, such as path/to/net.py:build.")]
Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]RUN[/ARTIFACT]…",
        help="What to serve: runs, or their models, optionally with an artifact.",
        show_default=False,
    ),
]
Artifacts = Annotated[
    list[str] | None,
    typer.Option(
        help="Artifact of a RUN that is given without one; or all. Repeatable.", show_default="the recommended artifact"
    ),
]
Device = Annotated[str, typer.Option(help="cpu (no GPU), cuda (prefer it) or auto (as each archive prefers).")]
Data = Annotated[str | None, typer.Option(help="Data of the run, if RUN is a model.")]
RequireSigned = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PUBKEY",
        help="Serve only archives signed with this key; with several, any of them is enough. Default: as "
        "STORE/serve.toml says.",
    ),
]
ForeignCode = Annotated[
    bool,
    typer.Option(
        "--foreign-code",
        help="Run Python of an unsigned archive even if this installation does not pack it.",
    ),
]


RequireKnown = Annotated[bool, typer.Option("--require-known", help="Refuse archives without a known answer.")]

#: Decorator: gives a command the serving options, as its parameter ``options``.
serving_options = with_options(ServingOptions, "options", panel="Serving options (they replace those of the archives)")


def checked_device(device: str) -> DeviceChoice:
    """Return the value of ``--device``.

    Raises:
        UserError: the value is unknown.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device must be auto, cpu or cuda, got {device!r}")
    return cast("DeviceChoice", device)


def the_running(store: Path) -> RunningServer:
    """Return the server of a store.

    Raises:
        PipelineError: none is running.
    """
    from serve.torchserve import server

    return server.the_running(store)
