"""What was found layer by layer, as it is stored and shown. Records only: nothing is measured or worded here.

Accuracies and their differences are fractions, latencies milliseconds at batch 1.
"""

from __future__ import annotations

from typing import Any

from optimize.measure.figures import Difference, Ratio, Record
from optimize.measure.rows import Judgement, RunBy, Skip
from optimize.measure.timing import Timing
from optimize.report.number_format import NONE, number, percent, points

#: Version of ``sensitivity.json`` and ``search.json``.
SCHEMA = 1


class Figure(Record):
    """What a trial answers and how fast it is, by one execution.

    ``difference`` is of top-1, to the float graph by the same execution on the same images; ``sqnr_db`` of the logits,
    to that graph's (None where they are equal). ``won_ms`` is how much less time an image takes than before the
    quantization in question, of turns that were taken together.
    """

    top1: float
    difference: Difference
    sqnr_db: float | None
    p50: float
    won_ms: float


class Layer(Record):
    """One layer of ``weights`` numbers: quantized ``alone``, and quantized beside all others, told by ``all_but`` it.

    ``alone`` is against the float graph. Of ``all_but`` the difference and the SQNR are to the float graph too; what it
    wins is how much less time the whole takes with this layer quantized as well. A skip says why there is no figure.
    """

    name: str
    weights: int
    alone: Figure | Skip
    all_but: Figure | Skip


class Sensitivity(Record):
    """How much each layer of a network costs and wins in int8, on ``images`` evaluation images.

    ``whole`` is with every layer quantized; ``execution`` runs them all, called ``runs_on``; ``config`` are the
    settings of the quantization, ``device`` and ``machine`` what it was measured on.
    """

    schema_version: int = SCHEMA
    title: str
    parent: str
    config: dict[str, Any]
    execution: RunBy
    runs_on: str
    images: int
    top1: float
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
            "in float": f"top-1 {percent(self.top1)} %, {number(self.p50, 'ms')}",
            "all in int8": f"{_costs(self.whole)}, {number(self.whole.p50, 'ms')}",
        }

    def _more(self) -> dict[str, str]:
        return {layer.name: f"alone {_costs(layer.alone)}; all but it {_costs(layer.all_but)}" for layer in self.layers}


def _costs(figure: Figure | Skip) -> str:
    """What a quantization costs in points of top-1, and wins in milliseconds."""
    if isinstance(figure, Skip):
        return str(figure)
    return f"{points(figure.difference.delta)} points, {number(figure.won_ms, 'ms')} won"


class Trial(Record):
    """One choice of precisions: ``bits`` of the layers that are not int8, by name.

    ``delta`` is the difference of top-1 to the baseline on the images that choose, None where it was not made;
    ``holds`` whether that is within the budget. ``speedup`` is to the float graph by the same execution; what loses too
    much is not timed. ``skip`` says why it was not made, or of one that holds why it could not be timed.
    """

    number: int
    bits: dict[str, int]
    delta: float | None
    holds: bool
    p50: float | None = None
    speedup: Ratio | None = None
    skip: Skip | None = None


class Budget(Record):
    """What was asked for: the largest loss of top-1 (a fraction), the longest latency (ms), the precisions."""

    max_drop: float
    max_latency_ms: float | None
    bits: tuple[int, ...]


class Found(Record):
    """What a search found.

    Attributes:
        title: the model and its data.
        budget: what was asked for.
        method: how it was searched.
        layers: how many can be quantized.
        chose: images that it was chosen by.
        trials: every choice of precisions that was measured, in order.
        pair: the chosen pair, None where nothing keeps the budget; ``execution`` is what runs it.
        bits: of every layer, as chosen.
        p50: its latency.
        judged: its accuracy on the images that had no part in the choice.
        fastest_float: the fastest float execution, a pair or a reference, and its latency.
        why: sentences.
        stages: the stages of a recipe that makes it.
    """

    schema_version: int = SCHEMA
    title: str
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
            "top-1": f"{percent(self.judged.top1)} %" if self.judged else NONE,
            "fastest float": f"{self.fastest_float}, {number(self.fastest_float_p50, 'ms')}",
            "method": self.method,
            "trials": str(len(self.trials)),
            "layers": str(self.layers),
        }

    def _more(self) -> dict[str, str]:
        wider = ", ".join(f"{name} {bits}" for name, bits in self.bits.items() if bits != 8)
        return {"not int8": wider or NONE, "why": " ".join(self.why)}
