"""Notifies systemd of the process's state by a datagram, see `sd_notify(3)`."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send a state, for example ``READY=1``, if the service manager set a socket for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
