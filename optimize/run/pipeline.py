"""Runs a recipe: every stage through the store, every artifact measured, packed and reported."""

from __future__ import annotations

import dataclasses
import datetime
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize.context import Context
from optimize.data.sources import read_source
from optimize.errors import NotApplicableError, PassError
from optimize.listener import Listener
from optimize.measure.bench import Bench
from optimize.measure.machine import machine, versions
from optimize.models.preprocessing import Wish
from optimize.report.page import plot, write_html
from optimize.run.job import Job, Opened, open_job
from optimize.run.publishing import publish
from optimize.run.recipe import BASELINE, DEFAULT_RECIPE, Recipe, Stage, load_recipe
from optimize.run.recommendation import recommend
from optimize.run.results import Entry, Measured, measure
from optimize.store.files import write_json
from serve.runtime.errors import EngineError, PipelineError, one_line

#: Version of ``report.json``.
SCHEMA = 1


@dataclass(frozen=True)
class Outcome:
    """A finished run: its report, its folder, and the stages that failed and should not have."""

    report: dict[str, Any]
    folder: Path
    failed: tuple[str, ...]


def run(job: Job, listener: Listener) -> Outcome:
    """Run a job from checkpoint to report.

    Everything that the user can have got wrong is found before anything is built.

    Raises:
        UserError: the job is illegal, or something that it names cannot be read or written.
        PipelineError: the baseline cannot be made; another stage that fails is reported as skipped instead.
    """
    started = time.perf_counter()
    path = job.recipe or DEFAULT_RECIPE
    recipe = load_recipe(path)
    opened = open_job(job, listener, Wish(recipe.preprocessing, f"preprocessing.{{}} in {path.name}"))
    session, context = opened.session, opened.session.context
    folder = job.store / opened.run
    with session.store.in_use():
        entries = _build(opened, recipe, listener)
        bench = Bench(session.store, context, remeasure=job.remeasure)
        measured = measure(entries, bench, recipe.measure, listener)
        report = {
            "schema": SCHEMA,
            "run": opened.run,
            "model": job.model,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "data": {**_describe(context), "preprocessing_origin": dict(opened.preprocessing_origins)},
            "machine": machine(context.device),
            "device": context.device.type,
            "versions": versions(),
            **_results(entries, measured, recipe),
        }
        artifacts = {entry.name: entry.artifact for entry in entries if entry.artifact is not None}
        with session.store.lock(f"run-{folder.name}"):  # or two runs of one name would mix their files
            keys = publish(session.store, folder, artifacts, report, read_source(context.data.val.sources[0]))
            write_json(sorted({*keys, *(key for key, _ in bench.log)}), folder / "objects.json")
            report["seconds"] = time.perf_counter() - started
            write_json(report, folder / "report.json")
            write_html(report, folder / "report.html")
            plot(report, folder / "pareto.svg")
    return Outcome(report, folder, tuple(entry.name for entry in entries if entry.failed))


def _build(opened: Opened, recipe: Recipe, listener: Listener) -> list[Entry]:
    """Run every stage; one that does not apply or fails is skipped, and so are its descendants."""
    listener.started(BASELINE)
    session = opened.session
    try:
        step = session.baseline(recipe.baseline, opened.checkpoint, opened.origin)
    except (PipelineError, OSError):
        raise
    except Exception as error:
        raise PipelineError(
            f"the baseline cannot be made: {_explained(error, _error_log(opened, BASELINE))}"
        ) from error
    listener.ended(BASELINE, step.seconds, cached=step.cached, skipped=None)
    settings = dict(step.artifact.card.lineage[-1].config)
    stages = {BASELINE: Entry(BASELINE, BASELINE, None, settings, step)}
    for planned in recipe.stages:
        config = planned.config.model_dump(mode="json")
        stage = Entry(planned.name, planned.step.name, planned.parent, config)
        stages[planned.name] = stage
        listener.started(planned.name)
        _run_stage(opened, planned, stage, stages[planned.parent])
        seconds, cached = (stage.step.seconds, stage.step.cached) if stage.step else (0.0, False)
        listener.ended(planned.name, seconds, cached=cached, skipped=stage.skipped)
    return list(stages.values())


def _run_stage(opened: Opened, planned: Stage, stage: Entry, parent: Entry) -> None:
    if parent.artifact is None:
        stage.skipped = f"its parent {parent.name} was skipped"
        return
    log = _error_log(opened, planned.name)
    log.unlink(missing_ok=True)
    try:
        stage.step = opened.session.apply(parent.artifact, planned.config, planned.name)
    except (NotApplicableError, EngineError) as error:  # the latter: no kernels for it on this machine
        stage.skipped = str(error)
    except PassError as error:
        stage.skipped, stage.failed = f"failed: {error}", True
    except (PipelineError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a library's failure on one model must not cost the other artifacts
        stage.skipped, stage.failed = f"failed: {_explained(error, log)}", True


def _error_log(opened: Opened, name: str) -> Path:
    return opened.session.store.root / opened.run / f"{name}-error.txt"


def _explained(error: Exception, log: Path) -> str:
    """An unforeseen exception in one line; its traceback goes to ``log``."""
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return f"{one_line(error)} (traceback in {log})"


def _results(entries: Sequence[Entry], measured: Measured, recipe: Recipe) -> dict[str, Any]:
    """The part of the report that is about artifacts."""
    speed = measured.speed
    recommendation = recommend(measured.rows, speed.speeds, recipe.recommend.max_drop)
    return {
        "recommended": recommendation.name,
        "recommendation": {"rule": recommendation.rule, "rejected": recommendation.rejected},
        "artifacts": measured.rows,
        "baselines": measured.baselines,
        "stages": [
            {
                "name": entry.name,
                "pass": entry.operation,
                "parents": [entry.parent] if entry.parent else [],
                "seconds": entry.step.seconds if entry.step else 0.0,
                "cached": entry.step.cached if entry.step else False,
                "skipped": None if entry.step else entry.skipped,
            }
            for entry in entries
        ],
        "measurement": {
            **recipe.measure.model_dump(mode="json"),
            "seconds": speed.seconds,
            "cached": speed.cached,
            "latency_samples": speed.speeds[BASELINE].fields()["latency_samples"],
        },
    }


def _describe(context: Context) -> dict[str, Any]:
    data = context.data
    return {
        "name": data.name,
        "fingerprint": data.fingerprint,
        "fingerprint_kind": data.fingerprint_kind,
        "classes": len(data.classes),
        "train": len(data.train),
        "val": len(data.val),
        "preprocessing": dataclasses.asdict(context.preprocessing),
    }
