"""Runs a recipe: every stage through the store, every artifact measured, packed and reported."""

from __future__ import annotations

import contextlib
import datetime
import functools
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from optimize.context import Context
from optimize.data.pixels import sample
from optimize.errors import NotApplicableError, PassError
from optimize.listener import Listener
from optimize.measure.bench import Bench
from optimize.measure.machine import machine, versions
from optimize.measure.rows import Data, Machine, Report, Row, Skip
from optimize.models.preprocessing_config import Wish
from optimize.profiling.profile_files import layer_charts
from optimize.report.page import write_html
from optimize.report.stored_charts import stored_charts
from optimize.run.class_figures import class_figures, compared_pairs
from optimize.run.examples import Answered, keep_examples
from optimize.run.float_references import graph_of
from optimize.run.identity import refuse_replacing, write_identity
from optimize.run.job import Job
from optimize.run.opened_job import Opened, open_job
from optimize.run.publishing import publish
from optimize.run.recipe import DEFAULT_RECIPE, Recipe, Stage, load_recipe
from optimize.run.recommendation.rule import Recommend
from optimize.run.recommendation.selection import recommend
from optimize.run.report_rows import Measurements, measure, not_made, skip_of
from optimize.run.session import BASELINE, Session, Step
from optimize.run.teacher_checks import check_teaching
from optimize.store.atomic_files import write_atomically, write_json
from optimize.training.config import trains
from serve.common import layout
from serve.runs import sealed_files
from serve.runtime.errors import EngineError, PipelineError, UserError, message_of


@dataclass(frozen=True)
class Outcome:
    """A finished run: its report and its folder."""

    report: Report
    folder: Path

    @property
    def failed(self) -> tuple[str, ...]:
        """Return the names of the stages that failed unexpectedly."""
        return tuple(row.name for row in self.report.rows if row.skip is not None and row.skip.kind == "failed")


def run(job: Job, listener: Listener) -> Outcome:
    """Run a job from checkpoint to report.

    All possible mistakes of the user are found before anything is made.

    Raises:
        UserError: the job is not valid, or something that it names cannot be read or written.
        PipelineError: the baseline cannot be made. Another stage that fails is reported as skipped.
    """
    started = time.perf_counter()
    path = job.recipe or DEFAULT_RECIPE
    recipe = load_recipe(path)
    rule = Recommend(**(recipe.recommend.model_dump() | dict(job.recommend)))
    _refuse_idle(job, recipe, path)
    opened = open_job(job, listener, Wish(recipe.preprocessing, f"preprocessing.{{}} in {path.name}"))
    session, context = opened.session, opened.session.context
    folder = job.store / opened.run
    with contextlib.closing(session):
        if not job.replace:
            refuse_replacing(folder, opened.identity)
        _check(opened, recipe, path)
        steps = _build(opened, recipe, listener)
        bench = Bench(session.store, context, recipe.measure, opened.devices, remeasure=job.remeasure)
        measured = measure(steps, bench, functools.partial(graph_of, session), certifying=True)
        recommendation = recommend(
            measured.rows,
            measured.turns.speeds,
            rule,
            context.task,
            differences=measured.differences(context.task),
            classes=len(context.data.classes),
        )
        artifacts = {step.artifact.name: step.artifact for step in steps if isinstance(step, Step)}
        gpu = next((device for device in opened.devices if device != "cpu"), "cpu")
        here = Machine.from_json(machine(torch.device(gpu)))
        with session.store.lock(layout.run_lock(folder.name)):  # otherwise two runs of one name would mix their files
            if not job.replace:
                refuse_replacing(folder, opened.identity)  # one may have been made meanwhile
            write_identity(opened.identity, folder)
            example = sample(context.data.val, context.preprocessing)
            published = publish(
                session.store,
                folder,
                artifacts,
                measured.rows,
                recommended=recommendation.pair,
                options=recipe.serving,
                machine=here,
                sample=example,
                first=measured.first,
                task=context.task,
            )
            examples = _examples(measured, recommendation.pair, session)
            report = Report(
                title=opened.run,
                task=context.task.name,
                model=session.source.reference,
                created=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
                seconds=time.perf_counter() - started,
                device=context.device.type,
                data=_describe(context, opened.preprocessing_origins),
                machine=here,
                versions=versions(),
                rows=published.rows,
                classes=class_figures(
                    measured.rows, recommendation.pair, measured.evidence, context.task, context.data.classes
                ),
                examples=examples,
                references=measured.references,
                references_of=measured.references_of,
                yardstick=measured.turns.yardstick,
                eager=measured.turns.eager,
                recommended=recommendation.name,
                recommendation=recommendation,
                measurement=measured.measurement,
            )
            charts = stored_charts(report, session.store)
            write_json(
                sorted(measured.keys | published.keys | {charts.key, *([examples] if examples else [])}),
                folder / layout.OBJECTS_FILE,
            )
            write_html(report, folder / layout.PAGE_FILE, charts, layer_charts(job.store, folder.name))
            if charts.paper is not None:
                write_atomically(folder / layout.PLOT_FILE, charts.paper)
            else:
                (folder / layout.PLOT_FILE).unlink(missing_ok=True)
            write_json(report.to_json(), folder / layout.REPORT_FILE)
            sealed_files.seal(
                folder, published.digests
            )  # sealed last: if the process is killed earlier, the next run makes everything again
    return Outcome(report, folder)


