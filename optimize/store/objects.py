"""The content-addressed store: folders of files under keys, whole or not there at all.

An object is a folder whose name is a key (the hash of everything that its content depends on) and
whose manifest gives the SHA-256 of each of its files, and its own. It is built in a temporary folder and appears
by one rename, so that a process killed at any moment leaves nothing half-written behind a key. Every
time that an object is opened its files are hashed; one that does not match is thrown away and made
again. An object may share files with another, by hard links; those are hashed once for both.
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

_FULL = 16 << 20  # bytes free below which a failed write is a full disk
_SETTLED = 60.0  # seconds after which a temporary folder without a held lock has no owner


@dataclass(frozen=True)
class StoredObject:
    """A whole object.

    Attributes:
        folder: where its files are; treat as read-only.
        seconds: how long it took to build.
        cached: whether it was there already.
        created: when it was built, ISO 8601 in UTC, to the second.
        files: SHA-256 of each of its files by name.
    """

    folder: Path
    seconds: float
    cached: bool
    created: str
    files: Mapping[str, str]


class Store(Described):
    """Objects under ``root/.store`` and runs, which link to them, under ``root/<run>``.

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
        #: Folder for files without a name.
        self.scratch = self._temporary
        try:
            for folder in (self._objects, self._temporary, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self._temporary / f"probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except PermissionError:
            raise UserError(f"no permission to write to the store {root}; name another one with --store") from None
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"the store {root} is not a folder; name another one with --store") from None
        except OSError as error:  # a read-only or full disk
            raise UserError(
                f"the store {root} cannot be written ({error.strerror}); name another one with --store"
            ) from None
        self._sweep()

    def _facts(self) -> dict[str, str]:
        return {"root": str(self.root)}

    @property
    def in_use(self) -> Path:
        """The lock that keeps `pruning` out while anybody has a share of it."""
        return self._locks / "in-use"

    @property
    def objects(self) -> Path:
        """Where the objects' folders are."""
        return self._objects

    def unfinished(self, key: str) -> Path:
        """A folder for what the making of ``key`` wants to find again after it was interrupted.

        It need not be there, outlives the process, and is removed when the object is whole.
        """
        return self._unfinished / key

    def unfinished_work(self) -> list[Path]:
        """The folders of what was begun and is not whole."""
        return sorted(self._unfinished.iterdir()) if self._unfinished.is_dir() else []

    def lock_files(self) -> list[Path]:
        """The exclusive locks that have ever been taken."""
        return [path for path in self._locks.iterdir() if path != self.in_use]

    def hold(self) -> Hold:
        """Keep every object from being pruned as long as the result lives: not all of them are named by a report."""
        return Hold(self.in_use)

    def open(self, key: str) -> StoredObject | None:
        """A whole object, every file checked; None if it is absent or damaged."""
        return self._found(key)

    def forget(self, key: str) -> None:
        """Remove an object, if it is there, so that it is made again."""
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
        """The object under ``key``; built by ``build(folder)`` if it is not there.

        Of two processes that want the same key one builds and the other waits for it.

        Args:
            key: see `optimize.store.keys`.
            build: writes the object's files into an empty folder; what it raises leaves no trace.
            waiting: called once if another process is building the object.
            about: what it is, for people who prune; no part of the object's identity.
        """
        if (found := self._found(key)) is not None:
            return found
        with exclusive(self._locks / key, waiting):
            if (found := self._found(key)) is not None:
                return found
            self.forget(key)  # what is left there is damaged; under the lock, so that nobody has just replaced it
            with self.workspace() as temporary:
                content = temporary / "object"
                content.mkdir()
                try:
                    manifest = _build(content, key, build, about, self._hashes.of)
                except (NotApplicableError, UserError):
                    raise
                except Exception as error:
                    # torch and safetensors report a full disk as exceptions of their own.
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
        """Hold the lock called ``name``, alone; waits for another process that holds it."""
        return exclusive(self._locks / name)

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A temporary folder on the store's file system, removed at the end, or by the next run if we are killed."""
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
        """Names of the runs that have a report, in order."""
        return sorted(path.parent.name for path in self.root.glob(f"*/{layout.REPORT_FILE}"))

    def _sweep(self) -> None:
        """Remove temporary folders whose process is gone."""
        for folder in self._temporary.iterdir():
            with contextlib.suppress(OSError):  # another process may be sweeping too
                if time.time() - folder.stat().st_mtime < _SETTLED:
                    continue  # perhaps just made, its lock not yet taken
                lock = folder / ".lock"
                if not folder.is_dir():
                    folder.unlink()
                elif not lock.exists() or is_free(lock):
                    shutil.rmtree(folder, ignore_errors=True)


def _build(
    content: Path, key: str, build: Callable[[Path], None], about: str, hash_of: Callable[[Path], str]
) -> dict[str, Any]:
    """Build an object in the empty folder ``content`` and seal it with its manifest, which is returned."""
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
    """The manifest of an object.

    Raises:
        OSError: it cannot be read.
        ValueError: it was changed after it was written, or is another object's.
    """
    manifest = unsealed((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["key"] != folder.name:
        raise ValueError("it is another object's")
    return manifest


def _stored(folder: Path, manifest: Mapping[str, Any], *, cached: bool) -> StoredObject:
    return StoredObject(folder, float(manifest["seconds"]), cached, str(manifest["created"]), dict(manifest["files"]))


def no_space(folder: Path) -> str:
    """The one line for a full disk."""
    free = command("optimize prune", folder)
    return f"no space left on the disk of {folder}: free some ({free}), or name another --store"


def fault(folder: Path, hash_of: Callable[[Path], str] = sha256_file) -> str | None:
    """What is wrong with an object's folder, in one line; None if it is whole."""
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
