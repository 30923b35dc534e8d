"""Measures a program's time as a share of another's, in one execution.

Each program has its own process, and takes turns with the first. Nothing is kept in the store here: the caller keeps
its own conclusion.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from optimize.context import Context
from optimize.measure.latency import measure_speed
from optimize.measure.process_pool import Pool
from optimize.measure.processes import Worker
from optimize.measure.timing import Timing
from optimize.statistics import RatioInterval, ratio_interval
from serve.runtime.card.execution import Execution
from serve.runtime.errors import PipelineError

_WHOLE, _OTHER = "whole", "other"


class Shares:
    """Compares the times of programs with that of a whole.

    A context manager that ends its processes. Use it from one thread.

    Args:
        whole: folder of the artifact that others are compared with; see `Worker.open`.
        execution: the execution that runs them.
        context: the run's context. The images are its training images.
        batch: images per call.
        timing: rounds and length of turns. Its batch sizes are ignored.
    """

    def __init__(self, whole: Path, execution: Execution, context: Context, batch: int, timing: Timing) -> None:
        self._whole, self._execution, self._batch, self._timing = whole, execution, batch, timing
        self._images = context.pixels(batch).contiguous()
        self._listener = context.listener
        self._pool = Pool((batch,), batch, context.listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    def of(self, folder: Path) -> RatioInterval:
        """Return the time of the artifact in ``folder`` as a share of the whole's: median over rounds, and interval.

        Raises:
            EngineError: the engine does not work here.
            PipelineError: one of the two cannot be opened, or fails while it is timed.
        """
        failed: list[str] = []
        with self._pool.alone():
            turns = {_WHOLE: self._turns(_WHOLE, self._whole, failed), _OTHER: self._turns(_OTHER, folder, failed)}
            try:
                speeds = measure_speed(turns, self._timing, self._listener, sizes=(self._batch,))
            finally:
                self._pool.release(_OTHER)
        if failed:
            raise PipelineError(failed[0])
        other, whole = (
            [statistics.median(turn) for turn in speeds[name].rounds[self._batch]] for name in (_OTHER, _WHOLE)
        )
        return ratio_interval(other, whole)

    def _turns(self, key: str, folder: Path, failed: list[str]) -> Callable[[int], list[float]]:
        worker: Worker = self._pool.load(key, folder, self._execution).worker
        worker.keep(self._images)
        worker.warm([self._batch])

        def turn(size: int) -> list[float]:
            try:
                return worker.turn(size, self._timing)
            except PipelineError as error:
                failed.append(str(error))
                raise

        return turn
