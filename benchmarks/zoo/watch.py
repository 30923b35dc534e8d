"""A command under a cap of memory, of all its processes together, and of time."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_EVERY_S = 0.5

# Linux walks all pages of a process to tell its share of them, 0.04 s for 10 GB: what is timed must not feel it.
_SHARE = 0.02


@dataclass(frozen=True)
class Ended:
    """How a command ended: ``reason`` is None if by itself and with 0; ``peak_bytes`` is of all its processes."""

    reason: str | None
    peak_bytes: int
    seconds: float


def run(
    command: Sequence[str], *, memory: int, seconds: float, log: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command; it and all that it started are ended where they have more memory, or take longer.

    Args:
        command: what to run.
        memory: bytes; each process counts with its own and its share of what it has in common with others (PSS).
        seconds: of wall-clock time.
        log: gets what they print.
        environment: of the command; this process's by default.
    """
    begun, peak, reason = time.monotonic(), 0, None
    with log.open("ab") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)
        top = psutil.Process(process.pid)
        known: set[psutil.Process] = {top}
        try:
            while process.poll() is None and reason is None:
                looked = time.monotonic()
                with contextlib.suppress(psutil.NoSuchProcess):
                    known.update(top.children(recursive=True))
                peak = max(peak, used := sum(_memory(each) for each in known))
                if used > memory:
                    reason = f"needed more than {memory / 2**30:.0f} GiB of memory"
                elif time.monotonic() - begun > seconds:
                    reason = f"took more than {seconds / 60:.0f} minutes"
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(_EVERY_S, (time.monotonic() - looked) / _SHARE))
        finally:
            for each in known:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
            psutil.wait_procs(known - {top}, timeout=10)
    if reason is None and process.returncode != 0:
        ended = f"by signal {-process.returncode}" if process.returncode < 0 else f"with code {process.returncode}"
        reason = f"its process ended {ended}: {last_line(log)}"
    return Ended(reason, peak, time.monotonic() - begun)


def _memory(process: psutil.Process) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    return next(_said(log), "it said nothing")


def _said(log: Path) -> Iterator[str]:
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.strip():
            yield line.strip()
