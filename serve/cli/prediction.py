"""The command ``predict``, which sends an image to a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from serve.cli.shared_arguments import Store, the_running
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE
from serve.runtime.errors import UserError
from serve.runtime.tasks.base import find_task


def predict(
    image: Annotated[Path, typer.Argument(help="An image file: JPEG, PNG, WebP, BMP, TIFF or GIF.")],
    store: Store = DEFAULT_STORE,
    model: Annotated[
        str | None, typer.Option(help="Served artifact to use. Default: the recommended one of the run.")
    ] = None,
    k: Annotated[
        int | None, typer.Option(help="Number of classes to print. Default: as the archive says, usually 5.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of the server as JSON.")] = False,
) -> None:
    """Send IMAGE to the running server and print its answer: of a classifier the best classes, best first."""
    with reported():
        try:
            data = image.read_bytes()
        except OSError as error:
            raise UserError(f"{image}: cannot be read ({error.strerror})") from None
        running = the_running(store)
        name = running.model(model or running.default_model).name
        with running.client(store) as client:
            task = find_task(client.describe(name)["task"])
            parameters = dict(task.readable) | ({} if k is None else {"k": k})
            answer = client.predict(name, data, headers=task.to_headers(parameters))
        if as_json:
            typer.echo(json.dumps(answer))
            return
        for line in task.lines(answer):
            typer.echo(line)
