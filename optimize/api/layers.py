"""Layer by layer: what each costs in int8, which precision each should have, and where the time goes."""

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
    """What `search` found: the record of it, and the chosen artifact; None where nothing keeps the budget."""

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
    """Measure what each layer costs and wins in int8: alone quantized, and as the only one that is not.

    Two artifacts are made and measured for each layer; all are kept in the store, and a call that was interrupted goes
    on from there.

    Args:
        variant: a float module, or what ``Ptq`` made of one, whose settings are then taken.
        ptq: how layers are quantized, where that is to differ.
        timing: how speed is measured; by default one image at a time.
        measure: where to measure: ``auto`` (every device that there is), or a list such as ``cpu,cuda``.
        execution: the engine that runs all of them; by default the one that is fastest with every layer in int8.

    Raises:
        UserError: the variant is no such, or there is no such engine.
    """
    must_be(Variant, variant, "sensitivity takes a variant, as load() and apply() give it")
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

    Half of the evaluation images choose, and the others judge what was chosen. An int8 pair that is slower than the
    fastest float execution is never returned. All trials are kept in the store, and a call that was interrupted goes on
    from there.

    Args:
        variant: the float baseline, as ``load`` gives it.
        max_drop: largest loss of top-1, as a fraction.
        max_latency_ms: longest median latency of one image.
        bits: precisions that layers may have: 8 (int8), 16 (FP16 weights, and arithmetic where an execution has it),
            32; 8 and at least one of the others.
        method: ``greedy`` (by the layers' sensitivity in simulation) or ``halving`` (delta debugging).
        max_trials: most trials, of which the best is taken; by default as many as the method needs.
        execution: the engine that trials run by; by default the one that is fastest with every layer in int8.
        ptq: how layers are quantized.
        timing: how speed is measured; by default one image at a time.
        measure: where to measure: ``auto`` (every device that there is), or a list such as ``cpu,cuda``.

    Raises:
        UserError: the variant is no float module, or a setting is not legal.
    """
    must_be(Variant, variant, "search takes a variant, as load() gives it")
    if variant.artifact.kind != "module":
        raise UserError(f"search starts from a float module, and {variant.name} is none; give it what load() gave")
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
    """What each layer of a variant takes: time, MACs, bytes, and the share of this machine's peak, as engines tell it.

    Each execution has a process of its own; peaks are measured there, too.

    Args:
        variant: any.
        batch: images that are run together.
        execution: an engine's name, such as ``openvino``, or an execution; by default all on the CPU that run it. What
            does not tell is named, with the reason.

    Raises:
        UserError: the batch is no number of images, there is no such engine, or none that tells.
    """
    must_be(Variant, variant, "profile takes a variant, as load() and apply() give it")
    with silenced():
        return profile_artifact(
            variant.artifact.folder,
            batch=batch,
            execution=execution,
            floats=float_program((one.folder, one.card) for one in variant.artifact.line()),
            listener=here(),
        )
