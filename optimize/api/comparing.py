"""Variants side by side, and runs: what each is worth, and which is to be served."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from optimize.arguments import differences, must_be, unused
from optimize.measure.bench import Bench
from optimize.measure.chosen_executions import check_wanted
from optimize.measure.machine import measured_devices, resolve_device
from optimize.measure.rows import Results, Row
from optimize.measure.timing import Timing
from optimize.noise import silenced
from optimize.report.comparison import Comparison
from optimize.run.float_references import graph_of
from optimize.run.recommendation.rule import Objective, Recommend
from optimize.run.recommendation.selection import recommend
from optimize.run.report_rows import measure as measure_steps
from optimize.run.run_comparison import compare_runs as _compare_runs
from optimize.run.session import Step
from optimize.store.artifact import Artifact
from optimize.training.distributed.first_process import only_first
from optimize.variant import Failed, Variant
from serve.common.progress import here
from serve.runtime.card.execution import Execution
from serve.runtime.errors import PipelineError, UserError

_RULE = Recommend()


def compare(
    *variants: Variant | Failed,
    timing: Timing | None = None,
    measure: str = "auto",
    executions: Sequence[str | Execution] | None = None,
    max_drop: float = _RULE.max_drop,
    objective: Objective = _RULE.objective,
    confidence: float = _RULE.confidence,
) -> Comparison:
    """Measure variants of one session side by side: accuracy, parity, speed, memory and size.

    Each is measured by every execution (engine and device) that can run it, in a process of its own.

    Differences are to the first variant, which should be the float baseline; speed is measured in
    interleaved rounds, together with references of the first, or of the nearest float module that it was made
    from: eager ones, and its float graph on ONNX Runtime and OpenVINO where no variant is one.

    Args:
        variants: what to compare. What could not be made (see `apply_each`) has a row with the reason. Of two that have
            one name, the later is called by its parent besides, or numbered.
        timing: how speed is measured.
        measure: where to measure: ``auto`` (every device that there is), or a list such as ``cpu,cuda``.
        executions: engines' names, such as ``openvino``, or executions; by default all. The first variant is measured
            in any case.
        max_drop: loss of top-1, as a fraction, that an artifact must be shown not to have to be recommended.
        objective: what the recommended artifact is best at: ``latency`` (median, one image), ``p95``,
            ``throughput`` (at the best batch size) or ``size``.
        confidence: that no artifact passes which has that loss, over all of them together.

    Raises:
        UserError: there are none, one is given twice, they come from different sessions, the rule is none, or there is
            no such engine or device.
        PipelineError: the first could not be made or cannot be measured, or none of the others could be made.
    """
    rule = Recommend(objective=objective, max_drop=max_drop, confidence=confidence)
    if not variants:
        raise UserError("compare needs at least one variant")
    for variant in variants:
        must_be((Variant, Failed), variant, "compare takes variants, as load() and apply() give them")
    session = variants[0].session
    for variant in variants:
        if differing := differences(session, variant.session):
            what = f"{variant.name} cannot be compared with {variants[0].name}"
            raise UserError(f"{what}: they differ in {', '.join(differing)}")
    steps = _distinct(variants)
    _see_that_some_are_made(variants)
    timing = timing or Timing()
    if executions is not None:
        timing = Timing(**{**dict(timing), "executions": tuple(executions)})
    check_wanted(timing.executions or ())
    devices = measured_devices(measure, session.context.device)
    with silenced():
        bench = Bench(session.store, session.context, timing, devices)
        measured = measure_steps(steps, bench, functools.partial(graph_of, session))
    return Comparison(
        Results(
            title=session.source.name,
            rows=measured.rows,
            references=measured.references,
            references_of=measured.references_of,
            yardstick=measured.turns.yardstick,
            eager=measured.turns.eager,
            recommendation=recommend(
                measured.rows, measured.turns.speeds, rule, classes=len(session.context.data.classes)
            ),
            measurement=measured.measurement,
        )
    )


def _see_that_some_are_made(variants: Sequence[Variant | Failed]) -> None:
    first, *others = variants
    if isinstance(first, Failed):
        raise PipelineError(f"{first.name}, with which all others are compared, could not be made: {first.reason}")
    failed = [variant for variant in others if isinstance(variant, Failed)]
    if failed and len(failed) == len(others):
        reasons = [f"{variant.name}: {variant.reason}" for variant in failed]
        raise PipelineError("\n".join([f"none of what is to be compared with {first.name} could be made:", *reasons]))


def _distinct(variants: Sequence[Variant | Failed]) -> list[Step | Row]:
    """What is compared, with no name twice.

    Raises:
        UserError: one is given twice.
    """
    names: dict[object, str] = {}
    for variant in variants:
        known = _identity(variant)
        if known in names:
            raise UserError(f"{variant.name!r} is given twice")
        above = None if isinstance(variant, Failed) else variant.artifact.parent
        parent = variant.row.parent if isinstance(variant, Failed) else above and above.name
        wanted = (variant.name, *((f"{parent}-{variant.name}",) if parent else ()))
        names[known] = unused(names.values(), *wanted)

    def named(artifact: Artifact) -> Artifact:
        parent = named(artifact.parent) if artifact.parent else None
        return dataclasses.replace(artifact, name=names.get(artifact.folder, artifact.name), parent=parent)

    return [
        variant.row.model_copy(update={"name": names[_identity(variant)]})
        if isinstance(variant, Failed)
        else dataclasses.replace(variant.step, artifact=named(variant.artifact))
        for variant in variants
    ]


def _identity(variant: Variant | Failed) -> object:
    return id(variant) if isinstance(variant, Failed) else variant.artifact.folder


def compare_runs(
    *names: str,
    store: str | Path = "model_store",
    measure: str = "auto",
    timing: Timing | None = None,
    max_drop: float = _RULE.max_drop,
    objective: Objective = _RULE.objective,
    confidence: float = _RULE.confidence,
) -> Comparison:
    """Compare artifacts of several runs that were judged by the same images: speed and memory are measured anew.

    Args:
        names: ``RUN`` stands for its baseline and its recommended artifact, ``RUN/ARTIFACT`` for that one. The
            first is what the others are compared with.
        store: where the runs are.
        measure: where to measure: ``auto`` (every device that there is), or a list such as ``cpu,cuda``.
        timing: how speed is measured.
        max_drop: as of `compare`.
        objective: as of `compare`.
        confidence: as of `compare`.

    Raises:
        UserError: a run or artifact does not exist, or they were judged by different images; what differs is named.
    """
    only_first()
    rule = Recommend(objective=objective, max_drop=max_drop, confidence=confidence)
    with silenced():
        results = _compare_runs(
            Path(store),
            names,
            timing=timing or Timing(),
            rule=rule,
            devices=measured_devices(measure, resolve_device("auto")),
            listener=here(),
        )
    return Comparison(results)
