"""Commands for the TorchServe of a store: ``start``, ``add``, ``replace``, ``remove``, ``status``, ``stop``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serve.cli.shared_arguments import (
    Artifacts,
    Data,
    Device,
    ForeignCode,
    RequireKnown,
    RequireSigned,
    Store,
    Targets,
    checked_device,
    serving_options,
    the_running,
)
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE, target
from serve.common.options import ServingOptions
from serve.runtime.errors import UserError
from serve.torchserve.limits import Limits

if TYPE_CHECKING:
    from serve.common.progress import ProgressBar
    from serve.runs.stored_runs import Selection
    from serve.torchserve.state import RunningServer

PORTS = "Ports (on loopback unless --host says otherwise)"
LIMITS = "Limits"

Queue = Annotated[
    int,
    typer.Option(
        help="Requests that may wait for one model in TorchServe; more are refused (503).",
        rich_help_panel=LIMITS,
    ),
]
BodyMb = Annotated[
    int,
    typer.Option(
        help="Largest request body, in MiB; the server refuses larger ones unread (413).", rich_help_panel=LIMITS
    ),
]
HeldMb = Annotated[
    int,
    typer.Option(
        help="Limit of all request bodies together, in MiB; beyond it the server refuses requests unread (503). "
        "Java takes at most 256 MiB plus seven times this.",
        rich_help_panel=LIMITS,
    ),
]
ReceiveS = Annotated[
    int,
    typer.Option(
        help="Seconds in which a request must arrive.",
        rich_help_panel=LIMITS,
    ),
]
DrainS = Annotated[
    int,
    typer.Option(help="Seconds that `stop` waits for accepted requests to finish.", rich_help_panel=LIMITS),
]
Connections = Annotated[
    int,
    typer.Option(help="Maximum number of client connections; more are refused (503).", rich_help_panel=LIMITS),
]
AccessLog = Annotated[
    bool,
    typer.Option(help="Log each request (access_log.log, request_log.log).", rich_help_panel=LIMITS),
]


@serving_options
def start(
    targets: Targets,
    *,
    store: Store = DEFAULT_STORE,
    queue: Queue = Limits.queue,
    body_mb: BodyMb = Limits.body_mb,
    held_mb: HeldMb = Limits.held_mb,
    receive_s: ReceiveS = Limits.receive_s,
    drain_s: DrainS = Limits.drain_s,
    connections: Connections = Limits.connections,
    access_log: AccessLog = Limits.access_log,
    artifact: Artifacts = None,
    require_signed: RequireSigned = None,
    foreign_code: ForeignCode = False,
    require_known: RequireKnown = False,
    data: Data = None,
    strict_start: Annotated[bool, typer.Option("--strict-start", help="Start all of the models, or nothing.")] = False,
    device: Device = "auto",
    host: Annotated[
        str, typer.Option(help="Address for predictions; anything but loopback needs --expose.", rich_help_panel=PORTS)
    ] = "127.0.0.1",
    expose: Annotated[
        bool, typer.Option("--expose", help="Accept connections from other machines, on --host.", rich_help_panel=PORTS)
    ] = False,
    port: Annotated[int, typer.Option(help="Port for predictions.", rich_help_panel=PORTS)] = 8080,
    management_port: Annotated[int, typer.Option(help="Port for management.", rich_help_panel=PORTS)] = 8081,
    metrics_port: Annotated[
        int, typer.Option(help="Port for Prometheus; needs no token.", rich_help_panel=PORTS)
    ] = 8082,
    grpc_inference_port: Annotated[
        int, typer.Option(help="Port for predictions over gRPC.", rich_help_panel=PORTS)
    ] = 7070,
    grpc_management_port: Annotated[
        int, typer.Option(help="Port for management over gRPC.", rich_help_panel=PORTS)
    ] = 7071,
    options: ServingOptions,
) -> None:
    """Start TorchServe with the recommended artifact of each RUN, and return when every model answers.

    The server runs in the background until `serve stop`. A model that cannot be served here, or that dies while it
    loads, is left out and named. A model is called RUN-ARTIFACT, or NAME if you give one.
    """
    with reported("error: interrupted: the server was stopped"):
        from serve.archive.verification import policy_of
        from serve.common.progress import shown
        from serve.packing.pack import repacking
        from serve.runs import stored_runs
        from serve.torchserve import server
        from serve.torchserve.configuration import Ports, check_host

        limits = Limits(queue, body_mb, held_mb, receive_s, drain_s, access_log, connections)
        host = check_host(host, expose=expose)
        selection = _selected(store, targets, artifact, data, device, strict=strict_start)
        if server.running(store) is None:  # the last server may not have stopped in order
            for run in dict.fromkeys(path.parents[1].name for path in selection.archives.values()):
                stored_runs.remove_left(store, run)
        typer.echo(f"starting TorchServe with {len(selection.archives)} model(s) …")
        with shown("start") as bar:
            running = server.start(
                store,
                selection.archives,
                ports=Ports(port, management_port, metrics_port, grpc_inference_port, grpc_management_port),
                host=host,
                limits=limits,
                default_model=selection.default_model,
                gpus=0 if device == "cpu" else None,
                pack=repacking(store, selection, options, device),  # type: ignore[arg-type]
                policy=policy_of(
                    store, require_signed or (), foreign_code=foreign_code, known=require_known, options=options
                ),
                strict=strict_start,
                left_out=selection.left_out,
                on_ready=lambda model: _beside(bar, f"ready: {model}"),
                on_left_out=lambda model, reason: _beside(bar, f"left out: {model} ({reason})"),
                progressed=bar.progressed,
            )
        _tell_unchecked(running, selection.archives)
        if not host.startswith("127."):
            typer.echo(
                f"everyone who can reach http://{host}:{port} can send requests; they need the token, but are not "
                "encrypted: put a proxy with TLS in front. All other ports are on loopback"
            )
        typer.echo(f"metrics: http://127.0.0.1:{metrics_port}/metrics")
        typer.echo(f"stop it with: {target('stop', 'serve stop', store)}")
        typer.echo("try it:")
        typer.echo(f"  {_curl(store, running)}")


@serving_options
def add(
    targets: Targets,
    *,
    store: Store = DEFAULT_STORE,
    artifact: Artifacts = None,
    require_signed: RequireSigned = None,
    foreign_code: ForeignCode = False,
    require_known: RequireKnown = False,
    data: Data = None,
    device: Device = "auto",
    options: ServingOptions,
) -> None:
    """Add models of any run of the store to the running server: all of them, or nothing."""
    with reported():
        from serve.archive.verification import policy_of
        from serve.common.progress import shown
        from serve.packing.pack import repacking
        from serve.torchserve import live_changes

        the_running(store)
        selection = _selected(store, targets, artifact, data, device, strict=True)
        pack = repacking(store, selection, options, device)  # type: ignore[arg-type]
        policy = policy_of(store, require_signed or (), foreign_code=foreign_code, known=require_known, options=options)
        with shown("add") as bar:
            running = live_changes.add(
                store,
                selection.archives,
                pack=pack,
                policy=policy,
                on_ready=lambda model: _beside(bar, f"ready: {model}"),
                progressed=bar.progressed,
            )
        _tell_unchecked(running, selection.archives)


@serving_options
def replace(
    name: Annotated[str, typer.Argument(help="Name of the model, as `serve status` prints it.")],
    target: Annotated[
        str | None,
        typer.Argument(help="RUN/ARTIFACT to serve instead. Default: the same artifact, as it is packed now."),
    ] = None,
    *,
    store: Store = DEFAULT_STORE,
    require_signed: RequireSigned = None,
    foreign_code: ForeignCode = False,
    require_known: RequireKnown = False,
    data: Data = None,
    device: Device = "auto",
    options: ServingOptions,
) -> None:
    """Serve another artifact under the name of a served model, without losing a request.

    Both are in memory for a while. The new one takes the requests as soon as it answers. The old one finishes the
    requests that it accepted, and is then removed. If the new one does not start, the old one stays.
    """
    with reported():
        from serve.archive.verification import policy_of
        from serve.common.progress import shown
        from serve.packing.pack import repacking
        from serve.torchserve import live_changes

        old = the_running(store).model(name)
        word = f"{name}={target or f'{old.run}/{old.artifact}'}"
        selection = _selected(store, [word], None, data, device, strict=True)
        pack = repacking(store, selection, options, device)  # type: ignore[arg-type]
        policy = policy_of(store, require_signed or (), foreign_code=foreign_code, known=require_known, options=options)
        with shown("replace") as bar:
            archive = selection.archives[name]
            running = live_changes.replace(store, name, archive, pack=pack, policy=policy, progressed=bar.progressed)
        new = running.model(name)
        typer.echo(f"replaced: {name} is now {new.run}/{new.artifact}, version {new.version}")
        _tell_unchecked(running, [name])


def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME…", help="Names of the models, as `serve status` prints them.")
    ],
    store: Store = DEFAULT_STORE,
) -> None:
    """Remove models from the running server. They finish their accepted requests first."""
    with reported():
        from serve.common.progress import shown
        from serve.torchserve import live_changes

        default = the_running(store).default_model
        with shown("remove"):
            left = live_changes.remove(store, names)
        typer.echo(f"removed: {', '.join(dict.fromkeys(names))}")
        if left.default_model != default:
            typer.echo(f"the default model is now {left.default_model}")


def status(
    store: Store = DEFAULT_STORE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole status as JSON.")] = False,
) -> None:
    """Show the running server: its models, their workers and engines, and which models and engines were left out.

    The exit code is 0 if every model has a ready worker, else 1.
    """
    with reported():
        from serve.torchserve.health import look

        running = the_running(store)
        with running.client(store) as client:
            health = look(running, client)
            if health.reached:
                client.write_header_file()
        typer.echo(json.dumps(health.to_json(), indent=2) if as_json else health.text())
        if not health.healthy:
            raise typer.Exit(1)


def stop(
    run: Annotated[
        str | None, typer.Argument(help="Stop only if this run is served. Default: stop in any case.")
    ] = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Stop the running server and its workers. Does nothing if none is running.

    The server refuses new requests and finishes the accepted ones first. If a start is in progress, `stop` waits for
    it.
    """
    with reported():
        from serve.common.progress import shown
        from serve.runs.stored_runs import remove_left
        from serve.torchserve import server

        if run is not None and (present := server.running(store)) is not None and run not in present.runs:
            raise UserError(f"the run {' and '.join(present.runs)} is served, not {run!r}; the server keeps running")
        waiting = "another command is starting or changing the server: waiting until it ends, then stopping …"
        with shown("stop") as bar:
            stopped = server.stop(store, lambda: _beside(bar, waiting))
        for served in stopped.runs if stopped else ():
            remove_left(store, served)
        typer.echo(f"stopped: run {', '.join(stopped.runs)}" if stopped else "no server of this store is running")


