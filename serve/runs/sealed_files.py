"""The sealed list of a run's files, ``files.json``, by which every reader checks the files.

It names every file in the run's folder with its SHA-256 and size, and has its own hash. It is written last. A killed
writer leaves the old list, or none. The files that it changed then count as damaged, until the next run repairs them.
Later writers (`serve package`, `tune`, `profile`) check the files that they read and seal those that they wrote.
Writers hold the lock of the run (`writing`).

The list leaves out itself, signatures (which prove themselves) and files whose names begin with a dot (they are being
written). It also leaves out tracebacks of failed stages, the state of a running tuning, and exports, which you may
edit.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

from serve.common import layout
from serve.common.hints import command
from serve.runtime.card.card import sha256_file
from serve.runtime.card.json_documents import sealed, unsealed
from serve.runtime.errors import UserError

_SCHEMA = 1
_AGAIN: Final = "run the model again"


class SealError(UserError):
    """A run whose files are not the sealed ones."""


@dataclass(frozen=True)
class Entry:
    """The list's facts about a file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Fault:
    """A file that does not match the list.

    Attributes:
        name: its path in the run's folder.
        path: its full path.
        reason: what is wrong.
        remedy: how to repair it.
    """

    name: str
    path: Path
    reason: str
    remedy: str = _AGAIN

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def seal(folder: Path, known: Mapping[Path, str] | None = None) -> None:
    """Write the list of all files of a run. The caller holds the run's lock.

    Args:
        folder: the run's folder.
        known: SHA-256 of files that need not be hashed again.
    """
    _write(folder, {name: _entry(folder / name, known or {}) for name in _names(folder, "")})


