"""Measures each layer quantized alone, and all layers but each: the cost in accuracy, and the gain in time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

from optimize.measure.accuracy import Answers, least_sqnr
from optimize.measure.bench import Bench, Candidate
from optimize.measure.figures import Difference
from optimize.measure.latency import Speed
from optimize.measure.machine import machine
from optimize.measure.rows import Skip
from optimize.measure.timing import Timing
from optimize.passes.onnx import Onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.precision.precision_records import Figure, Layer, Sensitivity
from optimize.precision.quantizable_layers import layers_of
from optimize.precision.trials import Bed, Precisions, fastest_execution, require_engine, require_execution
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.tasks.base import Task
from serve.runtime.engines.base import execution_id
from serve.runtime.errors import PipelineError, UserError

#: One image at a time. A table of batch sizes would take several times as long.
ONE_IMAGE: Final = Timing(batch_sizes=(1,))

#: No gate: the error of a broken network is the result. JSON has no infinity.
_UNGATED: Final[dict[str, Any]] = {"min_sqnr": -1e6, "min_agreement": 0.0}


def one_image(timing: Timing) -> Timing:
    """Return the same measurement with one image at a time."""
    return timing.model_copy(update={"batch_sizes": (1,)})


def sensitivity(
    session: Session,
    parent: Artifact,
    ptq: Ptq,
    *,
    timing: Timing,
    devices: tuple[str, ...],
    execution: str | None = None,
) -> tuple[Sensitivity, frozenset[str]]:
    """Measure every layer of a float module, alone in int8 and alone in float.

    Each of the two trials of a layer is an artifact of ``ptq`` and ``onnx-int8`` in the session's store, as is its
    measurement. A stopped run continues from there.

    Args:
        session: of the model.
        parent: the float module that ``ptq`` quantizes, such as a ``fuse`` artifact.
        ptq: settings of the quantization. Its gate is not used.
        timing: how speed is measured.
        devices: where speed is measured.
        execution: the engine that runs all graphs. By default the fastest one with every layer quantized.

    Returns:
        The result, and the keys of all its objects in the store.

    Raises:
        UserError: there is no layer to quantize, or no such execution.
        PipelineError: the float graph cannot be made or measured.
    """
    if parent.kind != "module":
        raise UserError(f"sensitivity needs a float module, and {parent.name} is not one")
    require_engine(execution)
    listener = session.context.listener
    layers = layers_of(parent, ptq, session.context)
    with Bench(session.store, session.context, timing, devices) as bench:
        bed = Bed(
            session,
            bench,
            parent,
            ptq.model_copy(update=_UNGATED),
            OnnxInt8(**_UNGATED, max_size_ratio=1.0),
        )
        float_graph = session.apply(parent, Onnx(), "onnx").artifact
        bed.note([float_graph])
        require_execution(bench, float_graph, execution)
        whole_graph = bed.make(Precisions()).graph.artifact
        chosen, _ = fastest_execution(bed, float_graph, whole_graph, execution)
        start, whole = Candidate(float_graph, chosen), Candidate(whole_graph, chosen)
        expected = bed.answers(start)

        def measured(trial: Candidate, beside: Candidate) -> Figure:
            """Return a trial's figure.

            The gain is from ``beside`` (in float) to the trial, or from the trial to the whole.
            """
            found = bed.answers(trial)
            contestants = list({each.id: each for each in (start, whole, trial)}.values())
            speeds = bed.speeds(contestants)
            slow, fast = (trial, whole) if beside is whole else (beside, trial)
            return _figure(session.context.task, (expected, found), speeds[trial.id], speeds[slow.id], speeds[fast.id])

        def tried(left: frozenset[str], beside: Candidate, said: str) -> Figure | Skip:
            listener.started(said)
            bed.cost.reset()
            trial: Candidate | None = None
            try:
                mixed = bed.make(Precisions(single=left))
                trial = Candidate(mixed.graph.artifact, chosen)
                figure = measured(trial, beside)
            except UserError:
                raise
            except PipelineError as error:
                listener.ended(said, 0.0, cached=False, skipped=str(error))
                return Skip(kind="failed", reason=str(error))
            finally:
                if trial is not None and trial.id != whole.id:
                    bench.release(trial)
            listener.ended(said, bed.cost.seconds, cached=bed.cost.cached, skipped=None)
            return figure

        whole_figure = measured(whole, start)
        every = frozenset(layers)
        found = tuple(
            Layer(
                name=name,
                weights=weights,
                alone=tried(every - {name}, start, f"{name} alone"),
                all_but=tried(frozenset({name}), whole, f"all but {name}"),
            )
            for name, weights in layers.items()
        )
        p50 = statistics.median(bed.speeds([start, whole])[start.id].medians())
    return (
        Sensitivity(
            title=f"{session.source.name} on {session.context.data.name}",
            parent=parent.name,
            config=ptq.model_dump(mode="json"),
            execution=chosen,
            runs_on=execution_id(chosen),
            task=session.context.task.name,
            images=expected.images,
            score=session.context.task.score(expected.evidence),
            p50=p50,
            whole=whole_figure,
            layers=found,
            timing=timing,
            cpu=str(machine(session.context.device)["cpu"]),
        ),
        frozenset(bed.keys),
    )


def subject(artifact: Artifact, ptq: Ptq | None) -> tuple[Artifact, Ptq]:
    """Return the float module to examine, and its quantization.

    Args:
        artifact: that module, or what ``ptq`` made of it, or ``onnx-int8`` of that.
        ptq: the quantization. None: as the artifact was quantized, or with the pass's defaults.

    Raises:
        UserError: the artifact is of another kind.
    """
    found: Artifact | None = artifact
    while found is not None and found.kind != "module":
        last = found.card.lineage[-1]
        if last.operation == "ptq" and found.parent is not None:
            return found.parent, ptq or Ptq(**last.config)
        if last.operation != "onnx-int8":
            break
        found = found.parent
    if found is None or found.kind != "module":
        raise UserError(
            f"{artifact.name} cannot be analysed layer by layer: that needs a float module, or an artifact that "
            "ptq made from one"
        )
    return found, ptq or Ptq()


def _figure(task: Task, answers: tuple[Answers, Answers], own: Speed, slow: Speed, fast: Speed) -> Figure:
    """Return a trial's figure. ``answers`` are the float graph's and its own, the gain is from ``slow`` to ``fast``."""
    expected, found = answers
    won: Callable[[Speed], list[float]] = Speed.medians
    return Figure(
        score=task.score(found.evidence),
        difference=Difference.of(task.difference(expected.evidence, found.evidence)),
        sqnr_db=least_sqnr(expected, found),
        p50=statistics.median(own.medians()),
        won_ms=statistics.median(before - after for before, after in zip(won(slow), won(fast), strict=True)),
    )
