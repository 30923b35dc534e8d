"""Commands about the TorchServe of a store: ``start``, ``status``, ``stop``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serve.cli.limit_words import AccessLog, BodyMb, DrainS, HeldMb, Queue, ReceiveS
from serve.cli.words import Data, ForeignCode, RequireSigned, Run, Store, the_running
from serve.command_line import reported
from serve.hints import DEFAULT_STORE, target
from serve.option_words import with_serving_options
from serve.options import ServingOptions
from serve.runtime.errors import UserError
from serve.torchserve.limits import Limits

if TYPE_CHECKING:
    from serve.torchserve.server import RunningServer


@with_serving_options
def start(
    run: Run,
    *,
    options: ServingOptions,
    store: Store = DEFAULT_STORE,
    port: Annotated[int, typer.Option(help="Port of the predictions.")] = 8080,
    management_port: Annotated[int, typer.Option(help="Port of the descriptions and worker counts.")] = 8081,
    metrics_port: Annotated[int, typer.Option(help="Port of the Prometheus metrics (asks for no token).")] = 8082,
    grpc_inference_port: Annotated[int, typer.Option(help="Port of the predictions over gRPC.")] = 7070,
    grpc_management_port: Annotated[int, typer.Option(help="Port of the management over gRPC.")] = 7071,
    queue: Queue = Limits.queue,
    body_mb: BodyMb = Limits.body_mb,
    held_mb: HeldMb = Limits.held_mb,
    receive_s: ReceiveS = Limits.receive_s,
    drain_s: DrainS = Limits.drain_s,
    access_log: AccessLog = Limits.access_log,
    device: Annotated[
        str, typer.Option(help="cpu (use no GPU), cuda (prefer it) or auto (as each archive prefers).")
    ] = "auto",
    artifact: Annotated[
        list[str] | None,
        typer.Option(help="Serve this artifact, such as ptq; repeatable. Default: all that this machine can run."),
    ] = None,
    require_signed: RequireSigned = None,
    foreign_code: ForeignCode = False,
    data: Data = None,
) -> None:
    """Start TorchServe with RUN's archives and return when every model answers.

    It goes on in the background until `python -m serve stop`. What cannot run on this machine is left
    out, and named. If a worker dies while it loads, its last lines are shown and all is stopped again.
    Where something is to be served otherwise than its archive says, it is packed anew for this server alone.
    """
    with reported("error: interrupted: the server was stopped"):
        from serve import runs
        from serve.torchserve import server
        from serve.torchserve.configuration import Ports
        from serve.verified import policy_of

        limits = Limits(queue, body_mb, held_mb, receive_s, drain_s, access_log)
        if device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device must be auto, cpu or cuda, got {device!r}")
        run = runs.find_run(run, data)
        selection = runs.select(store, run, artifact or (), device)  # type: ignore[arg-type]
        if server.running(store) is None:  # one before it may not have stopped in order
            runs.remove_left(store, run)
        for name, reason in selection.left_out.items():
            typer.echo(f"left out: {name} ({reason})")
        typer.echo(f"starting TorchServe with {len(selection.archives)} model(s) …")
        running = server.start(
            store,
            run,
            selection.archives,
            ports=Ports(port, management_port, metrics_port, grpc_inference_port, grpc_management_port),
            limits=limits,
            default_model=selection.default_model,
            gpus=0 if device == "cpu" else None,
            repack=runs.repacking(store, run, selection, options, device),  # type: ignore[arg-type]
            policy=policy_of(store, require_signed or (), foreign_code=foreign_code),
            on_ready=lambda model: typer.echo(f"ready: {model}"),
        )
        typer.echo(f"metrics: http://127.0.0.1:{metrics_port}/metrics")
        typer.echo(f"stop it with: {target('stop', 'serve stop', store)}")
        typer.echo("try it:")
        typer.echo(f"  {_curl(store, running, runs.sample_image(store, run))}")


def status(store: Store = DEFAULT_STORE) -> None:
    """Show the running server: its models, their workers, what really executes each, and what it passed over.

    The exit code is 1 when no server of this store is running.
    """
    with reported():
        running = the_running(store)
        with running.client(store) as client:
            typer.echo(
                f"{client.ping()}: run {running.run}, pid {running.pid}, http://127.0.0.1:{running.ports.inference}"
            )
            for model in running.models:
                workers = client.workers(model)
                ready = sum(worker["status"] == "READY" for worker in workers)
                told = client.describe(model) if ready else {}
                default = "  (default)" if model == running.default_model else ""
                typer.echo(
                    f"  {model}: {ready} of {len(workers)} worker(s) ready, "
                    f"{told.get('precision', '?')} by {told.get('execution', '?')} ({told.get('provider', '?')}, "
                    f"threads: {told.get('threads', '?')}){default}"
                )
                for entry in told.get("passed_over", ()):
                    typer.echo(f"    passed over {entry['execution']}: {entry['reason']}")
            client.write_header_file()


def stop(
    run: Annotated[str | None, typer.Argument(help="Stop only if this run is served. Default: whichever is.")] = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Stop the running server and its workers; without one, there is nothing to do.

    What comes is refused, and what was accepted is answered first. A start that is under way is waited for.
    """
    with reported():
        from serve.runs import remove_left
        from serve.torchserve import server

        if run is not None and (present := server.running(store)) is not None and present.run != run:
            raise UserError(f"the run {present.run!r} is served, and not {run!r}; it goes on")
        stopped = server.stop(
            store, lambda: typer.echo("a start (or another stop) is under way: waiting for its end, then stopping …")
        )
        if stopped is not None:
            remove_left(store, stopped.run)
        typer.echo(f"stopped: run {stopped.run}" if stopped else "no server of this store is running")


def _curl(store: Path, running: RunningServer, sample: Path | None) -> str:
    """A line that works as pasted, in whatever folder.

    ``-T`` and not ``--data-binary``: that one says it is a web form, which TorchServe takes apart.
    """
    from serve.client import HEADER_FILE
    from serve.torchserve.server import state_folder

    header = shlex.quote(f"@{state_folder(store) / HEADER_FILE}")
    image = shlex.quote(str(sample.resolve())) if sample is not None else "IMAGE.jpg"
    return f"curl -H {header} -T {image} http://127.0.0.1:{running.ports.inference}/predictions/{running.default_model}"
