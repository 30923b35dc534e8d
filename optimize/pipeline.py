"""Runs a recipe: every stage through the store, every artifact measured, packed and reported."""

from __future__ import annotations

import dataclasses
import datetime
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from optimize.artifact import Artifact, one_line
from optimize.checkpoint import Checkpoint, download_weights, read_checkpoint, resolve_model
from optimize.data import default_preprocessing, open_data
from optimize.datasets import ImageData, read_source
from optimize.errors import NotApplicableError, PassError, PipelineError, UserError
from optimize.files import write_json
from optimize.measure import accuracy
from optimize.measure.accuracy import Answers
from optimize.measure.bench import Bench, SpeedTable
from optimize.measure.latency import compare
from optimize.measure.machine import machine, resolve_device, versions
from optimize.model_source import ModelSource
from optimize.passes.base import Context
from optimize.publishing import publish
from optimize.recipe import BASELINE, DEFAULT_RECIPE, Recipe, Stage, load_recipe
from optimize.recommendation import recommend
from optimize.report import write_html
from optimize.session import Session, Step
from optimize.store import Store

#: Version of ``report.json``.
SCHEMA = 1


@dataclass(frozen=True)
class Job:
    """What the user asks for, in the words of the command line.

    Attributes:
        model: a torchvision name, ``path/to/file.py:factory`` or ``package.module:factory``.
        checkpoint: a file of weights; None trains the baseline.
        data: ``digits``, ``imagefolder:DIR`` or a torchvision data set.
        recipe: a YAML file.
        store: where runs are kept.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        image_size: side of the network's input in pixels; None leaves it to model and data.
        weights: name of torchvision's own weights, such as ``DEFAULT``.
        run: the run's name; the model's by default.
        trust_checkpoint: let the checkpoint's pickle run code.
        seed: of every random choice.
    """

    model: str
    checkpoint: Path | None = None
    data: str = "digits"
    recipe: Path = DEFAULT_RECIPE
    store: Path = Path("model_store")
    device: str = "auto"
    image_size: int | None = None
    weights: str | None = None
    run: str | None = None
    trust_checkpoint: bool = False
    seed: int = 0


class Listener(Protocol):
    """Who is told how a run goes on."""

    def started(self, name: str) -> None:
        """A stage or measurement begins."""

    def progressed(self, fraction: float, message: str) -> None:
        """How far the step that is under way has come."""

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """A stage or measurement is done, was in the cache, or was skipped for a reason."""

    def said(self, message: str) -> None:
        """Something worth a line."""


@dataclass
class _Stage:
    """A stage of the run and what became of it."""

    name: str
    operation: str
    parent: str | None
    config: dict[str, Any]
    step: Step | None = None
    skipped: str | None = None
    failed: bool = False

    @property
    def artifact(self) -> Artifact | None:
        return self.step.artifact if self.step else None


@dataclass(frozen=True)
class Outcome:
    """A finished run: its report, its folder, and whether a stage failed that should not have."""

    report: dict[str, Any]
    folder: Path
    failed: tuple[str, ...]


def run(job: Job, listener: Listener) -> Outcome:
    """Run a job from checkpoint to report.

    Everything that the user can have got wrong is found before anything is built.

    Raises:
        UserError: the job is illegal, or something that it names cannot be read or written.
        PipelineError: the baseline cannot be made; a stage that fails is reported as skipped instead.
    """
    started = time.perf_counter()
    recipe = load_recipe(job.recipe)
    device = resolve_device(job.device)
    source = resolve_model(job.model)
    if job.run is not None:
        source = dataclasses.replace(source, name=_run_name(job.run))
    if job.checkpoint and job.weights:
        raise UserError("--checkpoint and --weights are both given; the weights can come from one of them only")
    checkpoint, origin = _checkpoint(job, source)
    data = open_data(job.data, seed=job.seed)
    preprocessing = default_preprocessing(source, data, job.image_size)
    context = Context(data, preprocessing, device, job.seed, listener.progressed)
    store = Store(job.store)
    listener.said(
        f"{source.name} on {data.name}: {len(data.classes)} classes, {len(data.train)} training and "
        f"{len(data.val)} validation images, input {'x'.join(map(str, preprocessing.shape))}, {device}"
    )
    with store.in_use():
        session = Session(store, source, context, lambda name: listener.said(f"{name}: another run is making it"))
        stages = _build(session, recipe, checkpoint, origin, listener)
        bench = Bench(store, context, [])
        folder = job.store / source.name
        report = _measure(stages, bench, recipe, folder, listener)
        report = {
            "schema": SCHEMA,
            "run": source.name,
            "model": job.model,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "data": _describe(data, preprocessing),
            "machine": machine(device),
            "device": device.type,
            "versions": versions(),
            **report,
        }
        keys = publish(
            store,
            folder,
            {stage.name: stage.artifact for stage in stages if stage.artifact is not None},
            report,
            read_source(data.val.sources[0]),
        )
        write_json(sorted({*keys, *bench.keys}), folder / "objects.json")
        report["seconds"] = time.perf_counter() - started
        write_json(report, folder / "report.json")
        write_html(report, folder / "report.html")
    return Outcome(report, folder, tuple(stage.name for stage in stages if stage.failed))


