"""Measures the share of the cores that other processes take during timing, because a busy machine distorts times."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

#: A turn is repeated, within a budget, if others take more than this share of the cores. /proc/stat counts in
#: hundredths of a second, and a turn takes about twenty of them on each core. So no smaller share can be measured in
#: one turn.
UNSTEADY: Final = 0.2
#: Speeds are provisional if others take more than this share of the cores over all turns.
BUSY: Final = 0.1

_TICKS: Final = os.sysconf("SC_CLK_TCK")
# Fields of a line of /proc/stat (proc(5)): user, nice, system, irq, softirq and steal. Idle time and waiting for disks
# do not count.
_BUSY_FIELDS: Final = (1, 2, 3, 6, 7, 8)


@dataclass(frozen=True)
class Disturbance:
    """The share of the cores that others took during timing. See `optimize.measure.rows.Measurement`."""

    others: float | None = None
    busiest: float | None = None
    clocks: tuple[int, int] | None = None
    warning: str = ""


def disturbance(shares: Iterable[float | None], clocks: Iterable[float | None], remedy: str) -> Disturbance:
    """Summarise the share that others took, the clocks of the cores, and whether the speeds are provisional.

    Args:
        shares: the result of `Watch.others` for each turn.
        clocks: the result of `Watch.clock` after each turn.
        remedy: a few words on how to measure again.
    """
    known = [share for share in shares if share is not None]
    read = [clock for clock in clocks if clock is not None]
    range_read = (round(min(read)), round(max(read))) if read else None
    if not known:
        return Disturbance(clocks=range_read)
    others, busiest = statistics.fmean(known), max(known)
    warning = ""
    if others > BUSY:
        warning = (
            f"Provisional: other processes used {others:.0%} of the cores while speeds were measured, more than "
            f"{BUSY:.0%}. On a quiet machine, {remedy}."
        )
    return Disturbance(round(others, 4), round(busiest, 4), range_read, warning)


class Watch:
    """Measures the share of the cores that other processes take. Use it from one thread.

    It looks at the cores that this process may use. Work of this process and of the given ones does not count. Time
    that a hypervisor takes does.

    Args:
        own: ids of the processes whose work is timed.
    """

    #: Where the kernel reports the clocks, in kHz.
    clocks: Path = Path("/sys/devices/system/cpu")

    def __init__(self, own: Callable[[], Iterable[int]]) -> None:
        self._own = own
        self._cores = frozenset(os.sched_getaffinity(0))
        self.begin()

    def begin(self) -> None:
        """Start counting."""
        self._began, self._busy, self._ours = time.perf_counter(), self._busy_seconds(), self._our_seconds()

    def others(self) -> float | None:
        """Return the share that others took since `begin`, 0 to 1. None if the system does not report it."""
        busy = self._busy_seconds()
        elapsed = (time.perf_counter() - self._began) * len(self._cores)
        if busy is None or self._busy is None or elapsed <= 0:
            return None
        ours = sum(max(0.0, seconds - self._ours.get(pid, 0.0)) for pid, seconds in self._our_seconds().items())
        return min(1.0, max(0.0, (busy - self._busy - ours) / elapsed))

    def clock(self) -> float | None:
        """Return the mean clock of the cores now, in MHz.

        None if the kernel does not report it, as in virtual machines.
        """
        try:
            read = [
                int(Path(f"{self.clocks}/cpu{core}/cpufreq/scaling_cur_freq").read_text(encoding="ascii"))
                for core in self._cores
            ]
        except (OSError, ValueError):
            return None
        return statistics.fmean(read) / 1e3

    def _busy_seconds(self) -> float | None:
        try:
            lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        ticks = 0
        for line in lines:
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cores:
                ticks += sum(int(fields[number - 1]) for number in _BUSY_FIELDS if number <= len(fields))
        return ticks / _TICKS

    def _our_seconds(self) -> dict[int, float]:
        """Return the processor time of each of our processes, by its id."""
        found = {os.getpid(): time.process_time()}
        for pid in self._own():
            with contextlib.suppress(psutil.Error):  # the process has ended
                spent = psutil.Process(pid).cpu_times()
                found[pid] = spent.user + spent.system
        return found
