"""The store's locks: exclusive locks by name, and a shared lock that every user of the store holds.

The exclusive ones are `filelock`'s. The shared one is a ``flock`` of our own. filelock (4.2) has a shared lock on Linux
only as a SQLite database that its users poll, and this lock is held for hours by processes that may be killed. The
kernel releases both when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock ``path`` alone. Waits for another thread or process that holds it.

    Args:
        path: the lock's file.
        waiting: called once if the lock is held by somebody else.
    """
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if waiting is not None:
            waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def is_free(path: Path) -> bool:
    """Return whether nobody holds the exclusive lock ``path``."""
    lock = FileLock(path, thread_local=False)
    try:
        with lock.acquire(blocking=False):
            return True
    except Timeout:
        return False


class Hold:
    """A share of the lock ``path``, held until `close` or until the object is garbage.

    A forked child (a loader's worker) has its own share, which ends with the child. The lock belongs to the open file.
    The file is closed and never unlocked, because unlocking would take the parent's share too. A newly started program
    inherits nothing.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the share. A second call does nothing."""
        self._close()


@contextlib.contextmanager
def unshared(path: Path) -> Iterator[bool]:
    """Hold the lock of `Hold` alone if nobody has a share of it. Yields whether it succeeded, and does not wait."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
