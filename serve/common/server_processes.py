"""Server processes of ours: waited for until they answer, and ended."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil

from serve.runtime.errors import PipelineError

_KILL_TIMEOUT_S = 10.0


def wait_until_ready(
    process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path, *, within_s: float, every_s: float = 0.05
) -> None:
    """Return when a process that was started is ready.

    Args:
        process: it.
        ready: whether it is; where that cannot be asked yet, it may raise what httpx does, or fail to read an answer.
        log: what it writes.
        within_s: seconds to wait.
        every_s: seconds between two questions.

    Raises:
        PipelineError: it has ended, or the time is over; the message has the last line that it wrote.
    """
    until = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, IndexError):
            if ready():
                return
        time.sleep(every_s)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1][:300] if lines else "it wrote nothing"
    raise PipelineError(
        f"the server ended before it was ready: {said}"
        if process.poll() is not None
        else f"the server was not ready after {within_s:.0f} s: {said}"
    )


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants, those first that were started last; empty where it is not there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return [*reversed(first.children(recursive=True)), first]
    return []


def end(processes: Sequence[psutil.Process], *, patience_s: float, ask: bool = True) -> None:
    """Ask processes to end (SIGTERM), and kill those that have not done so in time.

    Args:
        processes: to end; those that are gone already do no harm.
        patience_s: seconds that they get together.
        ask: False where they have been asked, or are to be killed when the time is over.

    Raises:
        PipelineError: one does not end although it was killed.
    """
    for process in processes if ask else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=patience_s)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(left, timeout=_KILL_TIMEOUT_S)
    if left:
        raise PipelineError(f"processes {', '.join(str(process.pid) for process in left)} do not end")
