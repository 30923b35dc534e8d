"""Exports a run's artifact for another engine or a cluster. Each target writes its own files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serve.common import layout
from serve.export.base import ExportSettings, Subject, Target, find_target
from serve.runs import sealed_files
from serve.runs.stored_runs import artifact_folders, model_name, recommended_among
from serve.runtime.card.card import CARD_FILE, Card, load_card, read_card
from serve.runtime.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Exported:
    """The written files, and the next steps for the user."""

    files: tuple[Path, ...]
    next_steps: tuple[str, ...]


def export_run(
    store: Path,
    run: str,
    target: str,
    settings: ExportSettings,
    *,
    folder: Path | None = None,
    artifact: str | None = None,
    key: Path | None = None,
    public_key: Path | None = None,
    password: str | None = None,
) -> Exported:
    """Write the files that ``target`` needs to serve an artifact of a run.

    Args:
        store: the folder of the runs.
        run: the run's name.
        target: the target's name.
        settings: how it will run.
        folder: a new or empty folder. None: one in the run's own folder.
        artifact: the artifact. None: the recommended one, or the best that the target opens.
        key: key to sign the packed archive.
        public_key: key to verify it at the target.
        password: password of the key.

    Raises:
        UserError: the target, the run or the artifact is unknown, a given setting has no effect on the target, or the
            folder is not empty.
        CardError: the artifact is damaged.
    """
    chosen = find_target(target)
    _check_useful(chosen, settings, signed=key is not None or public_key is not None)
    folders = artifact_folders(store, run)
    sealed_files.require(store / run, *(f"{layout.ARTIFACTS}/{folder.name}/{CARD_FILE}" for folder in folders))
    cards = {folder.name: read_card(folder) for folder in folders}
    if artifact is not None and artifact not in cards:
        raise UserError(f"{run} has no artifact {artifact!r}{did_you_mean(artifact, cards)}; it has {', '.join(cards)}")
    name = artifact or _best(store, run, cards, chosen.format)
    if chosen.format not in (None, cards[name].format):
        raise UserError(f"{name} is a {cards[name].format} file, but {target} takes only {chosen.format} files")
    source = layout.artifact_folder(store, run, name)
    sealed_files.require(store / run, f"{layout.ARTIFACTS}/{name}")
    folder = folder or store / run / layout.EXPORTS / target
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder}: is not empty; remove it, or choose another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        subject = Subject(model_name(run, name), source, load_card(source), settings, key, public_key, password)
        steps = [line.replace("FOLDER", str(folder)) for line in chosen.write(subject, folder)]
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None
    files = tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
    return Exported(files, tuple(steps))


def _check_useful(target: Target, settings: ExportSettings, *, signed: bool) -> None:
    """Refuse settings that would have no effect.

    Raises:
        UserError: it names them.
    """
    if useless := sorted(target.ignores & settings.model_fields_set):
        raise UserError(f"{target.name} does not support {', '.join(name.replace('_', '-') for name in useless)}")
    if signed and not target.signs:
        raise UserError(f"{target.name} does not use archives, so they cannot be signed or verified")


def _best(store: Path, run: str, cards: dict[str, Card], model_format: str | None) -> str:
    """Return the recommended artifact, or the only one in the target's format."""
    possible = [name for name, card in cards.items() if model_format in (None, card.format)]
    if not possible:
        raise UserError(f"{run} has no {model_format} artifact; it has {', '.join(cards)}")
    if (found := recommended_among(store, run, possible)) is None:
        raise UserError(f"{run} has several suitable artifacts: choose one with --artifact {' or '.join(possible)}")
    return found
