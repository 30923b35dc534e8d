"""Options that several commands share, and the functions that read them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperOption

Store = Annotated[Path, typer.Option(help="The folder that runs are kept in.")]
Every = Annotated[bool, typer.Option("--all", help="List every execution of each artifact, not only the best.")]
Measure = Annotated[
    str, typer.Option(help="Where to measure: auto (every available device), or a list such as cpu,cuda.")
]
SkipUnreadable = Annotated[
    bool,
    typer.Option(
        "--skip-unreadable", help="Measure without the validation images that cannot be read; the report counts them."
    ),
]
Execution = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Engine for the trials; by default the one that runs int8 fastest.", metavar="ENGINE"),
]


class ListsData(TyperCommand):
    """A command whose help lists the data formats. They are looked up only when the help is shown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the list of formats added to the help of ``--data``."""
        from optimize.data.formats.base import usages

        for option in self.params:
            if isinstance(option, TyperOption) and option.name == "data":
                option.help = f"{option.help} One of {', '.join(usages())}."
        super().format_help(ctx, formatter)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection while modules are imported.

    The import creates about a million objects that stay alive. Collecting takes a fifth of its time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def given(**options: object) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}
