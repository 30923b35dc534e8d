"""The content-addressed store: folders of files under keys, each complete or absent.

An object is a folder. Its name is a key: the hash of everything that its content depends on. Its manifest gives the
SHA-256 of each of its files and of itself. An object is built in a temporary folder and appears by one rename, so a
process that is killed leaves nothing half-written under a key. Its files are hashed every time it is opened. A damaged
object is removed and made again. Objects may share files by hard links, which are hashed once for all.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize.errors import NotApplicableError
from optimize.store.atomic_files import temporary_for, write_json
from optimize.store.hashes import Hashes
from optimize.store.locks import Hold, exclusive, is_free
from serve.common import layout
from serve.common.hints import command
from serve.runtime.card.card import sha256_file
from serve.runtime.card.json_documents import sealed, unsealed
from serve.runtime.display import Described
from serve.runtime.errors import UserError

MANIFEST = "object.json"

_FULL = 16 << 20  # a failed write with fewer bytes free than this is reported as a full disk
_SETTLED = 60.0  # a temporary folder that is older, in seconds, and has no held lock has no owner


@dataclass(frozen=True)
class StoredObject:
    """A complete object.

    Attributes:
        folder: its files. Treat it as read-only.
        seconds: how long it took to build.
        cached: whether it already existed.
        created: when it was built, ISO 8601 in UTC, to the second.
        files: SHA-256 of each of its files by name.
    """

    folder: Path
    seconds: float
    cached: bool
    created: str
    files: Mapping[str, str]


class Store(Described):
    """The objects under ``root/.store``, and the runs that link to them under ``root/<run>``.

    Raises:
        UserError: ``root`` cannot be created or written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = root / ".store" / "objects"
        self._temporary = root / ".store" / "tmp"
        self._unfinished = root / ".store" / "unfinished"
        self._locks = root / layout.LOCKS
        self._hashes = Hashes(root / ".store" / "hashes.json")
        weakref.finalize(self, self._hashes.save)
        #: Folder for unnamed files.
        self.scratch = self._temporary
        try:
            for folder in (self._objects, self._temporary, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self._temporary / f"probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except PermissionError:
            raise UserError(f"no permission to write to the store {root}; choose another one with --store") from None
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"the store {root} is not a folder; choose another one with --store") from None
        except OSError as error:  # a read-only or full disk
            raise UserError(
                f"the store {root} cannot be written ({error.strerror}); choose another one with --store"
            ) from None
        self._sweep()

    def _facts(self) -> dict[str, str]:
        return {"root": str(self.root)}

    @property
    def in_use(self) -> Path:
        """Return the path of the lock that prevents `prune` while anybody has a share of it."""
        return self._locks / "in-use"

    @property
    def objects(self) -> Path:
        """Return the folder of the objects."""
        return self._objects

    def unfinished(self, key: str) -> Path:
        """Return the folder for the checkpoints of the object ``key`` while it is made.

        The folder may not exist. It survives the process, and is removed when the object is complete.
        """
        return self._unfinished / key

    def unfinished_work(self) -> list[Path]:
        """Return the folders of objects that were begun and not completed."""
        return sorted(self._unfinished.iterdir()) if self._unfinished.is_dir() else []

    def lock_files(self) -> list[Path]:
        """Return the files of all exclusive locks that were ever taken."""
        return [path for path in self._locks.iterdir() if path != self.in_use]

    def hold(self) -> Hold:
        """Prevent pruning as long as the result lives, because reports do not name all objects."""
        return Hold(self.in_use)

    def open(self, key: str) -> StoredObject | None:
        """Return a complete object after checking every file, or None if it is absent or damaged."""
        return self._found(key)

    def forget(self, key: str) -> None:
        """Remove an object if it exists, so that it is made again."""
        with contextlib.suppress(FileNotFoundError):
            doomed = self._temporary / f"forgotten-{uuid.uuid4().hex}"
            (self._objects / key).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def obtain(
        self,
        key: str,
        build: Callable[[Path], None],
        waiting: Callable[[], None] | None = None,
        *,
        about: str = "",
    ) -> StoredObject:
        """Return the object under ``key``, built by ``build(folder)`` if it does not exist.

        If two processes want the same key, one builds and the other waits.

        Args:
            key: see `optimize.store.keys`.
            build: writes the object's files into an empty folder. If it raises, nothing is kept.
            waiting: called once if another process is building the object.
            about: describes the object to people who prune. It is not part of the object's identity.
        """
        if (found := self._found(key)) is not None:
            return found
        with exclusive(self._locks / key, waiting):
            if (found := self._found(key)) is not None:
                return found
            self.forget(key)  # Whatever is left there is damaged. The lock ensures that nobody has just replaced it.
            with self.workspace() as temporary:
                content = temporary / "object"
                content.mkdir()
                try:
                    manifest = _build(content, key, build, about, self._hashes.of)
                except (NotApplicableError, UserError):
                    raise
                except Exception as error:
                    # torch and safetensors report a full disk as exceptions of their own
                    if "No space left" in str(error) or shutil.disk_usage(self.root).free < _FULL:
                        raise UserError(no_space(self.root)) from error
                    raise
                content.rename(self._objects / key)
            shutil.rmtree(self.unfinished(key), ignore_errors=True)
        return _stored(self._objects / key, manifest, cached=False)

    def _found(self, key: str) -> StoredObject | None:
        folder = self._objects / key
        if not folder.is_dir() or fault(folder, self._hashes.of) is not None:
            return None
        return _stored(folder, _manifest(folder), cached=True)

    def lock(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold the lock ``name`` alone. Waits for another process that holds it."""
        return exclusive(self._locks / name)

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """Yield a temporary folder on the store's file system.

        It is removed at the end, or by a later run if this process is killed.
        """
        folder = self._temporary / uuid.uuid4().hex
        folder.mkdir()
        try:
            with exclusive(folder / ".lock"):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def link(self, source: Path, destination: Path) -> None:
        """Make ``destination`` the same file as ``source``, atomically: a hard link, or a copy across file systems."""
        if destination.exists() and destination.samefile(source):
            return
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_for(destination)
        try:
            with self._hashes.unchanged(source):
                try:
                    os.link(source, temporary)
                except OSError:
                    shutil.copyfile(source, temporary)
                temporary.replace(destination)
        finally:
            temporary.unlink(missing_ok=True)

    def runs(self) -> list[str]:
        """Return the sorted names of the runs that have a report."""
        return sorted(path.parent.name for path in self.root.glob(f"*/{layout.REPORT_FILE}"))

    def _sweep(self) -> None:
        """Remove temporary folders whose process is gone."""
        for folder in self._temporary.iterdir():
            with contextlib.suppress(OSError):  # another process may be sweeping too
                if time.time() - folder.stat().st_mtime < _SETTLED:
                    continue  # it may be new, with its lock not yet taken
                lock = folder / ".lock"
                if not folder.is_dir():
                    folder.unlink()
                elif not lock.exists() or is_free(lock):
                    shutil.rmtree(folder, ignore_errors=True)


def _build(
    content: Path, key: str, build: Callable[[Path], None], about: str, hash_of: Callable[[Path], str]
) -> dict[str, Any]:
    """Build an object in the empty folder ``content``, write its manifest and return it."""
    started = time.perf_counter()
    build(content)
    manifest = {
        "key": key,
        "about": about,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "files": {path.name: hash_of(path) for path in sorted(content.iterdir())},
        "seconds": time.perf_counter() - started,
    }
    write_json(sealed(manifest), content / MANIFEST)
    return manifest


def _manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an object.

    Raises:
        OSError: it cannot be read.
        ValueError: it was changed after it was written, or belongs to another object.
    """
    manifest = unsealed((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["key"] != folder.name:
        raise ValueError("it is another object's")
    return manifest


def _stored(folder: Path, manifest: Mapping[str, Any], *, cached: bool) -> StoredObject:
    return StoredObject(folder, float(manifest["seconds"]), cached, str(manifest["created"]), dict(manifest["files"]))


def no_space(folder: Path) -> str:
    """Return the error message for a full disk, in one line."""
    free = command("optimize prune", folder)
    return f"no space left on the disk of {folder}: free some ({free}), or choose another --store"


def fault(folder: Path, hash_of: Callable[[Path], str] = sha256_file) -> str | None:
    """Describe the damage of an object's folder in one line. None if it is complete."""
    try:
        files: dict[str, str] = _manifest(folder)["files"]
    except (OSError, ValueError) as error:
        return f"{MANIFEST} is missing or damaged ({error})"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if hash_of(path) != expected:
            return f"{name} does not match its SHA-256"
    return None