def _run_name(name: str) -> str:
    if not name or not name[0].isalnum() or not all(c.isalnum() or c in "-_." for c in name):
        raise UserError(f"run name {name!r}: use letters, digits, '-', '_' and '.', beginning with a letter or digit")
    return name


def _checkpoint(job: Job, source: ModelSource) -> tuple[Checkpoint | None, Path | None]:
    if job.weights is not None:
        return download_weights(source, job.weights), Path(f"torchvision's {job.weights}")
    if job.checkpoint is not None:
        return read_checkpoint(job.checkpoint, trust_pickle=job.trust_checkpoint), job.checkpoint
    return None, None


def _build(
    session: Session, recipe: Recipe, checkpoint: Checkpoint | None, origin: Path | None, listener: Listener
) -> list[_Stage]:
    """Run every stage; one that does not apply or fails is skipped, and so are its descendants."""
    listener.started(BASELINE)
    step = session.baseline(recipe.baseline, checkpoint, origin)
    listener.ended(BASELINE, step.seconds, cached=step.cached, skipped=None)
    settings = dict(step.artifact.card.lineage[-1].config)
    stages = {BASELINE: _Stage(BASELINE, BASELINE, None, settings, step)}
    for planned in recipe.stages:
        config = planned.config.model_dump(mode="json")
        stage = _Stage(planned.name, planned.step.name, planned.parent, config)
        stages[planned.name] = stage
        listener.started(planned.name)
        _run_stage(session, planned, stage, stages[planned.parent])
        seconds, cached = (stage.step.seconds, stage.step.cached) if stage.step else (0.0, False)
        listener.ended(planned.name, seconds, cached=cached, skipped=stage.skipped)
    return list(stages.values())


