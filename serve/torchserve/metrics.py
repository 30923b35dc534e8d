"""The metrics that the handler reports to TorchServe. This module is packed into the archive beside the handler.

TorchServe's ``metrics.yaml`` says which of them are published: see `serve.torchserve.configuration`.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from serve.runtime.errors import Refusal
from serve.runtime.service.stages import STAGES

if TYPE_CHECKING:
    from ts.metrics.metric_type_enum import MetricTypes

    from serve.runtime.service.pending_request import Answered
    from serve.runtime.service.predictor import Predictor

    _Batch = tuple[list[Answered], list[str]]

_LOG = logging.getLogger(__name__)

# Seconds between the first answer and its metrics. All answers until then are reported together.
_WRITE_DELAY_S = 0.1

# TorchServe splits a line of metrics at these characters, even inside quotes. A value with one of them would lose its
# metric.
_PARTS = re.compile(r"[\s|,:]+")

# Characters of a reason. The whole reason is in the log and in the model's description.
_LONGEST = 200

# QueueTime is one of TorchServe's own metrics.
_METRIC_NAMES = {"queue": "Wait", "infer": "Inference"}

#: The metric of each stage of a request, by the stage's name.
STAGE_METRICS = {stage: f"{_METRIC_NAMES.get(stage, stage.capitalize())}Time" for stage in STAGES}


class Metrics:
    """The metrics of one worker: times of its batches, and refusals. Any thread may add some. A thread writes them."""

    def __init__(self, context: Any, predictor: Predictor) -> None:
        """Report the executions that were passed over.

        Args:
            context: TorchServe's context of this worker. Its metrics store may be set or replaced later.
            predictor: the worker's predictor.
        """
        self._context = context
        self._predictor = predictor
        self._batches: SimpleQueue[_Batch] = SimpleQueue()
        self._pending = threading.Event()
        self._write_lock = threading.Lock()
        if context.metrics is not None:
            self._report_passed_over()

    def begin(self) -> None:
        """Start the thread that writes metrics for as long as the process lives."""
        threading.Thread(target=self._write_metrics, name="metrics", daemon=True).start()

    def add(self, answered: list[Answered], refused: list[str]) -> None:
        """Add a batch: the answers to its valid requests, and a word for each refused one."""
        self._batches.put((answered, refused))
        self._pending.set()

    def tell(self) -> None:
        """Write the metrics of the batches since the last call."""
        with self._write_lock:
            batches: list[_Batch] = []
            with suppress(Empty):
                while True:
                    batches.append(self._batches.get_nowait())
            if batches:
                self._emit(batches)

    def _report_passed_over(self) -> None:
        """Report preferred executions that do not work here, once. A gauge stays until its version is removed.

        A stock TorchServe 0.12 would keep it until it ends; see ``Models.groovy``.
        """
        from ts.metrics.dimension import Dimension
        from ts.metrics.metric_type_enum import MetricTypes

        context = self._context
        for entry in self._predictor.passed_over:
            dimensions = [
                Dimension("ModelName", context.model_name),
                Dimension("ModelVersion", context.manifest["model"]["modelVersion"]),
                Dimension("Level", "Model"),
                Dimension("Execution", _label(entry.execution)),
                Dimension("Reason", _label(entry.reason)),
            ]
            context.metrics.add_metric("PassedOver", 1, "count", dimensions=dimensions, metric_type=MetricTypes.GAUGE)

    def _write_metrics(self) -> None:
        # In a thread, so that answers need not wait. Each value is a line that the worker writes and TorchServe reads,
        # and a batch has eight (0.3 ms).
        while True:
            self._pending.wait()
            time.sleep(_WRITE_DELAY_S)
            self._pending.clear()
            try:
                self.tell()
            except Exception:  # noqa: BLE001 - the next ones may succeed
                _LOG.exception("some metrics were lost")

    def _emit(self, batches: list[_Batch]) -> None:
        """Write the metrics of some batches. For each stage it is the mean."""
        from ts.metrics.dimension import Dimension
        from ts.metrics.metric_type_enum import MetricTypes

        answered = [entry for read, _ in batches for entry in read]
        outcomes = [outcome for entry in answered for outcome in entry.outcomes]
        kinds = Counter(word for _, refused in batches for word in refused)
        kinds.update(f"item-{entry.status}" for entry in outcomes if isinstance(entry, Refusal))
        values: list[tuple[str, float, str, MetricTypes, str]] = []
        values.append(("Images", len(outcomes), "count", MetricTypes.COUNTER, ""))
        values += [("Refused", count, "count", MetricTypes.COUNTER, kind) for kind, count in kinds.items()]
        if outcomes:
            largest = max(sum(len(entry.outcomes) for entry in read) for read, _ in batches)
            values.append(("BatchSize", largest, "count", MetricTypes.GAUGE, ""))
        if computed := [entry.stages for entry in answered if entry.batch_size > 0]:
            values += [
                (
                    metric,
                    round(sum(getattr(stages, stage) for stages in computed) / len(computed), 3),
                    "ms",
                    MetricTypes.HISTOGRAM,
                    "",
                )
                for stage, metric in STAGE_METRICS.items()
            ]
        for name, value, unit, metric_type, kind in values:
            # Values are matched to the dimensions of metrics.yaml by their order, not by their names.
            dimensions = [
                Dimension("ModelName", self._context.model_name),
                Dimension("Level", "Model"),
                Dimension("Provider", self._predictor.engine.provider),
                Dimension("Execution", _label(self._predictor.execution_name)),
                *([Dimension("Kind", kind)] if kind else []),
            ]
            self._context.metrics.add_metric(name, value, unit, dimensions=dimensions, metric_type=metric_type)


def _label(text: str) -> str:
    """Return a text that TorchServe reads as one value."""
    return _PARTS.sub(" ", text)[:_LONGEST].strip()