def reseal(folder: Path, written: Iterable[Path], known: Mapping[Path, str] | None = None) -> None:
    """Update the list for files that were just written or removed. The caller holds the run's lock.

    Without a list it does nothing.

    Args:
        folder: the run's folder.
        written: the files.
        known: SHA-256 of files that need not be hashed again.

    Raises:
        SealError: the list is damaged.
    """
    if (entries := _entries(folder)) is None:
        return
    for path in written:
        name = path.relative_to(folder).as_posix()
        if path.is_file():
            entries[name] = _entry(path, known or {})
        else:
            entries.pop(name, None)
    _write(folder, entries)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the lock of a sealed run. This waits for other writers of its folder."""
    if not (folder / layout.SEAL_FILE).is_file():
        yield
        return
    locks = folder.parent / layout.LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / layout.run_lock(folder.name), thread_local=False):
        yield


def is_sealed(folder: Path) -> bool:
    """Whether a folder has an undamaged list."""
    try:
        return _entries(folder) is not None
    except SealError:
        return False


def holds(folder: Path, name: str) -> bool:
    """Whether a folder has an undamaged list that a file matches."""
    return is_sealed(folder) and not faults(folder, [name])


def faults(folder: Path, names: Collection[str]) -> list[Fault]:
    """Return the files that do not match the list: changed, missing, or not listed.

    Args:
        folder: the run's folder.
        names: paths in it, of files, or of folders with all listed and existing files inside.

    Raises:
        SealError: the run has no list, or the list is damaged.
    """
    entries = _entries(folder)
    if entries is None:
        raise _not_sealed(folder)
    found = []
    for name in names:
        listed = {entry for entry in entries if entry == name or entry.startswith(f"{name}/")}
        for file in sorted(listed | set(_names(folder, name))):
            if (fault := _fault(folder, file, entries.get(file))) is not None:
                found.append(fault)
    return found


def names(folder: Path) -> list[str]:
    """Return the paths in a run's folder of all files that are listed or exist.

    Raises:
        SealError: the run has no list, or the list is damaged.
    """
    entries = _entries(folder)
    if entries is None:
        raise _not_sealed(folder)
    return sorted({*entries, *_names(folder, "")})


def require(folder: Path, *names: str) -> None:
    """Check that files of a run match the list.

    A folder without a list and a report passes, for example one of copied archives: nothing is known about it.

    Args:
        folder: the run's folder.
        names: see `faults`.

    Raises:
        SealError: a file does not match. The message is one line with a remedy.
    """
    if _is_no_run(folder):
        return
    found = faults(folder, names)
    if found:
        more = f" (and {len(found) - 1} more: `{_verify(folder)}` lists them)" if len(found) > 1 else ""
        raise SealError(f"{found[0]}{more}; {found[0].remedy}")


def read(folder: Path, name: str) -> bytes | None:
    """Read a file of a run and check that it matches the list.

    Returns:
        Its content. None without a list and a report.

    Raises:
        SealError: see `require`.
    """
    if _is_no_run(folder):
        return None
    try:
        content = (folder / name).read_bytes()
    except OSError:
        content = None
    require(folder, name)
    return content


def _is_no_run(folder: Path) -> bool:
    return not any(os.path.lexists(folder / name) for name in (layout.SEAL_FILE, layout.REPORT_FILE))


def _not_sealed(folder: Path) -> SealError:
    return SealError(f"{folder} has no {layout.SEAL_FILE}, so it is incomplete or from an older version; {_AGAIN}")


def _verify(folder: Path) -> str:
    return command(f"optimize verify {folder.name}", folder.parent)


def _entries(folder: Path) -> dict[str, Entry] | None:
    """Return the list. None if there is none."""
    path = folder / layout.SEAL_FILE
    try:
        body = unsealed(path.read_text(encoding="utf-8"))
        if body.get("schema") != _SCHEMA:
            raise SealError(
                f"{path} was written by another version (schema {body.get('schema')}, not {_SCHEMA}); {_AGAIN}"
            )
        return {name: Entry(entry["sha256"], entry["bytes"]) for name, entry in body["files"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SealError(f"{path} is damaged; {_AGAIN} to rebuild it ({error})") from None


def _write(folder: Path, entries: Mapping[str, Entry]) -> None:
    files = {name: {"sha256": entry.sha256, "bytes": entry.bytes} for name, entry in sorted(entries.items())}
    body: dict[str, Any] = {"schema": _SCHEMA, "files": files}
    path = folder / layout.SEAL_FILE
    temporary = folder / f".{layout.SEAL_FILE}.new"
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(sealed(body), indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _entry(path: Path, known: Mapping[Path, str]) -> Entry:
    return Entry(known.get(path) or sha256_file(path), path.stat().st_size)


def _fault(folder: Path, name: str, entry: Entry | None) -> Fault | None:
    path = folder / name
    if entry is None:
        return Fault(name, path, "does not belong to this run; move it elsewhere", f"or {_AGAIN}")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            reason = "is not a regular file; remove it"
        elif status.st_size != entry.bytes:
            reason = f"corrupted: it has {status.st_size} bytes, not {entry.bytes}"
        elif sha256_file(path) != entry.sha256:
            reason = "corrupted: its SHA-256 differs from the one that the run recorded"
        else:
            return None
    except FileNotFoundError:
        reason = "missing"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    remedy = _AGAIN
    if name.startswith(f"{layout.ARCHIVES}/"):
        package = command(f"serve package {folder.name}", folder.parent)
        reason += f"; `{package}` packs it as the run did"
        remedy = f"or {_AGAIN}"
    return Fault(name, path, reason, remedy)


def _names(folder: Path, name: str) -> Iterator[str]:
    """Yield the paths in the run's folder of the files to list, at or below ``name``."""
    start = folder / name
    if not start.is_dir() or start.is_symlink():
        if os.path.lexists(start) and _is_listed(name):
            yield name
        return
    for root, folders, files in os.walk(start):
        links = [entry for entry in folders if (Path(root) / entry).is_symlink()]
        for file in (*files, *links):
            found = (Path(root) / file).relative_to(folder).as_posix()
            if _is_listed(found):
                yield found


def _is_listed(name: str) -> bool:
    parts = name.split("/")
    if any(part.startswith(".") for part in parts) or parts[0] == layout.EXPORTS or name == layout.SEAL_FILE:
        return False
    if len(parts) == 1 and name.endswith(layout.ERROR_ENDING):
        return False
    return not name.endswith(layout.SIGNATURE_ENDING) and parts[-1] not in layout.TUNING_STATE
