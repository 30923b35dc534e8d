"""Commands about archives: ``package``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve.cli.signatures import PasswordFile, password_in
from serve.cli.words import Data, Run, Store
from serve.command_line import reported
from serve.hints import DEFAULT_STORE
from serve.option_words import with_serving_options
from serve.options import ServingOptions


@with_serving_options
def package(
    run: Run,
    *,
    options: ServingOptions,
    store: Store = DEFAULT_STORE,
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Sign each archive with this private key; see `sign`.")
    ] = None,
    password_file: PasswordFile = None,
    data: Data = None,
) -> None:
    """Build an archive (.mar) of every artifact of RUN.

    Each archive is complete in itself: a stock TorchServe 0.12 serves it where this project is not
    installed. The same artifact, served alike, gives the same bytes. What is not given stays as the run decided.
    """
    with reported():
        from serve.runs import find_run, package_run
        from serve.signing import sign as sign_archive

        for path in package_run(store, find_run(run, data), options):
            typer.echo(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
            if sign is not None:
                typer.echo(f"{sign_archive(path, sign, password=password_in(password_file))}")
