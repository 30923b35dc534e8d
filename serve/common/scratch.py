"""Temporary folders that the next process can remove if their own process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Locked as long as the folder's process lives. The file gets this name when it is locked already.
_ALIVE = ".alive"


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Yield a private temporary folder (mode 700), which is removed at the end of the block.

    First it removes folders with the same prefix that killed processes of this user left behind. In doubt a folder
    stays, for example on a file system without locks.

    Args:
        prefix: beginning of its name.

    Raises:
        OSError: there is no space for it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_ALIVE}"):
        with suppress(OSError):
            _remove_if_dead(left)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        new = folder / f"{_ALIVE}.new"
        with new.open("w") as held:
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                new.rename(folder / _ALIVE)
            yield folder


def _remove_if_dead(alive: Path) -> None:
    descriptor = os.open(alive, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        folder = alive.parent.lstat()
        if folder.st_uid == os.fstat(descriptor).st_uid == os.geteuid() and not alive.parent.is_symlink():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(alive.parent, ignore_errors=True)
    finally:
        os.close(descriptor)
