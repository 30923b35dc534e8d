"""The command ``run``, which starts the own server."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from serve.cli.shared_arguments import RequireKnown, RequireSigned, Store, checked_device
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE
from serve.runtime.card.execution import ENVIRONMENT
from serve.runtime.errors import UserError

TOKEN_FILE = Path(".run", "tokens")


def run(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[NAME=]RUN[/ARTIFACT]|[NAME=]FILE.mar]…",
            help="What to serve: a run's recommended artifact, another of its artifacts, or an archive.",
            show_default=False,
        ),
    ] = None,
    *,
    store: Store = DEFAULT_STORE,
    models_file: Annotated[
        Path | None,
        typer.Option("--models", help="YAML file of models, their versions and weights; replaces the arguments."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; anything but loopback needs --expose.", show_default="127.0.0.1"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free port.", show_default="8080")] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(help="Port for the Open Inference Protocol over gRPC, on the same host; 0: any free port."),
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(help="Listen on this unix socket instead; only your user can open it.")
    ] = None,
    expose: Annotated[bool, typer.Option("--expose", help="Accept connections from other machines.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of valid tokens, one per line, mode 0600; read again when it changes. Default: a file in the "
            "store, created if there is none."
        ),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Answer requests without a token.")] = False,
    tls_certificate: Annotated[Path | None, typer.Option(help="Certificate chain in PEM; turns on TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key in PEM.")] = None,
    tls_client_authorities: Annotated[
        Path | None, typer.Option(help="Accept only clients with a certificate from these authorities.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu (use no GPU), cuda (require a GPU) or auto.")] = "auto",
    gpu: Annotated[int, typer.Option(min=0, help="Index of the GPU.")] = 0,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that share one port, each with its own engine and a share of the cores. Use several for "
            "a GPU that one process cannot keep busy.",
            show_default="the largest number of workers in the archives",
        ),
    ] = None,
    queue: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that may wait for a model in each process; the server refuses the next one (503).",
            show_default="as each archive says",
        ),
    ] = None,
    body_limit_mb: Annotated[int, typer.Option(min=1, max=1024, help="Largest request body, in MiB.")] = 64,
    held_limit_mb: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Limit of all request bodies and long answers together, in MiB.",
            show_default="512, or more if each process needs it for one largest body",
        ),
    ] = None,
    body_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds in which a request body must arrive.")] = 30.0,
    connections: Annotated[int, typer.Option(min=1, help="Maximum number of open connections.")] = 2048,
    leave_out: Annotated[
        bool, typer.Option("--leave-out", help="Leave out models whose engines do not work here, and serve the others.")
    ] = False,
    slow_ms: Annotated[int, typer.Option(min=0, help="Log requests that take longer than this, in ms.")] = 1000,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log every request.")] = False,
    drain_delay: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds after SIGTERM in which the server reports not ready but still accepts requests."
        ),
    ] = 0.0,
    drain_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to finish accepted requests when the server stops.")
    ] = 30.0,
    require_signed: RequireSigned = None,
    require_known: RequireKnown = False,
) -> None:
    """Serve models with our own server, in the foreground, until SIGTERM or Ctrl-C.

    It answers the paths of TorchServe (/predictions/NAME), of KServe (/v1/models/NAME:predict) and of the Open
    Inference Protocol (/v2/models/NAME/infer, and gRPC with --grpc-port). Prometheus reads /metrics. It is for
    containers and systemd: /health/live and /health/ready, JSON logs on stderr, and tokens from a file. It finishes
    accepted requests before it stops. On SIGHUP it looks for new archives of the runs, or reads the file of --models
    again. It loads the new models beside the old ones and switches over without losing a request.
    """
    # libgomp reads its variables when torch loads it.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with reported():
        from serve.archive.verification import policy_of
        from serve.asgi.http.call import Limits
        from serve.asgi.http.listen_sockets import Listening
        from serve.asgi.http.server_settings import Settings
        from serve.asgi.http.tokens import make_token_file
        from serve.asgi.process.library_output import divert
        from serve.asgi.process.process_group import process_count, run_group
        from serve.asgi.process.serving_plan import Plan
        from serve.runtime.service.logs import log_to_stderr

        if bool(models) == (models_file is not None):
            raise UserError("name what to serve: RUN, RUN/ARTIFACT or FILE.mar, or a file of models with --models")
        checked_device(device)
        if no_token and token_file is not None:
            raise UserError("--no-token and --token-file cannot be used together")
        if socket is not None and port is not None:
            raise UserError("--socket and --port cannot be used together: the server listens on one of them")
        if socket is not None and host is not None and grpc_port is None:
            raise UserError(
                "--host together with --socket applies to gRPC only: add --grpc-port, or leave out one of the two"
            )
        listening = Listening(
            Listening.host if host is None else host,
            Listening.port if port is None else port,
            socket,
            expose,
            tls_certificate,
            tls_key,
            tls_client_authorities,
        )
        divert()
        log_to_stderr()
        plan = Plan(tuple(models or ()), models_file, store, cast(Literal["auto", "cpu", "cuda"], device))
        room = {f"--connections are {connections}": connections}
        if held_limit_mb:
            room[f"--held-limit-mb is {held_limit_mb}"] = held_limit_mb // body_limit_mb
        wanted = plan.read()
        count = processes or process_count(wanted, listening, room, _tell)
        body_bytes = body_limit_mb << 20
        tokens = None if no_token else token_file or store / TOKEN_FILE
        limits = Limits(
            body_bytes=body_bytes,
            held_bytes=held_limit_mb << 20 if held_limit_mb else max(Limits.held_bytes, count * body_bytes),
            body_s=body_timeout,
            connections=connections,
            queue=queue,
        )
        settings = Settings(
            listening=listening,
            grpc_port=grpc_port,
            limits=limits,
            token_file=tokens,
            policy=policy_of(store, require_signed or (), known=require_known),
            gpu=_gpu(device, gpu),
            leave_out=leave_out,
            slow_s=slow_ms / 1e3,
            log_requests=log_requests,
            drain_delay_s=drain_delay,
            drain_s=drain_timeout,
        )
        if tokens is not None and token_file is None and make_token_file(tokens):  # after all checks
            typer.echo(f"created a token in {tokens}", err=True)
        if count > 1:
            status = run_group(count, settings, plan.read, _tell)
        else:
            from serve.asgi.process.server_process import run as serve

            status = serve(settings, plan.read, _tell)
    raise typer.Exit(status)


def _tell(line: str) -> None:
    """Print a line for a person. The server continues if nobody reads it or the disk is full."""
    try:
        typer.echo(line)
    except OSError:
        # The unwritten line stays in the buffer. At exit Python would try again, and end with status 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _has_driver() -> bool:
    """Whether there may be a GPU. torch knows for sure, but its import takes more than a second in a parent process."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return Path("/dev/kfd").exists()  # torch for ROCm calls this CUDA


def _gpu(device: str, index: int) -> int | None:
    """Return the index of the GPU to use. None if there is none, unless the user wants one."""
    if device == "cpu" or (device == "auto" and not _has_driver()):
        return None
    import torch

    if torch.cuda.is_available():
        if index >= torch.cuda.device_count():
            raise UserError(f"--gpu must be below {torch.cuda.device_count()}, got {index}")
        return index
    if device == "cuda":
        raise UserError("--device cuda needs a usable CUDA device, and this machine has none: use --device cpu")
    return None
