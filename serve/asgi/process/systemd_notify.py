"""Tells systemd how the process stands: `sd_notify(3)`, of which a datagram on a socket is all there is."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to who started this process, where it asked for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
