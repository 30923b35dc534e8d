"""The sealed list of a run's files, ``files.json``: whoever reads a run checks by it what they read.

It names every file in the run's folder with its SHA-256 and size, and holds its own hash. It is written last, so that
a writer that was killed leaves the list of before, or none: what it has changed by then counts as damaged, and the
next run mends that. Whoever writes into the folder later (`serve package`, `tune`, `profile`) checks what they read and
seals what they wrote. Writers hold the lock of the run (`writing`).

Not listed are the list itself, signatures (which prove themselves), files whose names begin with a dot (they are being
written), tracebacks of stages that failed, what a tuning keeps while it lasts, and exports, which you may edit.
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
    """A run whose files are not those that it was sealed with."""


@dataclass(frozen=True)
class Entry:
    """What the list says of a file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Fault:
    """A file that is not as the list says.

    Attributes:
        name: its path in the run's folder.
        path: where it is.
        reason: what is wrong.
        remedy: what mends it.
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
        folder: the run's.
        known: SHA-256 of files that need not be hashed again.
    """
    _write(folder, {name: _entry(folder / name, known or {}) for name in _names(folder, "")})


def reseal(folder: Path, written: Iterable[Path], known: Mapping[Path, str] | None = None) -> None:
    """Write into the list what was just written into a run's folder, or removed. The caller holds the run's lock.

    Nothing happens where there is no list.

    Args:
        folder: the run's.
        written: the files.
        known: SHA-256 of those that need not be hashed again.

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
    """Hold the lock of a sealed run; waits for whoever is writing its folder."""
    if not (folder / layout.SEAL_FILE).is_file():
        yield
        return
    locks = folder.parent / layout.LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / layout.run_lock(folder.name), thread_local=False):
        yield


def is_sealed(folder: Path) -> bool:
    """Return whether a folder has a list that is whole."""
    try:
        return _entries(folder) is not None
    except SealError:
        return False


def holds(folder: Path, name: str) -> bool:
    """Return whether a folder has a list that is whole, and a file is as it says."""
    return is_sealed(folder) and not faults(folder, [name])


def faults(folder: Path, names: Collection[str]) -> list[Fault]:
    """Find what is not as the list says: changed, missing, or not listed.

    Args:
        folder: the run's.
        names: paths in it, of files, or of folders with all that lies and should lie there.

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
    """Return the paths, in a run's folder, of all files that are listed or lie there.

    Raises:
        SealError: the run has no list, or the list is damaged.
    """
    entries = _entries(folder)
    if entries is None:
        raise _not_sealed(folder)
    return sorted({*entries, *_names(folder, "")})


def require(folder: Path, *names: str) -> None:
    """See that files of a run are as the list says.

    A folder without a list and without a report, such as one of archives that were copied, passes: nothing is known of
    it.

    Args:
        folder: the run's.
        names: as in `faults`.

    Raises:
        SealError: one is not; the message is one line that says what to do.
    """
    if _is_of_no_run(folder):
        return
    found = faults(folder, names)
    if found:
        more = f" (and {len(found) - 1} more: `{_verify(folder)}` names them)" if len(found) > 1 else ""
        raise SealError(f"{found[0]}{more}; {found[0].remedy}")


def read(folder: Path, name: str) -> bytes | None:
    """Read a file of a run and see that it is as the list says.

    Returns:
        Its content; None where there is neither a list nor a report.

    Raises:
        SealError: as `require`.
    """
    if _is_of_no_run(folder):
        return None
    try:
        content = (folder / name).read_bytes()
    except OSError:
        content = None
    require(folder, name)
    return content


def _is_of_no_run(folder: Path) -> bool:
    return not any(os.path.lexists(folder / name) for name in (layout.SEAL_FILE, layout.REPORT_FILE))


def _not_sealed(folder: Path) -> SealError:
    return SealError(
        f"{folder} has no {layout.SEAL_FILE}, which says that it is whole: it was made by an older version, or "
        f"interrupted; {_AGAIN}"
    )


def _verify(folder: Path) -> str:
    return command(f"optimize verify {folder.name}", folder.parent)


def _entries(folder: Path) -> dict[str, Entry] | None:
    """The list; None if there is none."""
    path = folder / layout.SEAL_FILE
    try:
        body = unsealed(path.read_text(encoding="utf-8"))
        if body.get("schema") != _SCHEMA:
            raise SealError(f"{path} is of another version (schema {body.get('schema')}, not {_SCHEMA}); {_AGAIN}")
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
        return Fault(name, path, "is not a file of this run; move it elsewhere", f"or {_AGAIN}")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            reason = "is not a regular file; remove it"
        elif status.st_size != entry.bytes:
            reason = f"corrupted, it has {status.st_size} bytes and not {entry.bytes}"
        elif sha256_file(path) != entry.sha256:
            reason = "corrupted, its SHA-256 is not the one that the run was sealed with"
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
    """Paths, in the run's folder, of the files that are listed of it; those at or below ``name``."""
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
