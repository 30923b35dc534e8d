"""What is served beside TorchServe's paths: other protocols and metrics, each added to the application here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.asgi.application import Application
    from serve.asgi.process import Settings


def extend(application: Application, settings: Settings) -> None:
    """Add every protocol's routes, observers and companions to the application.

    Args:
        application: has TorchServe's paths and the request log.
        settings: how the process serves.
    """
