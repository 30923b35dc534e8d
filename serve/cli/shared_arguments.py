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
Run = Annotated[str, typer.Argument(help="The run's name, or the model that it is of, such as path/to/net.py:build.")]
Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]RUN[/ARTIFACT]…",
        help="What to serve: runs, or models that they are of, and perhaps which artifact.",
        show_default=False,
    ),
]
Artifacts = Annotated[
    list[str] | None,
    typer.Option(help="Of a RUN alone: this one, or all. Repeatable.", show_default="the recommended one"),
]
Device = Annotated[str, typer.Option(help="cpu (no GPU), cuda (prefer it) or auto (as each archive prefers).")]
Data = Annotated[str | None, typer.Option(help="The data that the model's run is on, where RUN is a model.")]
RequireSigned = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PUBKEY",
        help="Serve only what this key signed; repeatable, any will do. Default: what STORE/serve.toml says.",
    ),
]
ForeignCode = Annotated[
    bool,
    typer.Option(
        "--foreign-code",
        help="Run the Python of an unsigned archive also where it is not what this installation packs.",
    ),
]


RequireKnown = Annotated[bool, typer.Option("--require-known", help="Refuse archives without a known answer.")]

#: Decorator: gives a command the serving options, as its parameter ``options``.
serving_options = with_options(
    ServingOptions, "options", panel="How models are served, where that is not as their archives say"
)


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