def _refuse_idle(job: Job, recipe: Recipe, path: Path) -> None:
    """Refuse options about training if nothing will be trained."""
    trained = not job.brings_weights or any(trains(stage.config) for stage in recipe.stages)
    said = {"--processes": job.processes, "--tensorboard": job.tensorboard, "--augment": job.augment}
    if not trained and (idle := [f"{option} {value}" for option, value in said.items() if value not in (None, 1)]):
        raise UserError(
            f"{' and '.join(idle)}: nothing would be trained, because the model has weights and no pass of {path} "
            "trains"
        )


def _check(opened: Opened, recipe: Recipe, path: Path) -> None:
    """Refuse all settings that do not fit the model, each with its stage's line."""
    wrong = []
    try:
        recipe.serving.check_task(opened.session.context.task.name)
    except UserError as error:
        wrong.append(f"{path}: serving.{error}")
    if opened.checkpoint is None:
        try:
            check_teaching(opened.session, recipe, None)
        except UserError as error:
            wrong += [f"{path}: baseline.{line}" for line in str(error).splitlines()]
    for stage in recipe.stages:
        try:
            opened.session.check(stage.config)
            check_teaching(opened.session, recipe, stage)
        except UserError as error:
            wrong += [f"{path}:{stage.line}: {line}" for line in str(error).splitlines()]
    if wrong:
        raise UserError("\n".join(wrong))


def make_baseline(opened: Opened, recipe: Recipe, listener: Listener) -> Step:
    """Make the float network of a job. The recipe says how to train it if there is no checkpoint.

    Raises:
        UserError: the checkpoint does not fit, or the model gives no logits.
        PipelineError: the user's code or a library fails. The message names the file with the traceback.
    """
    listener.started(BASELINE)
    try:
        baseline = opened.session.baseline(recipe.baseline, opened.checkpoint, opened.origin)
    except (PipelineError, OSError):
        raise
    except Exception as error:
        raise PipelineError(
            f"the baseline cannot be made: {_explained(error, _error_log(opened, BASELINE))}"
        ) from error
    listener.ended(BASELINE, baseline.seconds, cached=baseline.cached, skipped=None)
    return baseline


def _build(opened: Opened, recipe: Recipe, listener: Listener) -> list[Step | Row]:
    """Carry out every stage. A stage that fails or does not apply, and its descendants, become rows with the reason."""
    steps: dict[str, Step | Row] = {BASELINE: make_baseline(opened, recipe, listener)}
    for stage in recipe.stages:
        listener.started(stage.name)
        step = _carry_out(opened, stage, steps)
        steps[stage.name] = step
        if isinstance(step, Step):
            listener.ended(stage.name, step.seconds, cached=step.cached, skipped=None)
        else:
            listener.ended(stage.name, 0.0, cached=False, skipped=str(step.skip))
    return list(steps.values())


def _carry_out(opened: Opened, stage: Stage, steps: Mapping[str, Step | Row]) -> Step | Row:
    """Return the stage's step, or a row with the reason why there is none."""
    needed = [("parent", stage.parent), *(("teacher", name) for name in stage.teachers)]
    for what, name in needed:
        if isinstance(steps[name], Row):
            skip = Skip(kind="parent_skipped", reason=f"its {what} {name} was skipped")
            return not_made(stage.name, stage.config, stage.parent, skip)
    parent = steps[stage.parent]
    assert isinstance(parent, Step)
    others = {step.artifact.name: step.artifact for step in steps.values() if isinstance(step, Step)}
    log = _error_log(opened, stage.name)
    log.unlink(missing_ok=True)
    try:
        return opened.session.apply(parent.artifact, stage.config, stage.name, others)
    except (NotApplicableError, EngineError, PassError) as error:
        skip = skip_of(error)
        if isinstance(error, PassError) and error.__cause__ is not None:
            skip = Skip(kind="failed", reason=_explained(error, log))
    except (PipelineError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a library's failure on one model must not cost the other artifacts
        skip = Skip(kind="failed", reason=_explained(error, log))
    return not_made(stage.name, stage.config, stage.parent, skip)


def _error_log(opened: Opened, name: str) -> Path:
    return opened.session.store.root / opened.run / f"{name}-error.txt"


def _explained(error: Exception, log: Path) -> str:
    """Describe a library's exception, or one raised from it, in one line. The traceback goes to ``log``."""
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return f"{message_of(error)} (traceback in {log})"


def _examples(measured: Measurements, chosen: str | None, session: Session) -> str | None:
    """Keep pictures of answers of the baseline and of the artifact that is compared with it. Return their key."""
    context = session.context
    compared = compared_pairs(measured.rows, chosen)
    if not compared or not context.task.drawn:
        return None
    keys = {pair.id: pair.measured.accuracy.answers for row in measured.rows for pair in row.pairs if pair.measured}
    first, other = (
        Answered(name, measured.evidence[name], keys[name]) for name in (next(iter(measured.evidence)), compared[0])
    )
    rows = [row for row in range(len(context.data.val)) if row not in set(measured.left_out)]
    return keep_examples(first, other, context, rows, session.store)


def _describe(context: Context, origins: Mapping[str, str]) -> Data:
    data = context.data
    return Data(
        name=data.name,
        fingerprint=data.fingerprint,
        fingerprint_kind=data.fingerprint_kind,
        val_fingerprint=data.val.fingerprint,
        classes=len(data.classes),
        train=len(data.train),
        val=len(data.val),
        val_of=data.val_of,
        preprocessing=context.preprocessing,
        preprocessing_origin=dict(origins),
    )
