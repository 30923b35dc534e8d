"""The command ``export``, which writes files for other engines and clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve.cli.shared_arguments import Data, Run, Store
from serve.cli.signatures import PasswordFile, password_in
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE


def export(
    run: Run,
    *,
    to: Annotated[str, typer.Option(help="kubernetes, kserve or triton.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; it must be empty or new. Default: STORE/RUN/export/TO.")
    ] = None,
    artifact: Annotated[
        str | None, typer.Option(help="Artifact to export. Default: the recommended one; for triton an ONNX one.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image of our own server, as the cluster pulls it.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes namespace. Default: default.")] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of a replica, and threads of its engine. Default: 2.")] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Memory limit of a replica, in MiB. Default: 4096.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of a replica: 0 or 1. Default: 0.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Minimum number of replicas. Default: 1.")] = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="Maximum number of replicas. Default: 8, or --replicas.")
    ] = None,
    queue_ms: Annotated[
        int | None,
        typer.Option(help="Add replicas when requests wait longer than this for the engine, on average. Default: 20."),
    ] = None,
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="Sign the archive with this private key.")] = None,
    public_key: Annotated[
        Path | None, typer.Option(help="Public key with which the cluster verifies the archive.")
    ] = None,
    password_file: PasswordFile = None,
    store: Store = DEFAULT_STORE,
    data: Data = None,
) -> None:
    """Write the files that run an artifact of RUN on a cluster or in another server, and print the next steps.

    kubernetes: a deployment of our own server, its network and disruption policies, and the Dockerfile of its image.
    kserve: the same image as a runtime, and an InferenceService. triton: a model repository of an ONNX artifact.
    Nothing is sent anywhere.
    """
    with reported():
        from serve.common.progress import shown
        from serve.export.base import ExportSettings
        from serve.export.run_export import export_run
        from serve.runs.stored_runs import find_run

        given = {
            "image": image,
            "namespace": namespace,
            "cpus": cpus,
            "memory_mb": memory_mb,
            "gpus": gpus,
            "replicas": replicas,
            "max_replicas": max_replicas,
            "queue_ms": queue_ms,
        }
        settings = ExportSettings(**{name: value for name, value in given.items() if value is not None})
        with shown(f"export to {to}"):
            done = export_run(
                store,
                find_run(run, data),
                to,
                settings,
                folder=out,
                artifact=artifact,
                key=sign,
                public_key=public_key,
                password=password_in(password_file),
            )
        for path in done.files:
            typer.echo(path)
        for line in done.next_steps:
            typer.echo(line)
