"""Compares variants and runs: measures them side by side, and recommends which to serve."""

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

    Each variant is measured with every execution (engine and device) that can run it, each in its own process. The
    first variant should be the float baseline: all differences are to it. Speed is measured in interleaved rounds
    together with float references. The references come from the first variant, or from the nearest float module that it
    was made from. They are its eager module in several forms and, if no variant is a float ONNX graph, its float graph
    on ONNX Runtime and OpenVINO.

    Args:
        variants: the variants to compare. A variant that could not be made (see `apply_each`) gets a row with the
            reason. If two have the same name, the later one is prefixed with its parent's name or numbered.
        timing: how to measure speed.
        measure: where to measure: ``auto`` (every device of the machine), or a list such as ``cpu,cuda``.
        executions: names of engines, such as ``openvino``, or executions. By default all. The first variant is always
            measured.
        max_drop: a recommended artifact must be shown not to lose this much accuracy, as a fraction.
        objective: the measure by which the best artifact is recommended: ``latency`` (median, one image), ``p95``,
            ``throughput`` (at the best batch size) or ``size``.
        confidence: the confidence that no artifact with that loss passes, over all artifacts together.

    Raises:
        UserError: there are no variants, one is given twice, they come from different sessions, the rule is not valid,
            or an engine or device does not exist.
        PipelineError: the first variant could not be made or measured, or none of the others could be made.
    """
    rule = Recommend(objective=objective, max_drop=max_drop, confidence=confidence)
    if not variants:
        raise UserError("compare needs at least one variant")
    for variant in variants:
        must_be((Variant, Failed), variant, "compare takes variants, which load() and apply() return")
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
            task=session.context.task.name,
            rows=measured.rows,
            references=measured.references,
            references_of=measured.references_of,
            yardstick=measured.turns.yardstick,
            eager=measured.turns.eager,
            recommendation=recommend(
                measured.rows,
                measured.turns.speeds,
                rule,
                session.context.task,
                differences=measured.differences(session.context.task),
                classes=len(session.context.data.classes),
            ),
            measurement=measured.measurement,
        )
    )


def _see_that_some_are_made(variants: Sequence[Variant | Failed]) -> None:
    first, *others = variants
    if isinstance(first, Failed):
        raise PipelineError(f"{first.name}, the reference of this comparison, could not be made: {first.reason}")
    failed = [variant for variant in others if isinstance(variant, Failed)]
    if failed and len(failed) == len(others):
        reasons = [f"{variant.name}: {variant.reason}" for variant in failed]
        raise PipelineError("\n".join([f"none of the variants to compare with {first.name} could be made:", *reasons]))


def _distinct(variants: Sequence[Variant | Failed]) -> list[Step | Row]:
    """Return what is compared, with unique names.

    Raises:
        UserError: a variant is given twice.
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
    """Compare artifacts of several runs that used the same evaluation images. Speed and memory are measured again.

    Args:
        names: ``RUN`` means its baseline and its recommended artifact, ``RUN/ARTIFACT`` means that artifact. All are
            compared with the first.
        store: the folder of the runs.
        measure: where to measure: ``auto`` (every device of the machine), or a list such as ``cpu,cuda``.
        timing: how to measure speed.
        max_drop: as in `compare`.
        objective: as in `compare`.
        confidence: as in `compare`.

    Raises:
        UserError: a run or artifact does not exist, or the runs used different images. The message names the
            difference.
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
