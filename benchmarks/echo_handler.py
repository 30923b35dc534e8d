"""The floor of TorchServe: a handler that answers two bytes to every request of a batch."""

from __future__ import annotations

from typing import Any


def handle(data: list[Any] | None, context: Any) -> list[bytes]:
    """Answer ``[]`` to each."""
    return [b"[]"] * len(data or ())
