"""A temporary folder of a process that may be killed: the kernel tells the next one that nobody needs it any more."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Locked as long as the process lives that has made the folder. It comes by its name when it is locked already.
_ALIVE = ".alive"


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A private folder (mode 700) in the temporary one, which goes at the end of the block.

    Those that processes of this user have left behind under the same prefix, killed before that, go first. In doubt
    they stay: where there is no lock to be had, or on a file system without any.

    Args:
        prefix: what its name begins with.

    Raises:
        OSError: there is no room for it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_ALIVE}"):
        with suppress(OSError):
            _remove_if_dead(left)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        new = folder / f"{_ALIVE}.new"
        with new.open("w") as held:
            with suppress(OSError):  # a file system without locks
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
