"""Commands about archives: ``package``."""

from __future__ import annotations

import typer

from serve.cli.words import Data, Run, Store
from serve.command_line import reported
from serve.hints import DEFAULT_STORE
from serve.option_words import with_serving_options
from serve.options import ServingOptions


@with_serving_options
def package(run: Run, *, options: ServingOptions, store: Store = DEFAULT_STORE, data: Data = None) -> None:
    """Build an archive (.mar) of every artifact of RUN.

    Each archive is complete in itself: a stock TorchServe 0.12 serves it where this project is not
    installed. The same artifact, served alike, gives the same bytes. What is not given stays as the run decided.
    """
    with reported():
        from serve.runs import find_run, package_run

        for path in package_run(store, find_run(run, data), options):
            typer.echo(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
