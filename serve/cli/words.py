"""What several commands share: the arguments that they have in common, and the server that they speak to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serve.hints import command
from serve.runtime.errors import PipelineError

if TYPE_CHECKING:
    from serve.torchserve.server import RunningServer

Store = Annotated[Path, typer.Option(help="The folder that holds the runs.", show_default=True)]
Run = Annotated[str, typer.Argument(help="The run's name, or the model that it is of, such as path/to/net.py:build.")]
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


def the_running(store: Path) -> RunningServer:
    """The server of a store.

    Raises:
        PipelineError: none is running.
    """
    from serve.torchserve import server

    running = server.running(store)
    if running is None:
        raise PipelineError(f"no server of {store} is running: start one with `{command('serve start RUN', store)}`")
    return running
