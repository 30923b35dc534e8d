"""Commands for archives: ``package`` and ``audit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve.cli.shared_arguments import Data, Run, Store, serving_options
from serve.cli.signatures import PasswordFile, password_in
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE
from serve.common.options import ServingOptions


@serving_options
def package(
    run: Run,
    *,
    store: Store = DEFAULT_STORE,
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Sign each archive with this private key; see `sign`.")
    ] = None,
    password_file: PasswordFile = None,
    data: Data = None,
    options: ServingOptions,
) -> None:
    """Build an archive (.mar) of every artifact of RUN.

    Each archive is complete: a stock TorchServe 0.12 serves it without this project installed. The same artifact and
    options give the same bytes. Options that you leave out keep the values of the run. A bill of materials (CycloneDX)
    is written beside each archive. It lists the files, the Python packages, the jar of TorchServe with the libraries
    in it, and Java.
    """
    with reported():
        from serve.archive.signature import sign as sign_archive
        from serve.common.progress import shown
        from serve.packing.pack import package_run
        from serve.packing.sbom import sbom_path
        from serve.runs.stored_runs import find_run

        with shown("package") as bar:

            def complete(archive: Path, share: float) -> None:
                made = [f"{archive}  {archive.stat().st_size / 1e6:.1f} MB", f"{sbom_path(archive)}"]
                if sign is not None:
                    made.append(f"{sign_archive(archive, sign, password=password_in(password_file))}")
                with bar.aside():
                    typer.echo("\n".join(made))
                bar.progressed(share, archive.stem)

            package_run(store, find_run(run, data), options, complete)


def audit(
    osv: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Address of the OSV service, or of a mirror of it.", show_default="api.osv.dev"
        ),
    ] = None,
) -> None:
    """Look for known vulnerabilities in the installed Python packages and in the libraries of TorchServe's jar.

    Both checks need a network. The first needs the extra `audit`. The exit code is 1 if a vulnerability is known or a
    check failed, and 2 without the extra.
    """
    with reported():
        from serve.packing.audit import OSV, AuditError, advisories, audit_python, bundled_libraries

        faults = 0
        try:
            report = audit_python()
            typer.echo(f"{report.checked} Python packages checked; unknown to pip-audit: {len(report.skipped)}")
            for line in report.found:
                typer.echo(line)
            faults += len(report.found)
        except AuditError as error:
            typer.echo(f"error: {error}", err=True)
            faults += 1
        try:
            libraries = bundled_libraries()
            unknown = [f"{library.group}:{library.name}" for library in libraries if library.version is None]
            typer.echo(f"TorchServe's jar bundles {len(libraries)} libraries; without a version: {', '.join(unknown)}")
            for advisory in advisories(libraries, osv=osv or OSV):
                faults += 1
                library = advisory.library
                typer.echo(f"{library.group}:{library.name} {library.version}: {advisory.name}")
        except AuditError as error:
            typer.echo(f"error: {error}", err=True)
            faults += 1
        if faults:
            raise typer.Exit(1)
