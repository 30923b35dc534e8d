"""The command ``renew-keys``, for the keys of a store's server."""

from __future__ import annotations

import typer

from serve.cli.shared_arguments import Store
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE


def renew_keys(store: Store = DEFAULT_STORE) -> None:
    """Replace the keys of TorchServe. Clients with the old keys are refused from now on.

    Keys outlive a server, so that a restart does not lock out its clients. If a server is running, its keys and the
    file for curl are replaced at once. Otherwise the next start creates new ones.
    """
    with reported():
        from serve.torchserve import server
        from serve.torchserve.client import HEADER_FILE, KEY_FILE
        from serve.torchserve.state import state_folder

        running = server.running(store)
        if running is not None:
            with running.client(store) as client:
                client.renew_keys()
            typer.echo(f"new keys: {state_folder(store) / KEY_FILE}")
            return
        for name in (KEY_FILE, HEADER_FILE):
            (state_folder(store) / name).unlink(missing_ok=True)
        typer.echo("the next start will create new keys")
