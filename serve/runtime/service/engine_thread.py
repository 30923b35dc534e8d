"""The thread that owns an engine: it is opened, warmed and run there, and elsewhere only while that thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """A thread that runs what it is given, one after the other.

    CUDA graphs inside compiled code may not change threads (torch 2.14, pytorch 123177), and each thread that calls
    libgomp has a team of its own there. Threads of several models take turns at a GPU; see `device_turns`.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon: what was not closed does not keep the process from ending.
        self._thread = threading.Thread(target=self._run_all, name="engine", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Run ``job`` there, after whatever was given before."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def end(self) -> None:
        """End it once all jobs are done, and wait for that."""
        self._jobs.put(None)
        self._thread.join()

    def _run_all(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                future.set_exception(error)
            del future, job, entry