def _selected(
    store: Path, words: Sequence[str], artifacts: Sequence[str] | None, data: str | None, device: str, *, strict: bool
) -> Selection:
    """Return the selected models, and print those that cannot be served here."""
    from serve.runs import stored_runs

    choice = checked_device(device)
    found = [stored_runs.find_target(word, data) for word in words]
    selection = stored_runs.select(store, found, artifacts or (), choice, strict=strict)
    for name, reason in selection.left_out.items():
        typer.echo(f"left out: {name} ({reason})")
    return selection


def _tell_unchecked(running: RunningServer, names: Collection[str]) -> None:
    """Print the models that are ready without a checked known answer."""
    for model in running.served:
        if model.name in names and model.unchecked:
            typer.echo(f"known answer not checked: {model.name} ({model.unchecked})")


def _beside(bar: ProgressBar, line: str) -> None:
    with bar.aside():
        typer.echo(line)


def _curl(store: Path, running: RunningServer) -> str:
    """Return a curl command that works in any folder.

    It has ``-T``, because ``--data-binary`` declares a web form, which TorchServe parses.
    """
    from serve.runs.stored_runs import sample_image
    from serve.torchserve.client import HEADER_FILE
    from serve.torchserve.state import state_folder

    sample = sample_image(store, running.model(running.default_model).run)
    header = shlex.quote(f"@{state_folder(store) / HEADER_FILE}")
    image = shlex.quote(str(sample.resolve())) if sample is not None else "IMAGE.jpg"
    return f"curl -H {header} -T {image} {running.address}/predictions/{running.default_model}"
