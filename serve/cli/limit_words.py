"""`Limits` as options of ``start``."""

from __future__ import annotations

from typing import Annotated

import typer

_PANEL = "Limits"

Queue = Annotated[
    int,
    typer.Option(
        help="Most requests of one model that wait in TorchServe; the next is told 503.",
        rich_help_panel=_PANEL,
    ),
]
BodyMb = Annotated[
    int,
    typer.Option(help="Most MiB of a request's body; larger ones are refused unread (413).", rich_help_panel=_PANEL),
]
HeldMb = Annotated[
    int,
    typer.Option(
        help="Most MiB of all bodies that wait or are answered; what comes then is refused unread (503). Java's heap "
        "is 192 MiB and four times this, its other buffers 64 MiB and three times this, at most.",
        rich_help_panel=_PANEL,
    ),
]
ReceiveS = Annotated[
    int,
    typer.Option(
        help="Most seconds until a request has arrived; an idle connection is closed then.",
        rich_help_panel=_PANEL,
    ),
]
DrainS = Annotated[
    int,
    typer.Option(help="Most seconds that `stop` waits for what was accepted to be answered.", rich_help_panel=_PANEL),
]
Connections = Annotated[
    int,
    typer.Option(help="Most connections of clients; the next is told 503.", rich_help_panel=_PANEL),
]
AccessLog = Annotated[
    bool,
    typer.Option(help="Log each request (access_log.log, request_log.log).", rich_help_panel=_PANEL),
]
