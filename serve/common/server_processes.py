"""Waits until the project's server processes are ready, and ends them."""

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
    """Wait until a started process is ready.

    Args:
        process: the process.
        ready: returns whether it is ready. Before that it may raise httpx's errors, or fail to parse an answer.
        log: file with its output.
        within_s: seconds to wait.
        every_s: seconds between two calls.

    Raises:
        PipelineError: the process has ended, or the time is over. The message has its last line of output.
    """
    until = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, IndexError):
            if ready():
                return
        time.sleep(every_s)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1][:300] if lines else "it printed nothing"
    raise PipelineError(
        f"the server ended before it was ready: {said}"
        if process.poll() is not None
        else f"the server was not ready after {within_s:.0f} s: {said}"
    )


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, newest first. Empty if it does not exist."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return [*reversed(first.children(recursive=True)), first]
    return []


def end(processes: Sequence[psutil.Process], *, patience_s: float, ask: bool = True) -> None:
    """End processes by SIGTERM, and kill those that have not ended in time.

    Args:
        processes: processes to end. Ended ones do not matter.
        patience_s: seconds for all of them together.
        ask: False to send no SIGTERM, because they have it already or need none.

    Raises:
        PipelineError: a killed process does not end.
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
        raise PipelineError(f"processes {', '.join(str(process.pid) for process in left)} did not end")
