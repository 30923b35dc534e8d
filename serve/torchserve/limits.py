"""What a server may hold: requests, their bodies, Java's memory and the logs' bytes, all stated and bounded."""

from __future__ import annotations

from dataclasses import dataclass

from serve.runtime.errors import UserError

MIB = 1 << 20

#: A log is so large at most before it is put aside, and so many are kept of those that were.
LOG_FILE_BYTES = 10 * MIB
LOG_FILES_KEPT = 3

# Java without a request: TorchServe 0.12, Netty and Groovy need 60 MiB of heap (measured after a collection).
_HEAP_AT_REST_MIB = 192
_DIRECT_AT_REST_MIB = 64

# A body lies in the heap once as it came, and in a batch once more, in a buffer that doubles as it grows: old and new.
_HEAP_COPIES = 4
# And outside of it while it is received, while a batch is written to a worker, and while what is freed is not yet given
# back (with 2, one request in 30 of 32 MiB each failed).
_DIRECT_COPIES = 3


@dataclass(frozen=True)
class Limits:
    """What one server may hold.

    Attributes:
        queue: requests of one model that wait for a worker; what comes then is told "queue full" (503).
        body_mb: most MiB of one request's body; what is larger is refused (413) before it is read.
        held_mb: most MiB of all bodies together, of all models, from the moment that they are announced until they are
            answered; what comes then is told to try again (503) before it is read. So memory does not grow with the
            product of body, queue and models.
        receive_s: most seconds for a request to arrive, and for a connection to be idle; then it is closed.
        drain_s: most seconds that stopping waits for what was accepted to be answered.
        access_log: write a line for each request, by the frontend, and one of JSON by the worker that answers it.
        connections: of clients, over HTTP, that are open at once; the next one is told to try again (503).
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
                f"--held-mb must be --body-mb ({self.body_mb}) or more, or the largest request that is allowed would "
                f"never be accepted; got {self.held_mb}"
            )

    @property
    def heap_mb(self) -> int:
        """Java's heap (``-Xmx``), MiB: what it has at rest, and the copies that it makes of what may be held."""
        return _HEAP_AT_REST_MIB + _HEAP_COPIES * self.held_mb

    @property
    def direct_mb(self) -> int:
        """Java's buffers outside the heap (``-XX:MaxDirectMemorySize``), MiB."""
        return _DIRECT_AT_REST_MIB + _DIRECT_COPIES * self.held_mb

    def java_options(self) -> list[str]:
        """The options of Java that say so."""
        return [
            f"-Xmx{self.heap_mb}m",
            f"-XX:MaxDirectMemorySize={self.direct_mb}m",
            # Netty counts its own buffers, by this.
            f"-Dio.netty.maxDirectMemory={self.direct_mb * MIB}",
            f"-Dio.grpc.netty.shaded.io.netty.maxDirectMemory={self.direct_mb * MIB}",
            # Or each thread keeps one as large as the largest batch that it has ever written.
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
