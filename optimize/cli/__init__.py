"""The commands of ``python -m optimize``: a file for each group of commands, a line here for each command. No logic."""

from __future__ import annotations

from collections.abc import Callable

import typer
from typer.core import TyperCommand

from optimize.cli.faults import workarounds
from optimize.cli.int8_commands import certify, lint
from optimize.cli.passes_command import list_passes
from optimize.cli.precision_commands import search, sensitivity
from optimize.cli.profile_command import profile
from optimize.cli.run_commands import compare, run
from optimize.cli.shared_options import ListsData
from optimize.cli.store_commands import list_runs, prune, show, verify
from optimize.training.distributed.first_process import first_alone
from serve.common.command_line import OneLineGroup

app = typer.Typer(
    cls=OneLineGroup,
    help="Turn a trained vision model into measured, deployable artifacts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

#: By name, in the order of the help.
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "list": list_runs,
    "compare": compare,
    "show": show,
    "verify": verify,
    "prune": prune,
    "lint": lint,
    "certify": certify,
    "sensitivity": sensitivity,
    "search": search,
    "profile": profile,
    "passes": list_passes,
    "workarounds": workarounds,
}
_LIST_DATA = {"run", "search"}

for _name, _command in COMMANDS.items():
    app.command(_name, cls=ListsData if _name in _LIST_DATA else TyperCommand)(_command)


def main() -> None:
    """Run the command line. If torchrun started several processes, only the first carries out the command."""
    with first_alone():
        app()
