"""Disks that are full: a small one for a command, where this user may mount it; or a limit on every file."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o "size=$1,mode=700" tmpfs "$2" && shift 2 && exec "$@"'


def on_small_disk(size: int, folder: Path) -> list[str]:
    """What a command begins with, so that ``folder`` is an empty disk of so many bytes for it; nobody else sees it.

    The test is skipped where this user may not mount anything.
    """
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh", str(size), str(folder)]
    try:
        tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False, timeout=20)
    except FileNotFoundError:
        pytest.skip("no disk can be mounted here: there is no `unshare`")
    if tried.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip()}")
    return words


def as_seen_by(pid: int, folder: Path) -> Path:
    """A folder of a process that has a disk of its own there."""
    return Path(f"/proc/{pid}/root{folder}")


def fill(folder: Path, left: int) -> None:
    """Let so many bytes be free on the disk of ``folder``, or a little less: by the file ``filler``."""
    (folder / "filler").unlink(missing_ok=True)
    found = os.statvfs(folder)
    with (folder / "filler").open("wb") as filler:
        filler.write(bytes(found.f_bavail * found.f_frsize - left))


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Let this process, and what it starts, write no file beyond ``size`` bytes: the write fails (EFBIG).

    Python ignores the signal that comes with it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
