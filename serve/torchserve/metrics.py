"""What the handler tells TorchServe of its batches; it travels in the archive beside the handler.

Which of it TorchServe shows, its ``metrics.yaml`` names: see `serve.torchserve.configuration`.
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

# Metrics are told so long after the first answer that they count, with those of all answers until then.
_TELL_EVERY_S = 0.1

# TorchServe parts a line of metrics at these, whatever is quoted; a value that holds one is lost with its metric.
_PARTS = re.compile(r"[\s|,:]+")

# Characters of a reason: the whole of it is in the log, and in the model's description.
_LONGEST = 200

# QueueTime is one of TorchServe's own metrics.
_SAID_OTHERWISE = {"queue": "Wait", "infer": "Inference"}

#: The metric of each stage of a request, by the stage's name.
STAGE_METRICS = {stage: f"{_SAID_OTHERWISE.get(stage, stage.capitalize())}Time" for stage in STAGES}


class Metrics:
    """Of one worker: what its batches took and what was refused, told behind the answers, from any thread."""

    def __init__(self, context: Any, predictor: Predictor) -> None:
        """Tell what was passed over.

        Args:
            context: TorchServe's, of this worker; what it keeps metrics in may come later, or be another.
            predictor: what answers.
        """
        self._context = context
        self._predictor = predictor
        self._to_tell: SimpleQueue[_Batch] = SimpleQueue()
        self._something_to_tell = threading.Event()
        self._telling = threading.Lock()
        if context.metrics is not None:
            self._tell_passed_over()

    def begin(self) -> None:
        """Tell them from now on, as long as the process lives."""
        threading.Thread(target=self._tell_for_ever, name="metrics", daemon=True).start()

    def add(self, answered: list[Answered], refused: list[str]) -> None:
        """Note a batch: its requests that could be read, and a word for each one that could not."""
        self._to_tell.put((answered, refused))
        self._something_to_tell.set()

    def tell(self) -> None:
        """Write the metrics of the batches since the last time."""
        with self._telling:
            batches: list[_Batch] = []
            with suppress(Empty):
                while True:
                    batches.append(self._to_tell.get_nowait())
            if batches:
                self._emit(batches)

    def _tell_passed_over(self) -> None:
        """Write what would be preferred and does not work here, once: a gauge stands until its version is taken away.

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

    def _tell_for_ever(self) -> None:
        # Beside the answers and not before them: each value is a line that the worker writes and TorchServe reads, and
        # of a batch there are eight (0.3 ms).
        while True:
            self._something_to_tell.wait()
            time.sleep(_TELL_EVERY_S)
            self._something_to_tell.clear()
            try:
                self.tell()
            except Exception:  # noqa: BLE001 - the next ones may be told
                _LOG.exception("metrics were lost")

    def _emit(self, batches: list[_Batch]) -> None:
        """Write the metrics of some batches; of their stages the mean is told."""
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
    """What TorchServe takes for one value."""
    return _PARTS.sub(" ", text)[:_LONGEST].strip()
