"""Packs a run's artifacts into archives: all of them, or selected ones with other serving settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from serve.common import layout
from serve.common.options import ServingOptions
from serve.packing.sbom import sbom_path, write_sbom
from serve.runs import sealed_files
from serve.runs.stored_runs import DeviceChoice, Selection, artifact_folders, model_name
from serve.runtime.card.card import read_card, sha256_file
from serve.runtime.engines.base import engines_for
from serve.runtime.errors import UserError
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.staging import Pack
from serve.torchserve.state import ServedModel


def package_run(
    store: Path,
    run: str,
    options: ServingOptions | None = None,
    on_packed: Callable[[Path, float], None] = lambda archive, share: None,
) -> list[Path]:
    """Build an archive of every artifact of a run, each with its bill of materials, and seal them.

    Args:
        store: the folder of the runs.
        run: the run's name.
        options: changes to the run's serving settings.
        on_packed: called with each archive, and the share of the run's bytes that is packed so far.

    Raises:
        UserError: the run is not in the store, has no artifacts, or does not match its sealed list. Or a named engine
            opens none of its artifacts.
        CardError: an artifact's folder is damaged.
    """
    folder = store / run
    artifacts = artifact_folders(store, run)
    if options is not None:
        _check_engines(run, artifacts, options)
    sizes = [sum(file.stat().st_size for file in artifact.iterdir()) for artifact in artifacts]
    packed = []
    with sealed_files.writing(folder):
        sealed_files.require(folder, layout.ARTIFACTS, layout.REPORT_FILE)
        for number, artifact in enumerate(artifacts, 1):
            archive = layout.archive_path(store, run, artifact.name)
            packed.append(build_archive(artifact, archive, model_name=model_name(run, artifact.name), options=options))
            _seal_archive(folder, archive)
            on_packed(archive, sum(sizes[:number]) / sum(sizes))
    return packed


def _seal_archive(folder: Path, archive: Path) -> None:
    """Write the bill of materials of a new archive, and add both to the run's list."""
    digest = sha256_file(archive)
    sealed_files.reseal(folder, [archive, write_bill(folder, archive, digest)], {archive: digest})


def write_bill(folder: Path, archive: Path, digest: str) -> Path:
    """Write the bill of materials of an archive, unless an unchanged one of this archive exists.

    Args:
        folder: the run's folder.
        archive: the archive in it.
        digest: its SHA-256.
    """
    intact = not sealed_files.is_sealed(folder) or sealed_files.holds(
        folder, sbom_path(archive).relative_to(folder).as_posix()
    )
    return write_sbom(archive, digest, keep=intact)


def repacking(store: Path, selection: Selection, options: ServingOptions, device: DeviceChoice = "auto") -> Pack | None:
    """Return a function that packs the selected artifacts with other settings. None: nothing differs.

    Args:
        store: the folder of the runs.
        selection: the models to serve.
        options: the changed settings.
        device: ``cuda`` prefers executions on a GPU.

    Raises:
        UserError: a named engine opens none of them.
    """
    if device == "cuda":
        options = options.on_gpu()
    elif not options.model_fields_set:
        return None
    models = [ServedModel.of(name, path) for name, path in selection.archives.items()]
    folders = {model.name: layout.artifact_folder(store, model.run, model.artifact) for model in models}
    for model in models:
        sealed_files.require(store / model.run, f"{layout.ARTIFACTS}/{model.artifact}")
    if device != "cuda":
        _check_engines(", ".join(dict.fromkeys(model.run for model in models)), list(folders.values()), options)

    def pack(model: str, destination: Path) -> Path:
        return build_archive(folders[model], destination, model_name=model, options=options)

    return pack


def _check_engines(run: str, artifacts: Sequence[Path], options: ServingOptions) -> None:
    """Check that every named engine opens one of the artifacts."""
    if not options.engines:
        return
    opens = {entry.name for artifact in artifacts for entry in engines_for(read_card(artifact))}
    for word in options.engines:
        if word.partition("[")[0] not in opens:
            raise UserError(
                f"{word} cannot open any artifact of {run}; the engines that can are {', '.join(sorted(opens))}"
            )
