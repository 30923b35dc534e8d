"""Puts a run's folder together: artifacts with their measurements, archives, a sample image."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize.measure.rows import Archive, Machine, Row
from optimize.store.artifact import Artifact
from optimize.store.files import TEMPORARY, write_atomically
from optimize.store.keys import make_key
from optimize.store.objects import Store
from serve import options
from serve.runtime.card import CARD_FILE, sha256_file, write_card
from serve.torchserve import archive, handler


@dataclass(frozen=True)
class Published:
    """A run's rows with the paths of what was published, and the keys of the objects that the run now uses."""

    rows: tuple[Row, ...]
    keys: frozenset[str]


def publish(
    store: Store,
    folder: Path,
    artifacts: Mapping[str, Artifact],
    rows: Sequence[Row],
    *,
    machine: Machine,
    sample: bytes,
) -> Published:
    """Write ``artifacts/``, ``archives/`` and ``sample.<ext>`` of a run, and remove what an earlier run left there.

    The caller holds the lock of the run's name.

    Args:
        store: where the archives are kept as objects.
        folder: the run's folder.
        artifacts: what was made, by name.
        rows: the report's rows, without the archives.
        machine: what they were measured on.
        sample: an encoded image to try the endpoint with.
    """
    keys: set[str] = set()
    published = []
    for row in rows:
        artifact = artifacts.get(row.name)
        if artifact is None or row.file is None:
            published.append(row)
            continue
        target = folder / "artifacts" / artifact.name
        _publish_artifact(store, artifact, target, row.measurements() | {"machine": machine.to_json()})
        key = _publish_archive(store, target, folder)
        path = _archive(folder, artifact.name)
        file = row.file.model_copy(update={"path": str(target / artifact.card.file)})
        archived = Archive(path=str(path), bytes=path.stat().st_size, sha256=sha256_file(path))
        published.append(row.model_copy(update={"file": file, "archive": archived}))
        keys |= {artifact.key, key}
    suffix = "jpg" if sample.startswith(b"\xff\xd8") else "png" if sample.startswith(b"\x89PNG") else "img"
    write_atomically(folder / f"sample.{suffix}", sample)
    _remove_stale(folder, artifacts, f"sample.{suffix}")
    return Published(tuple(published), frozenset(keys))


def _publish_artifact(store: Store, artifact: Artifact, folder: Path, measurements: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in artifact.card.files:
        store.link(artifact.folder / name, folder / name)
    for stray in folder.iterdir():
        if stray.name not in artifact.card.files and stray.name != CARD_FILE:
            _remove(stray)
    write_card(folder, dataclasses.replace(artifact.card, measurements=measurements))


def _publish_archive(store: Store, artifact: Path, folder: Path) -> str:
    """Pack a published artifact through the store and link the archive into the run; returns the object's key."""
    path = _archive(folder, artifact.name)
    card = (artifact / CARD_FILE).read_text(encoding="utf-8")
    key = make_key(archive=path.stem, card=card, code=_serving_code())

    def pack(target: Path) -> None:
        archive.build_archive(artifact, target / path.name, model_name=path.stem)

    store.link(store.obtain(key, pack).folder / path.name, path)
    return key


def _archive(folder: Path, name: str) -> Path:
    return folder / "archives" / f"{folder.name}-{name}.mar"


def _remove_stale(folder: Path, artifacts: Mapping[str, Artifact], sample: str) -> None:
    """Remove what an earlier run of another recipe or data set left under this run's name, or one that was killed."""
    archives = {_archive(folder, name) for name in artifacts}
    stale = [path for path in (folder / "artifacts").iterdir() if path.name not in artifacts]
    stale += [path for path in (folder / "archives").iterdir() if path not in archives]
    stale += [path for path in folder.glob("sample.*") if path.name != sample]
    stale += [path for path in folder.glob(".*") if TEMPORARY.fullmatch(path.name)]
    for path in stale:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@functools.cache
def _serving_code() -> str:
    """SHA-256 of the code that an archive carries or is made by."""
    root = Path(handler.__file__).parents[1]
    files = [
        Path(handler.__file__),
        Path(archive.__file__),
        Path(options.__file__),
        *sorted((root / "runtime").rglob("*.py")),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
