"""Exports a run's artifact for another engine or a cluster; what is written there is each target's own affair."""

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
    """The files that were written, and what whoever has them does next."""

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
    """Write what ``target`` needs to serve an artifact of a run.

    Args:
        store: holds the run.
        run: its name.
        target: the word for it.
        settings: how it is to be run.
        folder: where to; empty or not there yet. None: in the run's own folder.
        artifact: which; None: the recommended one, or the best that the target opens.
        key: signs the archive that is packed for it.
        public_key: what it is verified with there.
        password: the key's.

    Raises:
        UserError: the target, the run or the artifact is unknown, the target has no use for a setting that is given,
            or something lies in the folder.
        CardError: the artifact is not whole.
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
        raise UserError(f"{name} is a {cards[name].format} file, and {target} is given {chosen.format} files only")
    source = layout.artifact_folder(store, run, name)
    sealed_files.require(store / run, f"{layout.ARTIFACTS}/{name}")
    folder = folder or store / run / layout.EXPORTS / target
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder}: is not empty; remove it, or name another with --out")
        folder.mkdir(parents=True, exist_ok=True)
        subject = Subject(model_name(run, name), source, load_card(source), settings, key, public_key, password)
        steps = [line.replace("FOLDER", str(folder)) for line in chosen.write(subject, folder)]
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None
    files = tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
    return Exported(files, tuple(steps))


def _check_useful(target: Target, settings: ExportSettings, *, signed: bool) -> None:
    """Refuse what would be accepted and do nothing.

    Raises:
        UserError: it names them.
    """
    if useless := sorted(target.ignores & settings.model_fields_set):
        raise UserError(f"{target.name} has no use for {', '.join(name.replace('_', '-') for name in useless)}")
    if signed and not target.signs:
        raise UserError(f"{target.name} is given no archive that could be signed, and verifies none")


def _best(store: Path, run: str, cards: dict[str, Card], model_format: str | None) -> str:
    """The recommended artifact; where the target opens another format only, the only one of it."""
    possible = [name for name, card in cards.items() if model_format in (None, card.format)]
    if not possible:
        raise UserError(f"{run} has no {model_format} artifact; it has {', '.join(cards)}")
    if (found := recommended_among(store, run, possible)) is None:
        raise UserError(f"{run} has several artifacts for this: say --artifact {' or '.join(possible)}")
    return found
