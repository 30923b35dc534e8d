"""The number of processor cores of this process, by its affinity and the quotas of its control groups."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

#: Files of a control group with its quota and its period, in microseconds. Version 2 has both in one.
_VERSION_2 = ("cpu.max",)
_VERSION_1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def cores() -> int:
    """Return how many cores this process may use, at least 1.

    A quota is rounded up, as in Java and Go: with one and a half cores, two threads compute.
    """
    allowed = len(os.sched_getaffinity(0))
    paid = quota()
    return allowed if paid is None else max(1, min(allowed, math.ceil(paid)))


@functools.cache
def quota() -> float | None:
    """Return the processor time that this process and its control group may use, in cores. None: no quota.

    Containers get a quota by ``docker run --cpus`` or Kubernetes' ``limits.cpu``. It is read once in a process.
    """
    return quota_of(Path("/proc/self"))


def quota_of(process: Path) -> float | None:
    """Return the smallest quota of a process's control group and its parent groups, in cores. None: there is none.

    Args:
        process: the process's folder in /proc. ``cgroup`` and ``mountinfo`` are read.
    """
    found = [quota for folder in _control_groups(process) if (quota := _quota_in(folder)) is not None]
    return min(found, default=None)


def _control_groups(process: Path) -> Iterator[Path]:
    """Yield the folders of the process's control groups that may have a quota, and of their parents."""
    try:
        mounts = (process / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        memberships = (process / "cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for membership in memberships:
        _number, controllers, path = [*membership.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root, mounted in _mounted(mounts, "cgroup" if controllers else "cgroup2"):
            # In a container the mount shows only a part of the tree, and the path may be that of the whole.
            inside = Path("/", path)
            below = inside.relative_to(root) if inside.is_relative_to(root) else Path()
            yield from (mounted / below, *(mounted / parent for parent in below.parents))


def _mounted(mounts: list[str], kind: str) -> Iterator[tuple[str, Path]]:
    """Yield root and mount point of each hierarchy with the cpu controller; see proc_pid_mountinfo(5)."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        where, what = before.split(), after.split()
        if len(where) < 5 or len(what) < 3 or what[0] != kind:
            continue
        if kind == "cgroup2" or "cpu" in what[2].split(","):
            yield _unescaped(where[3]), Path(_unescaped(where[4]))


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _quota_in(folder: Path) -> float | None:
    for names in (_VERSION_2, _VERSION_1):
        try:
            words = [word for name in names for word in (folder / name).read_text(encoding="utf-8").split()]
            amount, period = map(int, words)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if amount > 0 and period > 0:
            return amount / period
    return None
