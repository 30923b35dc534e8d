"""Adds everything beside TorchServe's paths to the application: other protocols, and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve.asgi.process.metrics import Metrics
from serve.asgi.protocols import kserve_v1, oip_routes

if TYPE_CHECKING:
    from serve.asgi.http.application import Application
    from serve.asgi.http.server_settings import Settings
    from serve.asgi.process.metrics_exchange import MetricsExchange


def extend(application: Application, settings: Settings, siblings: MetricsExchange | None = None) -> None:
    """Add the routes, observers and servers of every other protocol to the application.

    Args:
        application: has TorchServe's paths and the request log.
        settings: how the process serves.
        siblings: the other processes of the same server. None: there are none.
    """
    kserve_v1.add_routes(application)
    oip_routes.add_routes(application)
    Metrics(application, siblings)
    if settings.grpc_port is not None:
        from serve.asgi.protocols.grpc_server import GrpcServer  # grpcio takes 0.1 s, and starts threads

        GrpcServer(
            application,
            settings.listening,
            port=settings.grpc_port,
            grace_s=settings.drain_s,
            shared=siblings is not None,
        ).attach()
