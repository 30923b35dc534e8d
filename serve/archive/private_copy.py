"""Private copies of archives and artifact folders, so that nobody can change checked files before their use."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from serve.runtime.card.card import CARD_FILE, read_card
from serve.runtime.card.known_answer import KNOWN_FILE
from serve.runtime.card.serving import SERVING_FILE
from serve.runtime.errors import CardError, UserError

_CHUNK_BYTES = 1 << 20  # bytes


def private_copy(source: Path, into: Path) -> Path:
    """Copy an archive, or the loaded files of an artifact folder, to ``into / source.name``.

    From a folder it copies the card, the files that it names, ``serving.json`` and ``known.json``. It does not copy
    timings, which are later rewritten beside them. It checks only that they are plain files.

    Args:
        source: a ``.mar`` file, or an artifact folder.
        into: a private folder of this user (mode 700).

    Raises:
        UserError: the source does not exist, something cannot be copied, or ``into`` is open to others.
        CardError: there is a link, a pipe or similar among the files, or the folder's card cannot be read.
    """
    found = into.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UserError(
            f"{into}: must belong to this user alone (mode 700); otherwise others could swap the files after the check"
        )
    copy = into / source.name
    if not source.is_dir():
        copy_file(source, copy, follow=True)
        return copy
    copy.mkdir(mode=0o700)
    copy_file(source / CARD_FILE, copy / CARD_FILE)
    beside = (name for name in (SERVING_FILE, KNOWN_FILE) if os.path.lexists(source / name))
    names = [*read_card(copy).files, *beside]
    for name in dict.fromkeys(names):
        copy_file(source / name, copy / name)
    return copy


def copy_file(source: Path, copy: Path, *, follow: bool = False) -> None:
    """Copy one plain file to a new one that only this user can read.

    Args:
        source: the file.
        copy: the new path, where no file may exist.
        follow: whether ``source`` may be a link.

    Raises:
        UserError: a file cannot be read or written.
        CardError: the source is not a plain file.
    """
    # Non-blocking: a pipe at this path would block the start for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        if source.is_symlink() and not follow:
            raise CardError(f"{source}: is a link; an artifact may hold regular files only")
        with os.fdopen(os.open(source, flags), "rb") as reading:
            if not stat.S_ISREG(os.fstat(reading.fileno()).st_mode):
                raise CardError(f"{source}: is not a regular file")
            new = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(new, "wb") as writing:
                shutil.copyfileobj(reading, writing, _CHUNK_BYTES)
    except OSError as error:
        # Errors of reading or writing, for example on a full disk, name no file.
        into = "" if error.filename == str(source) else f" to {copy.parent}"
        raise UserError(f"{source}: cannot be copied{into} ({error.strerror or error})") from None


def remove_copy(copy: Path) -> None:
    """Remove a result of `private_copy`, even if it is incomplete or missing."""
    if copy.is_dir() and not copy.is_symlink():
        shutil.rmtree(copy, ignore_errors=True)
    else:
        copy.unlink(missing_ok=True)
