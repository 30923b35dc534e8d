"""The content-addressed store: folders of files under keys, whole or not there at all.

An object is a folder whose name is a key (the hash of everything that its content depends on) and
whose manifest gives the SHA-256 of each of its files. It is built in a temporary folder and appears
by one rename, so that a process killed at any moment leaves nothing half-written behind a key. Every
time that an object is opened its files are hashed; one that does not match is thrown away and made
again. Locks are ``flock``s: the kernel releases them with the process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize.errors import NotApplicableError
from optimize.store.files import temporary_for, write_json
from serve.hints import command
from serve.runtime.card import sha256_file
from serve.runtime.errors import UserError

_MANIFEST = "object.json"


_IN_USE = "in-use"


_FULL = 16 << 20  # bytes free below which a failed write is a full disk


_SETTLED = 60.0  # seconds after which a temporary folder without a held lock has no owner


@dataclass(frozen=True)
class StoredObject:
    """A whole object: its folder, how many seconds it took to build, and whether it was there already."""

    folder: Path
    seconds: float
    cached: bool


class Store:
    """Objects under ``root/.store`` and runs, which link to them, under ``root/<run>``.

    Raises:
        UserError: ``root`` cannot be created or written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = root / ".store" / "objects"
        self._temporary = root / ".store" / "tmp"
        self._locks = root / ".store" / "locks"
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

    def get(self, key: str) -> Path | None:
        """The folder of a whole object, every file checked; None if it is absent or damaged."""
        folder = self._objects / key
        return folder if folder.is_dir() and fault(folder) is None else None

    def forget(self, key: str) -> None:
        """Remove an object, if it is there, so that it is made again."""
        with contextlib.suppress(FileNotFoundError):
            doomed = self._temporary / f"forgotten-{uuid.uuid4().hex}"
            (self._objects / key).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def obtain(
        self, key: str, build: Callable[[Path], None], waiting: Callable[[], None] | None = None
    ) -> StoredObject:
        """The object under ``key``; built by ``build(folder)`` if it is not there.

        Of two processes that want the same key one builds and the other waits for it.

        Args:
            key: see `make_key`.
            build: writes the object's files into an empty folder; what it raises leaves no trace.
            waiting: called once if another process is building the object.
        """
        if (folder := self.get(key)) is not None:
            return StoredObject(folder, _seconds(folder), cached=True)
        with self.lock(key, waiting):
            if (folder := self.get(key)) is not None:
                return StoredObject(folder, _seconds(folder), cached=True)
            self.forget(key)  # what is left there is damaged; under the lock, so that nobody has just replaced it
            started = time.perf_counter()
            with self.workspace() as temporary:
                content = temporary / "object"
                content.mkdir()
                try:
                    build(content)
                    files = {path.name: sha256_file(path) for path in sorted(content.iterdir())}
                    seconds = time.perf_counter() - started
                    write_json({"key": key, "seconds": seconds, "files": files}, content / _MANIFEST)
                except (NotApplicableError, UserError):
                    raise
                except Exception as error:
                    # torch and safetensors report a full disk as exceptions of their own.
                    if "No space left" in str(error) or shutil.disk_usage(self.root).free < _FULL:
                        raise UserError(no_space(self.root)) from error
                    raise
                content.rename(self._objects / key)
        return StoredObject(self._objects / key, seconds, cached=False)

    @contextlib.contextmanager
    def lock(self, name: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock called ``name``, alone; waits for another process that holds it."""
        with (self._locks / name).open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is not None:
                    waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep `prune` out: what a run has built is not yet named by any report."""
        with (self._locks / _IN_USE).open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A temporary folder on the store's file system, removed at the end, or by the next run if we are killed."""
        folder = self._temporary / uuid.uuid4().hex
        folder.mkdir()
        try:
            with (folder / ".lock").open("w") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
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
            try:
                os.link(source, temporary)
            except OSError:
                shutil.copyfile(source, temporary)
            temporary.replace(destination)
        finally:
            temporary.unlink(missing_ok=True)

    def runs(self) -> list[str]:
        """Names of the runs that have a report, in order."""
        return sorted(path.parent.name for path in self.root.glob("*/report.json"))

    def prune(self) -> tuple[int, int]:
        """Remove every object that no run's ``objects.json`` names; returns how many, and their bytes.

        Raises:
            UserError: a run is using the store, or an ``objects.json`` cannot be read.
        """
        count = size = 0
        with (self._locks / _IN_USE).open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"a run is using the store {self.root}; prune it when the run has ended") from None
            wanted: set[str] = set()
            for path in self.root.glob("*/objects.json"):
                try:
                    wanted.update(json.loads(path.read_text(encoding="utf-8")))
                except (ValueError, TypeError):
                    raise UserError(f"{path} cannot be read; run the model again or remove {path.parent}") from None
            for folder in self._objects.iterdir():
                if folder.name not in wanted:
                    # A hard-linked file frees nothing while a run still shows it.
                    size += sum(path.stat().st_size for path in folder.iterdir() if path.stat().st_nlink == 1)
                    shutil.rmtree(folder, ignore_errors=True)
                    count += 1
        return count, size

    def _sweep(self) -> None:
        """Remove temporary folders whose process is gone."""
        for folder in self._temporary.iterdir():
            with contextlib.suppress(OSError):  # another process may be sweeping too
                if time.time() - folder.stat().st_mtime < _SETTLED:
                    continue  # perhaps just made, its lock not yet taken
                lock = folder / ".lock"
                if lock.exists():
                    with lock.open("r+") as handle:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder, ignore_errors=True)
                elif folder.is_dir():
                    shutil.rmtree(folder, ignore_errors=True)
                else:
                    folder.unlink()


def _seconds(folder: Path) -> float:
    manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    return float(manifest["seconds"])


def no_space(folder: Path) -> str:
    """The one line for a full disk."""
    free = command("optimize prune", folder)
    return f"no space left on the disk of {folder}: free some ({free}), or name another --store"


def fault(folder: Path) -> str | None:
    """What is wrong with an object's folder, in one line; None if it is whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is missing or unreadable"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256_file(path) != expected:
            return f"{name} does not match its SHA-256"
    return None
