"""The settings of the server. Nothing imported here computes, so a parent process can import it cheaply."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from serve.archive.verification import Policy
from serve.asgi.http.call import Limits
from serve.asgi.http.listen_sockets import Listening
from serve.runtime.errors import UserError

# Longest time for any setting: a day. Threads and uvicorn cannot wait without a limit.
_LONGEST_S = 86_400


@dataclass(frozen=True)
class Settings:
    """How the process serves.

    Attributes:
        listening: the address.
        grpc_port: port for gRPC, with the same host and certificate. 0: any free port. None: no gRPC.
        limits: what a client may cost.
        token_file: see `Tokens`. None: no token is needed.
        policy: which archives may be loaded.
        gpu: index of the GPU. None: no GPU.
        leave_out: whether to serve the other models if no engine of one works here.
        slow_s: seconds from which on a request is logged as slow.
        log_requests: whether every request is logged.
        drain_delay_s: seconds from the signal until the server stops listening. Load balancers see in this time that it
            is not ready.
        drain_s: seconds to answer the requests accepted by then.
    """

    listening: Listening = field(default_factory=Listening)
    grpc_port: int | None = None
    limits: Limits = field(default_factory=Limits)
    token_file: Path | None = None
    policy: Policy = field(default_factory=Policy)
    gpu: int | None = None
    leave_out: bool = False
    slow_s: float = 1.0
    log_requests: bool = False
    drain_delay_s: float = 0.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if self.grpc_port is not None and self.listening.path is not None:
            raise UserError("--grpc-port needs an address, but --socket has none: use --host and --port")
        if self.grpc_port is not None and not 0 <= self.grpc_port <= 65535:
            raise UserError(f"--grpc-port must be between 0 and 65535, got {self.grpc_port}")
        if self.grpc_port and self.grpc_port == self.listening.port:
            raise UserError(f"--port and --grpc-port are both {self.grpc_port}: gRPC needs a port of its own")
        for option, seconds in (
            ("--drain-delay", self.drain_delay_s),
            ("--drain-timeout", self.drain_s),
            ("--body-timeout", self.limits.body_s),
        ):
            if not 0 <= seconds <= _LONGEST_S:  # false for nan
                raise UserError(f"{option} must be at most {_LONGEST_S} seconds, got {seconds}")
