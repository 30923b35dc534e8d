"""The processes of one measurement: one for each execution, opened once and kept until everything is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
from filelock import FileLock, Timeout

from optimize.listener import SILENT, Listener
from optimize.measure import processes
from optimize.measure.figures import Footprint
from optimize.measure.processes import Worker
from serve.runtime.card.execution import Execution
from serve.runtime.errors import EngineError, UserError

#: The lock of all timing on this machine, for all users. It is not in TMPDIR, which differs by user and job. Whoever
#: comes first creates the file, and all others may lock it. Its content means nothing, and filelock does not follow a
#: link there.
LOCK_FILE: Final = Path("/tmp/optimize-measuring.lock")

#: The share of the initially free memory that all processes together may take.
_MOST_MEMORY: Final = 0.7

#: The largest batch when a run's artifacts are measured.
MAX_BATCH = 64


@dataclass(frozen=True)
class Loaded:
    """An artifact in ``folder``, opened in its own process. ``provider`` is the library that executes it."""

    folder: Path
    worker: Worker
    execution: Execution
    provider: str
    footprint: Footprint


class Pool:
    """Opens executions, each in a new process. A context manager that ends them all. Use it from one thread.

    Args:
        sizes: batch sizes to warm up with. Peak memory is measured with the largest.
        max_batch: the largest batch.
        listener: receives a message if another run on this machine must be waited for.
        lock: see `LOCK_FILE`.
    """

    def __init__(
        self, sizes: tuple[int, ...], max_batch: int, listener: Listener = SILENT, lock: Path | None = None
    ) -> None:
        self._sizes = sizes
        self._max_batch = max_batch
        self._listener = listener
        self._lock = FileLock(lock or LOCK_FILE, mode=0o666, thread_local=False)
        self._loaded: dict[str, Loaded] = {}
        self._others: list[Worker] = []
        self._free = psutil.virtual_memory().available
        self._devices: dict[str, Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Whatever is loaded next starts new ones."""
        for worker in (*(loaded.worker for loaded in self._loaded.values()), *self._others, *self._devices.values()):
            worker.close()
        self._loaded, self._others, self._devices = {}, [], {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the machine's lock for timing. Waits for another run that holds it. May be nested.

        Raises:
            UserError: this user cannot lock the file.
        """
        try:
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                self._listener.said("another run is measuring on this machine; waiting for it to end")
                self._lock.acquire()
        except OSError as error:
            raise UserError(
                f"{self._lock.lock_file} cannot be locked ({error.strerror}), by which runs of all users on this "
                "machine are kept from measuring at once: remove it, or let its owner set mode 666"
            ) from None
        try:
            yield
        finally:
            self._lock.release()

    def load(self, key: str, folder: Path, execution: Execution) -> Loaded:
        """Return the process that has the artifact of ``key`` open.

        A new process opens the artifact, warms up, and has its memory measured.

        Raises:
            EngineError: the engine does not work here, or there is too little memory for another process.
            PipelineError: opening it failed.
        """
        if key in self._loaded:
            return self._loaded[key]
        with self.alone():
            worker = processes.worker()
            try:
                loaded = self._load(worker, folder, execution)
            except BaseException:
                worker.close()
                raise
        self._loaded[key] = loaded
        return loaded

    def release(self, key: str) -> None:
        """End the process that has the artifact of this key open, if there is one."""
        if (loaded := self._loaded.pop(key, None)) is not None:
            loaded.worker.close()

    def renew(self, key: str) -> Worker:
        """Open the artifact of this key in a new process after ending the old one. Memory is not measured again.

        Raises:
            PipelineError: opening it failed. The key has no process any more.
        """
        loaded = self._loaded.pop(key)
        loaded.worker.close()
        worker = processes.worker()
        try:
            worker.open(loaded.folder, loaded.execution, self._max_batch)
        except BaseException:
            worker.close()
            raise
        self._loaded[key] = replace(loaded, worker=worker)
        return worker

    def pids(self) -> list[int]:
        """Return the ids of all processes of the pool, except those that measure a device's memory."""
        return [worker.pid for worker in (*(each.worker for each in self._loaded.values()), *self._others)]

    def another(self) -> Worker:
        """Return an empty process, which ends with the others."""
        worker = processes.worker()
        self._others.append(worker)
        return worker

    def _load(self, worker: Worker, folder: Path, execution: Execution) -> Loaded:
        on_cuda = execution.device_type == "cuda"
        # The difference of the device's used memory counts the allocations of all libraries, and the context.
        before = self._used(execution.device) if on_cuda else 0
        provider, load_ms = worker.open(folder, execution, self._max_batch)
        worker.warm(sorted({1, self._sizes[-1]}))
        memory = self._used(execution.device) - before if on_cuda else worker.memory()
        loaded = Loaded(folder, worker, execution, provider, Footprint(load_ms=load_ms, memory_bytes=max(0, memory)))
        if not on_cuda:
            self._must_fit(memory)
        return loaded

    def _must_fit(self, memory: int) -> None:
        """Refuse a process if memory is too small: processes are timed in turns, so all are alive at once."""
        taken = sum(
            loaded.footprint.memory_bytes for loaded in self._loaded.values() if loaded.execution.device_type == "cpu"
        )
        if self._loaded and taken + memory > _MOST_MEMORY * self._free:
            raise EngineError(
                f"its process takes {memory / 1e9:.1f} GB and the {len(self._loaded)} others {taken / 1e9:.1f}, "
                f"more than {_MOST_MEMORY * 100:.0f} % of the {self._free / 1e9:.1f} GB that were free; list fewer "
                "executions under measure in the recipe"
            )

    def _used(self, device: str) -> int:
        """Return the used memory of a CUDA device in bytes, read in a process that does nothing else."""
        if device not in self._devices:
            self._devices[device] = processes.worker()
        return self._devices[device].device_memory(device)
