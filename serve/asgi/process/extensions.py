"""What is served beside TorchServe's paths: other protocols and metrics, each added to the application here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve.asgi.process.metrics import Metrics
from serve.asgi.protocols import kserve_v1, oip_routes

if TYPE_CHECKING:
    from serve.asgi.http.application import Application
    from serve.asgi.http.server_settings import Settings
    from serve.asgi.process.metrics_exchange import MetricsExchange


def extend(application: Application, settings: Settings, siblings: MetricsExchange | None = None) -> None:
    """Add every protocol's routes, observers and companions to the application.

    Args:
        application: has TorchServe's paths and the request log.
        settings: how the process serves.
        siblings: the processes that serve the same beside this one, if any do.
    """
    kserve_v1.add_routes(application)
    oip_routes.add_routes(application)
    Metrics(application, siblings)
    if settings.grpc_port is not None:
        from serve.asgi.protocols.grpc_server import GrpcServer  # grpcio takes a tenth of a second, and threads

        GrpcServer(
            application,
            settings.listening,
            port=settings.grpc_port,
            grace_s=settings.drain_s,
            shared=siblings is not None,
        ).attach()
