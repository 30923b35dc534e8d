"""The thread that opens, warms and runs an engine. Other threads may run it only while this one waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """A thread that runs jobs one after the other.

    CUDA graphs inside compiled code may not change threads (torch 2.14, pytorch 123177). Each thread that calls libgomp
    has its own team there. Threads of several models take turns at a GPU; see `device_turns`.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon thread: a service that was not closed does not keep the process alive.
        self._thread = threading.Thread(target=self._run_all, name="engine", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Run ``job`` in the thread, after all earlier jobs."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def end(self) -> None:
        """End the thread once all jobs are done, and wait for it."""
        self._jobs.put(None)
        self._thread.join()

    def _run_all(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
                future.set_exception(error)
            del future, job, entry
