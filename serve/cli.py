"""The words of ``python -m serve``: package, start, status, predict, stop. No logic of its own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serve.command_line import OneLineGroup, reported
from serve.hints import DEFAULT_STORE, command, target
from serve.option_words import with_serving_options
from serve.options import ServingOptions
from serve.runtime.errors import PipelineError, UserError

if TYPE_CHECKING:
    from serve.torchserve.server import RunningServer

app = typer.Typer(
    cls=OneLineGroup,
    help="Pack a run's artifacts into TorchServe archives, and serve them on this machine.\n\n"
    "A run is what `python -m optimize run MODEL` leaves in the store. The server listens on loopback only "
    "and asks for a token; its keys, configuration and logs are in STORE/.server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Store = Annotated[Path, typer.Option(help="The folder that holds the runs.", show_default=True)]
Run = Annotated[str, typer.Argument(help="The run's name, or the model that it is of, such as path/to/net.py:build.")]
Data = Annotated[str | None, typer.Option(help="The data that the model's run is on, where RUN is a model.")]


@app.command()
@with_serving_options
def package(run: Run, *, options: ServingOptions, store: Store = DEFAULT_STORE, data: Data = None) -> None:
    """Build an archive (.mar) of every artifact of RUN.

    Each archive is complete in itself: a stock TorchServe 0.12 serves it where this project is not
    installed. The same artifact, served alike, gives the same bytes. What is not given stays as the run decided.
    """
    with reported():
        from serve.runs import find_run, package_run

        for path in package_run(store, find_run(run, data), options):
            typer.echo(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


@app.command()
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
    device: Annotated[
        str, typer.Option(help="cpu (use no GPU), cuda (prefer it) or auto (as each archive prefers).")
    ] = "auto",
    artifact: Annotated[
        list[str] | None,
        typer.Option(help="Serve this artifact, such as ptq; repeatable. Default: all that this machine can run."),
    ] = None,
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
            default_model=selection.default_model,
            gpus=0 if device == "cpu" else None,
            repack=runs.repacking(store, run, selection, options, device),  # type: ignore[arg-type]
            on_ready=lambda model: typer.echo(f"ready: {model}"),
        )
        typer.echo(f"metrics: http://127.0.0.1:{metrics_port}/metrics")
        typer.echo(f"stop it with: {target('stop', 'serve stop', store)}")
        typer.echo("try it:")
        typer.echo(f"  {_curl(store, running, runs.sample_image(store, run))}")


@app.command()
def status(store: Store = DEFAULT_STORE) -> None:
    """Show the running server: its models, their workers, what really executes each, and what it passed over.

    The exit code is 1 when no server of this store is running.
    """
    with reported():
        running = _running(store)
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


@app.command()
def predict(
    image: Annotated[Path, typer.Argument(help="An image file: JPEG, PNG, WebP, BMP, TIFF or GIF.")],
    store: Store = DEFAULT_STORE,
    model: Annotated[str | None, typer.Option(help="Default: the run's recommended artifact.")] = None,
    k: Annotated[int | None, typer.Option(help="How many classes. Default: the archive's own, 5.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the endpoint's answer as it is.")] = False,
) -> None:
    """Send IMAGE to the running server and print its best classes, best first."""
    with reported():
        try:
            data = image.read_bytes()
        except OSError as error:
            raise UserError(f"{image}: cannot be read ({error.strerror})") from None
        running = _running(store)
        name = model or running.default_model
        if name not in running.models:
            raise UserError(f"no model {name!r} is served; there are {', '.join(running.models)}")
        with running.client(store) as client:
            answer = client.predict(name, data, k=k)
        if as_json:
            typer.echo(json.dumps(answer))
            return
        for entry in answer:
            typer.echo(f"{entry['probability']:.4f}  {entry['index']:4d}  {entry['label']}")


@app.command()
def stop(
    run: Annotated[str | None, typer.Argument(help="Stop only if this run is served. Default: whichever is.")] = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Stop the running server and its workers; without one, there is nothing to do."""
    with reported():
        from serve.runs import remove_left
        from serve.torchserve import server

        if run is not None and (present := server.running(store)) is not None and present.run != run:
            raise UserError(f"the run {present.run!r} is served, and not {run!r}; it goes on")
        stopped = server.stop(store)
        if stopped is not None:
            remove_left(store, stopped.run)
        typer.echo(f"stopped: run {stopped.run}" if stopped else "no server of this store is running")


def main() -> None:
    """Run the command line."""
    app()


def _running(store: Path) -> RunningServer:
    from serve.torchserve import server

    running = server.running(store)
    if running is None:
        raise PipelineError(f"no server of {store} is running: start one with `{command('serve start RUN', store)}`")
    return running


def _curl(store: Path, running: RunningServer, sample: Path | None) -> str:
    """A line that works as pasted, in whatever folder.

    ``-T`` and not ``--data-binary``: that one says it is a web form, which TorchServe takes apart.
    """
    from serve.client import HEADER_FILE
    from serve.torchserve.server import state_folder

    header = shlex.quote(f"@{state_folder(store) / HEADER_FILE}")
    image = shlex.quote(str(sample.resolve())) if sample is not None else "IMAGE.jpg"
    return f"curl -H {header} -T {image} http://127.0.0.1:{running.ports.inference}/predictions/{running.default_model}"
