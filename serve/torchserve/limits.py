"""The limits of a server: requests, their bodies, Java's memory and the size of the logs."""

from __future__ import annotations

from dataclasses import dataclass

from serve.runtime.errors import UserError

MIB = 1 << 20

#: Largest size of a log before it is rotated, and number of rotated logs that are kept.
LOG_FILE_BYTES = 10 * MIB
LOG_FILES_KEPT = 3

# Java without a request: TorchServe 0.12, Netty and Groovy need 60 MiB of heap (measured after a collection).
_HEAP_AT_REST_MIB = 192
_DIRECT_AT_REST_MIB = 64

# A body is in the heap once as received. It is there again in a batch's buffer, which doubles as it grows: old and new.
_HEAP_COPIES = 4
# Outside the heap, a body is in memory while it is received, while a batch is written to a worker, and until freed
# memory is returned. With 2, one in 30 requests of 32 MiB each failed.
_DIRECT_COPIES = 3


@dataclass(frozen=True)
class Limits:
    """The limits of one server.

    Attributes:
        queue: most requests of one model that wait for a worker. Further ones get "queue full" (503).
        body_mb: most MiB of one request's body. A larger one is refused (413) before it is read.
        held_mb: most MiB of all bodies of all models, from their announcement until their answer. Further ones are
            refused before they are read (503) and may try again. So memory does not grow with the product of body,
            queue and models.
        receive_s: most seconds for a request to arrive, and for an idle connection. Then the connection is closed.
        drain_s: most seconds that a stop waits for accepted requests.
        access_log: whether the frontend writes a line for each request, and the worker a line of JSON.
        connections: most open client connections over HTTP. Further ones are refused (503) and may try again.
    """

    queue: int = 1000
    body_mb: int = 32
    held_mb: int = 128
    receive_s: int = 60
    drain_s: int = 60
    access_log: bool = False
    connections: int = 2048

    def __post_init__(self) -> None:
        for option, value, most in (
            ("--queue", self.queue, 1_000_000),
            ("--body-mb", self.body_mb, 1024),
            ("--held-mb", self.held_mb, 65_536),
            ("--receive-s", self.receive_s, 86_400),
            ("--drain-s", self.drain_s, 86_400),
            ("--connections", self.connections, 1_000_000),
        ):
            if not 1 <= value <= most:
                raise UserError(f"{option} must be between 1 and {most}, got {value}")
        if self.held_mb < self.body_mb:
            raise UserError(
                f"--held-mb must be at least --body-mb ({self.body_mb}), so that the largest request fits; got "
                f"{self.held_mb}"
            )

    @property
    def heap_mb(self) -> int:
        """Java's heap (``-Xmx``) in MiB: its size at rest, and Java's copies of the held bodies."""
        return _HEAP_AT_REST_MIB + _HEAP_COPIES * self.held_mb

    @property
    def direct_mb(self) -> int:
        """Java's buffers outside the heap (``-XX:MaxDirectMemorySize``), in MiB."""
        return _DIRECT_AT_REST_MIB + _DIRECT_COPIES * self.held_mb

    def java_options(self) -> list[str]:
        """Return the limits as Java options."""
        return [
            f"-Xmx{self.heap_mb}m",
            f"-XX:MaxDirectMemorySize={self.direct_mb}m",
            # Netty counts its own buffers, with this limit.
            f"-Dio.netty.maxDirectMemory={self.direct_mb * MIB}",
            f"-Dio.grpc.netty.shaded.io.netty.maxDirectMemory={self.direct_mb * MIB}",
            # Else each thread keeps a buffer as large as the largest batch that it ever wrote.
            f"-Djdk.nio.maxCachedBufferSize={MIB}",
            f"-Dserve.body_bytes={self.body_mb * MIB}",
            f"-Dserve.held_bytes={self.held_mb * MIB}",
            f"-Dserve.receive_ms={self.receive_s * 1000}",
            f"-Dserve.connections={self.connections}",
            f"-Dserve.drain_ms={self.drain_s * 1000}",
            f"-Dserve.log_bytes={LOG_FILE_BYTES}",
            f"-Dserve.log_files={LOG_FILES_KEPT}",
            f"-Dserve.access_level={'info' if self.access_log else 'off'}",
        ]