def _run_stage(session: Session, planned: Stage, stage: _Stage, parent: _Stage) -> None:
    if parent.artifact is None:
        stage.skipped = f"its parent {parent.name} was skipped"
        return
    try:
        stage.step = session.apply(parent.artifact, planned.config, planned.name)
    except NotApplicableError as error:
        stage.skipped = str(error)
    except PassError as error:
        stage.skipped, stage.failed = f"failed: {error}", True
    except (PipelineError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a library's failure on one model must not cost the other artifacts
        log = session.store.root / f"{session.source.name}-{planned.name}-error.txt"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        stage.skipped, stage.failed = f"failed: {one_line(error)} (traceback in {log})", True


def _measure(stages: list[_Stage], bench: Bench, recipe: Recipe, folder: Path, listener: Listener) -> dict[str, Any]:
    """Measure what can be measured here and write the report's rows."""
    able = []
    for stage in stages:
        if stage.artifact is not None:
            stage.skipped = bench.refuses(stage.artifact)
            if stage.skipped is None:
                able.append(stage)
    artifacts = [stage.artifact for stage in able if stage.artifact is not None]

    listener.started("accuracy")
    begun = time.perf_counter()
    answers = {artifact.name: bench.answers(artifact) for artifact in artifacts}
    listener.ended("accuracy", time.perf_counter() - begun, cached=False, skipped=None)

    listener.started("speed")
    speed = bench.speed(artifacts, recipe.measure)
    listener.ended("speed", speed.seconds, cached=speed.cached, skipped=None)

    listener.started("memory")
    begun = time.perf_counter()
    footprints = {}
    for done, artifact in enumerate(artifacts, start=1):
        footprints[artifact.name] = bench.footprint(artifact, recipe.measure.batch_sizes[-1])
        listener.progressed(done / len(artifacts), "memory and load time")
    listener.ended("memory", time.perf_counter() - begun, cached=False, skipped=None)

    rows = [_row(stage, answers, speed, footprints, folder) for stage in stages]
    reference = speed.speeds[BASELINE]
    recommendation = recommend(rows, speed.speeds, recipe.recommend.max_drop)
    return {
        "recommended": recommendation.name,
        "recommendation": {"rule": recommendation.rule, "rejected": recommendation.rejected},
        "artifacts": rows,
        "baselines": [
            {"name": name, "skipped": None, "speedup": compare(reference, value)["speedup"], **value.fields()}
            for name, value in speed.speeds.items()
            if name not in answers
        ]
        + [
            {"name": name, "skipped": reason, "speedup": None, "latency_ms": None, "throughput": {}, "best_batch": None}
            for name, reason in speed.skipped.items()
        ],
        "stages": [
            {
                "name": stage.name,
                "pass": stage.operation,
                "parents": [stage.parent] if stage.parent else [],
                "seconds": stage.step.seconds if stage.step else 0.0,
                "cached": stage.step.cached if stage.step else False,
                "skipped": None if stage.step else stage.skipped,
            }
            for stage in stages
        ],
        "measurement": {
            **recipe.measure.model_dump(mode="json"),
            "seconds": speed.seconds,
            "cached": speed.cached,
            "latency_samples": reference.fields()["latency_samples"],
        },
    }


def _row(
    stage: _Stage,
    answers: dict[str, Answers],
    speed: SpeedTable,
    footprints: dict[str, dict[str, Any]],
    folder: Path,
) -> dict[str, Any]:
    """One artifact of the report; what was not measured is None."""
    artifact = stage.artifact
    row: dict[str, Any] = {
        "name": stage.name,
        "pass": stage.operation,
        "config": stage.config,
        "parents": [stage.parent] if stage.parent else [],
        "skipped": stage.skipped,
        "cached": stage.step.cached if stage.step else False,
        "seconds": stage.step.seconds if stage.step else None,
        **dict.fromkeys(
            ("format", "precision", "path", "archive", "key", "bytes", "top1", "top1_delta", "top1_delta_ci95", "top5")
        ),
        **dict.fromkeys(("discordant", "images", "latency_ms", "best_batch", "latency_samples", "parity", "vs_parent")),
        **dict.fromkeys(("speedup", "memory_bytes", "load_ms", "provider", "threads")),
        "throughput": {},
        "notes": [],
    }
    if artifact is None:
        return row
    card = artifact.card
    row |= {
        "format": card.format,
        "precision": card.precision,
        "path": str(folder / "artifacts" / stage.name / card.file),
        "key": artifact.key,
        "bytes": artifact.path.stat().st_size,
        "notes": list(card.notes),
    }
    if stage.name not in answers:
        return row
    own, parent = speed.speeds[stage.name], stage.parent
    row |= own.fields() | footprints[stage.name] | accuracy.fields(answers[stage.name])
    row |= accuracy.against_baseline(answers[BASELINE], answers[stage.name])
    row["speedup"] = compare(speed.speeds[BASELINE], own)["speedup"]
    row["provider"] = speed.providers[stage.name]
    row["threads"] = torch.get_num_threads()
    if parent in answers:
        row["parity"] = accuracy.parity(answers[parent], answers[stage.name], parent)
        row["vs_parent"] = compare(speed.speeds[parent], own)
    return row


def _describe(data: ImageData, preprocessing: Any) -> dict[str, Any]:
    return {
        "name": data.name,
        "fingerprint": data.fingerprint,
        "fingerprint_kind": data.fingerprint_kind,
        "classes": len(data.classes),
        "train": len(data.train),
        "val": len(data.val),
        "preprocessing": dataclasses.asdict(preprocessing),
    }
