"""`Limits` as options of ``start``."""

from __future__ import annotations

from typing import Annotated

import typer

_PANEL = "Limits"

Queue = Annotated[
    int,
    typer.Option(
        help="Most requests of one model that wait; what comes then is answered 503, 'the queue is full: try again'.",
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
        help="Most MiB of all bodies that wait or are answered, of all models together; what comes then is refused "
        "unread (503, 'try again'). Java's heap is 192 MiB and four times this, its other buffers 64 MiB and three "
        "times this, at most.",
        rich_help_panel=_PANEL,
    ),
]
ReceiveS = Annotated[
    int,
    typer.Option(
        help="Most seconds for a request to arrive, and for a connection to be idle; then it is closed.",
        rich_help_panel=_PANEL,
    ),
]
DrainS = Annotated[
    int,
    typer.Option(help="Most seconds that `stop` waits for what was accepted to be answered.", rich_help_panel=_PANEL),
]
Connections = Annotated[
    int,
    typer.Option(
        help="Most connections of clients at once; the next one is told 503, 'try again'.", rich_help_panel=_PANEL
    ),
]
AccessLog = Annotated[
    bool, typer.Option(help="Write a line for each request (logs/access_log.log, rotated).", rich_help_panel=_PANEL)
]
