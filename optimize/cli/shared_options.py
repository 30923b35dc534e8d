"""What several commands share: options that they have in common, and how they read them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperOption

Store = Annotated[Path, typer.Option(help="The folder that runs are kept in.")]
Every = Annotated[bool, typer.Option("--all", help="List every execution of each artifact, and not its best alone.")]
Measure = Annotated[
    str, typer.Option(help="Where to measure: auto (every device that there is), or a list such as cpu,cuda.")
]
SkipUnreadable = Annotated[
    bool,
    typer.Option(
        "--skip-unreadable", help="Measure without the validation images that cannot be read; the report counts them."
    ),
]
Execution = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="The engine that trials run by; by default the one that runs int8 fastest.", metavar="ENGINE"),
]


class ListsData(TyperCommand):
    """A command whose help lists the data formats, which are looked for when the help is shown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the formats behind what ``--data`` is for."""
        from optimize.data.formats.base import usages

        for option in self.params:
            if isinstance(option, TyperOption) and option.name == "data":
                option.help = f"{option.help} One of {', '.join(usages())}."
        super().format_help(ctx, formatter)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage while a million objects are imported, which stay: that takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def given(**options: object) -> dict[str, Any]:
    """Those options that were given."""
    return {name: value for name, value in options.items() if value is not None}
