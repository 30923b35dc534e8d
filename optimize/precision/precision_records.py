"""Results layer by layer, as they are stored and shown. Records only: nothing is measured or worded here.

Accuracies and their differences are fractions, latencies milliseconds at batch 1.
"""

from __future__ import annotations

from typing import Any

from optimize.measure.figures import Difference, Ratio, Record
from optimize.measure.rows import Judgement, RunBy, Skip
from optimize.measure.timing import Timing
from optimize.report.number_format import NONE, number, percent, points
from optimize.tasks.base import find_task

#: Version of ``sensitivity.json`` and ``search.json``.
SCHEMA = 2


class Figure(Record):
    """Accuracy and speed of a trial in one execution.

    ``difference`` is that of the task's score to the float graph, by the same execution on the same images. ``sqnr_db``
    compares the outputs with that graph's (None: they are equal). ``won_ms`` is how much less time an image takes than
    before the quantization in question, measured in common turns.
    """

    score: float
    difference: Difference
    sqnr_db: float | None
    p50: float
    won_ms: float


class Layer(Record):
    """One layer with ``weights`` numbers: quantized ``alone``, and in float with all others quantized (``all_but``).

    Differences and SQNR are to the float graph in both cases. The gain of ``alone`` is against the float graph. The
    gain of ``all_but`` is how much less time the whole takes with this layer quantized as well. A skip says why there
    is no figure.
    """

    name: str
    weights: int
    alone: Figure | Skip
    all_but: Figure | Skip


class _Analysis(Record):
    """The beginning of both documents: the model and its data, and the name of what the network is for."""

    schema_version: int = SCHEMA
    title: str
    task: str

    @property
    def metric(self) -> str:
        """Return the title of the task's score."""
        return find_task(self.task).metric.title


class Sensitivity(_Analysis):
    """How much each layer of a network costs and gains in int8, on ``images`` evaluation images.

    ``whole`` has every layer quantized. ``execution`` runs them all, and is called ``runs_on``. ``config`` has the
    settings of the quantization. ``timing`` and ``cpu`` describe the measurement.
    """

    parent: str
    config: dict[str, Any]
    execution: RunBy
    runs_on: str
    images: int
    score: float
    p50: float
    whole: Figure
    layers: tuple[Layer, ...]
    timing: Timing
    cpu: str

    def _facts(self) -> dict[str, str]:
        return {
            "title": self.title,
            "of": self.parent,
            "by": self.runs_on,
            "layers": str(len(self.layers)),
            "images": f"{self.images:,}",
            "in float": f"{self.metric} {percent(self.score)} %, {number(self.p50, 'ms')}",
            "all in int8": f"{_costs(self.whole)}, {number(self.whole.p50, 'ms')}",
        }

    def _more(self) -> dict[str, str]:
        return {layer.name: f"alone {_costs(layer.alone)}; all but it {_costs(layer.all_but)}" for layer in self.layers}


def _costs(figure: Figure | Skip) -> str:
    """Return the cost of a quantization in points of the score, and its gain in milliseconds."""
    if isinstance(figure, Skip):
        return str(figure)
    return f"{points(figure.difference.delta)} points, {number(figure.won_ms, 'ms')} won"


class Trial(Record):
    """One choice of precisions: ``bits`` of the layers that are not int8, by name.

    ``delta`` is the score minus the baseline's on the images that choose. None: the trial failed. ``holds`` tells
    whether it is within the budget. ``speedup`` is relative to the float graph by the same execution. A trial that
    loses too much is not timed. ``skip`` says why a trial failed, or why one that holds could not be timed.
    """

    number: int
    bits: dict[str, int]
    delta: float | None
    holds: bool
    p50: float | None = None
    speedup: Ratio | None = None
    skip: Skip | None = None


class Budget(Record):
    """The request: the largest loss of accuracy (a fraction), the longest latency (ms), the precisions."""

    max_drop: float
    max_latency_ms: float | None
    bits: tuple[int, ...]


class Found(_Analysis):
    """The result of a search.

    Attributes:
        title: the model and its data.
        task: what the network is for.
        budget: the request.
        method: how it was searched.
        layers: number of layers that can be quantized.
        chose: number of images that chose.
        trials: every measured choice of precisions, in order.
        pair: the chosen pair. None: no trial meets the budget. ``execution`` runs it.
        bits: the chosen precision of every layer.
        p50: its latency.
        judged: its accuracy on the images that had no part in the choice.
        fastest_float: the fastest float execution, a pair or a reference, and its latency.
        why: sentences.
        stages: the stages of a recipe that makes it.
    """

    budget: Budget
    method: str
    layers: int
    chose: int
    trials: tuple[Trial, ...]
    pair: str | None
    execution: RunBy | None
    bits: dict[str, int]
    p50: float | None
    judged: Judgement | None
    fastest_float: str
    fastest_float_p50: float
    why: tuple[str, ...]
    stages: tuple[dict[str, Any], ...]
    timing: Timing
    cpu: str

    def _facts(self) -> dict[str, str]:
        return {
            "title": self.title,
            "chosen": self.pair or "none",
            "p50": number(self.p50, "ms"),
            self.metric: f"{percent(self.judged.score)} %" if self.judged else NONE,
            "fastest float": f"{self.fastest_float}, {number(self.fastest_float_p50, 'ms')}",
            "method": self.method,
            "trials": str(len(self.trials)),
            "layers": str(self.layers),
        }

    def _more(self) -> dict[str, str]:
        wider = ", ".join(f"{name} {bits}" for name, bits in self.bits.items() if bits != 8)
        return {"not int8": wider or NONE, "why": " ".join(self.why)}
