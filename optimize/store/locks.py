"""The store's locks: exclusive ones by name, and the shared one of everything that uses the store.

The exclusive ones are `filelock`'s. The shared one is a ``flock`` of our own: on Linux filelock (4.2) has a shared
lock only as a SQLite database that its users poll, and this one is held for hours by processes that may be killed.
The kernel releases both with the process, however it ends.
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
    """Hold the lock ``path`` alone; waits for another thread or process that holds it.

    Args:
        path: the lock's file.
        waiting: called once if somebody else holds it.
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
    """Whether nobody holds the exclusive lock ``path``."""
    lock = FileLock(path, thread_local=False)
    try:
        with lock.acquire(blocking=False):
            return True
    except Timeout:
        return False


class Hold:
    """A share of the lock ``path``, from now until `close`, or until nobody has this object any more.

    A child of a fork (a loader's worker) has a share of its own, that ends with it: the lock belongs to the open
    file, which is closed and never unlocked, because unlocking would take it from the parent too. A program that
    is started anew inherits nothing.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Give it back; nothing happens the second time."""
        self._close()


@contextlib.contextmanager
def unshared(path: Path) -> Iterator[bool]:
    """Hold the lock of `Hold` alone, if nobody has a share of it; yields whether that is so, without waiting."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
