"""The command line ``python -m serve``: a file for each group of commands, a line here for each command. No logic."""

from __future__ import annotations

from collections.abc import Callable

import typer

from serve.cli.archives import audit, package
from serve.cli.export_command import export
from serve.cli.keys import renew_keys
from serve.cli.own_server import run
from serve.cli.prediction import predict
from serve.cli.server import add, remove, replace, start, status, stop
from serve.cli.signatures import sign, verify
from serve.cli.tuning import tune
from serve.common.command_line import PlainCommand, PlainGroup

app = typer.Typer(
    cls=PlainGroup,
    help="Pack the artifacts of a run into archives, and serve them on this machine with TorchServe or our own "
    "server.\n\n`python -m optimize run MODEL` makes a run and puts it into the store. Both servers listen on "
    "loopback and require a token. The keys, configuration and logs of TorchServe are in STORE/.server.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain lines: half as many as in Typer's boxes, and nothing is cut off
    context_settings={"max_content_width": 100},
    add_completion=False,
    pretty_exceptions_enable=False,
)

#: The commands in the order of the help, by the title of their group.
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Archives": (package, sign, verify, audit, export),
    "TorchServe": (start, status, stop, add, replace, remove, renew_keys),
    "Our own server": (run,),
    "Requests": (predict,),
    "Measuring": (tune,),
}

for _group, _commands in COMMANDS.items():
    for _command in _commands:
        app.command(cls=PlainCommand, rich_help_panel=_group)(_command)


def main() -> None:
    """Run the command line."""
    app()
