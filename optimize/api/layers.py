"""Layer by layer: the cost of int8, the best precision, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimize.arguments import must_be
from optimize.measure.machine import measured_devices
from optimize.measure.timing import Timing
from optimize.noise import silenced
from optimize.passes.base import find_pass
from optimize.passes.ptq import Ptq
from optimize.precision.precision_records import Found, Sensitivity
from optimize.precision.search import Search
from optimize.precision.search import search as _search
from optimize.precision.search_methods import MethodName
from optimize.precision.sensitivity import ONE_IMAGE, subject
from optimize.precision.sensitivity import sensitivity as _sensitivity
from optimize.profiling.profile_records import Profiled
from optimize.profiling.profiling import float_program, profile_artifact
from optimize.variant import Variant
from serve.common.progress import here
from serve.runtime.card.execution import Execution
from serve.runtime.display import Described
from serve.runtime.errors import UserError


@dataclass(frozen=True, repr=False)
class Searched(Described):
    """The result of `search`: its record, and the chosen artifact, which is None if no trial meets the budget."""

    found: Found
    variant: Variant | None

    def __str__(self) -> str:
        return "\n".join(self.found.why)

    def _facts(self) -> dict[str, str]:
        return self.found._facts()

    def _more(self) -> dict[str, str]:
        return self.found._more()


def sensitivity(
    variant: Variant,
    *,
    ptq: Ptq | None = None,
    timing: Timing | None = None,
    measure: str = "auto",
    execution: str | None = None,
) -> Sensitivity:
    """Measure the cost and gain of int8 for each layer: quantized alone, and as the only layer left in float.

    Two artifacts are made and measured for each layer. The store keeps all of them, so an interrupted call resumes.

    Args:
        variant: a float module, or an artifact that ``Ptq`` made from one. In the second case its settings are used.
        ptq: settings of the quantization that replace these.
        timing: how to measure speed. By default one image at a time.
        measure: where to measure: ``auto`` (every device of the machine), or a list such as ``cpu,cuda``.
        execution: the engine that runs all artifacts. By default the one that is fastest with every layer in int8.

    Raises:
        UserError: the variant is neither of the two, or the engine does not exist.
    """
    must_be(Variant, variant, "sensitivity takes a variant, which load() and apply() return")
    session = variant.session
    with silenced():
        parent, config = subject(variant.artifact, ptq)
        found, _ = _sensitivity(
            session,
            parent,
            config,
            timing=timing or ONE_IMAGE,
            devices=measured_devices(measure, session.context.device),
            execution=execution,
        )
    return found


def search(
    variant: Variant,
    *,
    max_drop: float = Search().max_drop,
    max_latency_ms: float | None = None,
    bits: Sequence[int] = (8, 32),
    method: MethodName = "greedy",
    max_trials: int | None = None,
    execution: str | None = None,
    ptq: Ptq | None = None,
    timing: Timing | None = None,
    measure: str = "auto",
) -> Searched:
    """Choose the precision of each layer under a budget, by measured accuracy and measured latency.

    One half of the evaluation images is used to choose, the other half to judge the choice. The function never returns
    an int8 pair that is slower than the fastest float execution. The store keeps all trials, so an interrupted call
    resumes.

    Args:
        variant: the float baseline that ``load`` returns.
        max_drop: the largest loss of accuracy, as a fraction.
        max_latency_ms: the largest median latency of one image, in milliseconds.
        bits: the precisions that layers may have: 8 (int8), 16 (FP16 weights, and FP16 arithmetic if the execution
            supports it) and 32. Give 8 and at least one of the others.
        method: ``greedy`` (by the layers' sensitivity in simulation) or ``halving`` (delta debugging).
        max_trials: the largest number of trials, from which the best is taken. By default as many as the method needs.
        execution: the engine of the trials. By default the one that is fastest with every layer in int8.
        ptq: how to quantize layers.
        timing: how to measure speed. By default one image at a time.
        measure: where to measure: ``auto`` (every device of the machine), or a list such as ``cpu,cuda``.

    Raises:
        UserError: the variant is not a float module, or a setting is not valid.
    """
    must_be(Variant, variant, "search takes a variant, which load() returns")
    if variant.artifact.kind != "module":
        raise UserError(
            f"search needs a float module, and {variant.name} is not one; give it the variant that load() returned"
        )
    session = variant.session
    by = Search(
        max_drop=max_drop,
        max_latency_ms=max_latency_ms,
        bits=tuple(bits),
        method=method,
        max_trials=max_trials,
        execution=execution,
    )
    with silenced():
        found, _ = _search(
            session,
            variant.step,
            by,
            ptq=ptq,
            timing=timing or ONE_IMAGE,
            devices=measured_devices(measure, session.context.device),
        )
        wanted = found.pair.partition("@")[0] if found.pair else None
        steps = {variant.name: variant.step}
        for stage in found.stages:
            config = find_pass(stage["pass"]).config(**stage["config"])
            steps[stage["name"]] = session.apply(steps[stage["from"]].artifact, config, stage["name"])
    return Searched(found, Variant(session, steps[wanted]) if wanted else None)


def profile(variant: Variant, *, batch: int = 1, execution: str | Execution | None = None) -> Profiled:
    """Measure the time, MACs, bytes and share of the machine's peak of each layer, as each engine reports it.

    Each execution runs in its own process, which also measures the machine's peaks.

    Args:
        variant: any variant.
        batch: the number of images in one batch.
        execution: the name of an engine, such as ``openvino``, or an execution. By default every execution on the CPU
            that can run the variant. One that cannot report layers is named with the reason.

    Raises:
        UserError: the batch is not a number of images, the engine does not exist, or no engine reports layers.
    """
    must_be(Variant, variant, "profile takes a variant, which load() and apply() return")
    with silenced():
        return profile_artifact(
            variant.artifact.folder,
            batch=batch,
            execution=execution,
            floats=float_program((one.folder, one.card) for one in variant.artifact.line()),
            listener=here(),
        )
