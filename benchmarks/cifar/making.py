"""Making a cell: its artifact, its control's, and what both answer, all through the project's own API and store."""

from __future__ import annotations

import datetime
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

import optimize as opt
from benchmarks.cifar.chains import (
    Chain,
    chain,
    control,
    epochs,
    quickest,
    shortened,
    taught,
    told,
    unusual,
    with_epochs,
)
from benchmarks.cifar.provenance import code
from benchmarks.cifar.record import Cell, Faster, Judged
from benchmarks.cifar.rows import EXAMPLES, MODELS, START, Network, Row
from optimize.measure.bench import Bench, Candidate
from optimize.measure.machine import machine, measured_devices, versions
from optimize.noise import silenced
from optimize.passes.base import pass_of
from optimize.run.job import Job
from optimize.run.opened_job import Opened, open_job
from optimize.run.recipe import load_recipe
from optimize.statistics import ratio_interval
from optimize.store.artifact import Artifact
from optimize.store.keys import make_key
from optimize.store.layer_effects import WHOLE, read_effects
from optimize.training.config import TrainingConfig
from optimize.variant import Variant
from serve.common.progress import here as shown_here
from serve.runtime.errors import EngineError, PipelineError, UserError, one_line

#: Images of a batch that speed is compared at, and images that answers are counted on in a short run.
_BATCH, _SHORT_IMAGES = 16, 32

#: What is done to training images: those of CIFAR-10 may be mirrored.
_AUGMENT: Final = "shift+flip"

#: Of the machine and the libraries, what a cell tells.
_OF_THE_MACHINE = ("cpu", "cores", "isa", "gpu")
_LIBRARIES = ("python", "optimize", "torch", "torchvision", "onnxruntime-gpu", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Origin:
    """How a network comes to be what rows start from: ``baseline`` trains it, or its weights go through ``links``."""

    baseline: TrainingConfig | None
    links: Chain

    def told(self) -> dict[str, Any]:
        """Settings that are not defaults, as JSON values."""
        return {"baseline": unusual(self.baseline) if self.baseline else None, "start": told(self.links)}


@dataclass(frozen=True)
class Plan:
    """What is carried out for a row: what it starts from, the cell and its control of that, and who teaches it."""

    origin: Origin
    cell: Chain
    control: Chain
    teacher: Origin | None

    @property
    def links(self) -> Chain:
        """All passes that are run."""
        others = self.teacher.links if self.teacher is not None else ()
        return (*others, *self.origin.links, *self.cell, *self.control)


@dataclass
class Workshop:
    """Makes cells with one seed.

    Attributes:
        seed: of every random choice.
        data: the images, by reference.
        checkpoints: weights of the networks; those without are trained here.
        store: where artifacts are kept.
        command: as it is told in each cell.
        epochs: of each training of a recipe, instead of its own.
        short: with as little work as can be.
        timed: whether rows that aim at a speed are timed, which wants a machine that does nothing else.
        device: where to train and calibrate.
        processes: that train together.
    """

    seed: int
    data: str
    checkpoints: Mapping[Network, Path]
    store: Path
    command: str
    epochs: int | None = None
    short: bool = False
    timed: bool = True
    device: str = "auto"
    processes: int = 1
    _opened: dict[Network, Opened] = field(default_factory=dict, init=False)
    _starts: dict[Network, Variant] = field(default_factory=dict, init=False)

    def plan(self, row: Row) -> Plan:
        """What a row's recipe, and this workshop's settings, ask for.

        Raises:
            UserError: a recipe is illegal.
        """
        links = chain(load_recipe(EXAMPLES / row.recipe), row.stage)
        if self.epochs is not None:
            links = with_epochs(links, self.epochs)
        if self.short:
            links = shortened(links)
        beside = control(links, untaught=row.teacher is not None)
        return Plan(self._origin(row.network), links, beside, self._origin(row.teacher) if row.teacher else None)

    def _origin(self, network: Network) -> Origin:
        """How a network comes to be what rows start from; one that is trained on these images needs nothing more."""
        recipe = load_recipe(EXAMPLES / START)
        if network in self.checkpoints:
            return Origin(None, shortened(chain(recipe)) if self.short else chain(recipe))
        return Origin(quickest(recipe.baseline) if self.short else recipe.baseline, ())

    def key(self, row: Row) -> str:
        """Of all that a cell depends on but the code: equal cells have equal ones."""
        plan, opened = self.plan(row), self._open(row.network)
        data = opened.session.context.data
        teaching: dict[str, Any] = {}
        if row.teacher is not None and plan.teacher is not None:
            weights = self._open(row.teacher).checkpoint
            teaching = {"teacher": plan.teacher.told(), "teachers_weights": weights.sha256 if weights else None}
        return make_key(
            row=row.name,
            **plan.origin.told(),
            **teaching,
            cell=told(plan.cell),
            control=told(plan.control),
            model=opened.session.source.name,
            weights=opened.checkpoint.sha256 if opened.checkpoint else None,
            seed=self.seed,
            images=[data.train.fingerprint, data.val.fingerprint],
            augmentation=data.augment,
        )

    def make(self, row: Row) -> Cell:
        """A row's cell; what cannot be made is said in the cell, and is no reason to end.

        Raises:
            UserError: data, weights or recipe are not what they should be.
        """
        plan, opened = self.plan(row), self._open(row.network)
        context = opened.session.context
        here = machine(context.device)
        cell = Cell(
            key=self.key(row),
            row=row.name,
            recipe=row.recipe,
            stage=row.stage,
            seed=self.seed,
            epochs=self.epochs,
            trained=epochs(plan.cell),
            short=self.short,
            baseline=unusual(plan.origin.baseline) if plan.origin.baseline else None,
            start=tuple(told(plan.origin.links)),
            stages=tuple(told(plan.cell)),
            control=tuple(told(plan.control)),
            model=opened.session.source.name,
            checkpoint=opened.checkpoint.sha256 if opened.checkpoint else None,
            data=context.data.name,
            command=self.command,
            machine={name: here[name] for name in _OF_THE_MACHINE},
            versions={name: version for name, version in versions().items() if name in _LIBRARIES},
            code=code((pass_of(link.config).name for link in plan.links), MODELS[row.network]),
            created=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
        )
        try:
            with silenced():
                made = self._judged(cell, row, plan)
        except UserError:
            raise
        except PipelineError as error:
            made = cell.model_copy(update={"reason": one_line(error)})
        return made.model_copy(update={"created": datetime.datetime.now(datetime.UTC).replace(microsecond=0)})

    def close(self) -> None:
        """Let others prune the store."""
        while self._opened:
            self._opened.popitem()[1].session.close()

    def _judged(self, cell: Cell, row: Row, plan: Plan) -> Cell:
        start = self._start(row.network)
        teacher = self._start(row.teacher).artifact if row.teacher else None
        wanted, beside = (
            _carried_out(start, taught(links, start.artifact, teacher)) for links in (plan.cell, plan.control)
        )
        session, last = start.session, wanted[-1].artifact
        timing = opt.Timing(rounds=7, processes=1, batch_sizes=(1, _BATCH), seconds=0.3)
        devices = measured_devices("auto", session.context.device)
        notes = [note for variant in wanted[1:] for note in variant.artifact.card.notes]
        faster = None
        with Bench(session.store, session.context, timing, devices) as bench:
            pairs = [
                [Candidate(graph, each.execution) for each in bench.working(graph)]
                for graph in (made[-1].artifact for made in (wanted, beside))
            ]
            first, second = (found[0] for found in pairs)
            right, others = (bench.answers(candidate).value.evidence["first"] for candidate in (first, second))
            if row.faster is not None and self.timed:
                try:
                    faster = _faster(bench, *pairs)
                except EngineError as error:
                    notes.append(f"not timed: {error}")
        steps = [variant.step for made in (wanted, beside) for variant in made[1:]]
        return cell.model_copy(
            update={
                "judged": _compared(right, others),
                "precision": last.card.precision,
                "engines": (first.execution.engine, second.execution.engine),
                "bytes": tuple(made[-1].artifact.path.stat().st_size for made in (wanted, beside)),
                "macs": _macs(last),
                "faster": faster,
                "unimproved": any(each.best is None for variant in wanted[1:] for each in variant.training),
                "notes": tuple(notes),
                "seconds": round(sum(step.seconds for step in steps), 1),
            }
        )

    def _open(self, network: Network) -> Opened:
        if network not in self._opened:
            job = Job(
                model=MODELS[network],
                checkpoint=self.checkpoints.get(network),
                data=self.data,
                augment=_AUGMENT,
                val_images=_SHORT_IMAGES if self.short else None,
                store=self.store,
                device=self.device,
                seed=self.seed,
                processes=self.processes,
            )
            self._opened[network] = open_job(job, shown_here())
        return self._opened[network]

    def _start(self, network: Network) -> Variant:
        """What rows of a network start from: the same for all of them."""
        if network not in self._starts:
            opened, origin = self._open(network), self._origin(network)
            base = opened.session.baseline(origin.baseline, opened.checkpoint, opened.origin)
            self._starts[network] = _carried_out(Variant(opened.session, base), origin.links)[-1]
        return self._starts[network]


def _carried_out(start: Variant, links: Chain) -> list[Variant]:
    """What each link makes, what they start from first.

    Raises:
        PassError: a result is broken.
        NotApplicableError: a pass has nothing to do.
    """
    made = [start]
    for link in links:
        made.append(opt.apply(made[-1], link.config, link.name))
    return made


def _compared(right: torch.Tensor, control: torch.Tensor) -> Judged:
    """From ``bool (N,)`` of the cell and of its control."""
    counts = ((right & control), (right & ~control), (~right & control), (~right & ~control))
    both, gained, lost, neither = (int(each.sum()) for each in counts)
    return Judged(both=both, gained=gained, lost=lost, neither=neither)


def _macs(artifact: Artifact) -> float | None:
    """How many times fewer multiply-accumulates than before; None where none were removed."""
    found = [
        effect.before / effect.after
        for each in artifact.line()
        for effect in read_effects(each.folder)
        if effect.layer == WHOLE and effect.figure.startswith("multiply-accumulates")
    ]
    return math.prod(found) if found else None


def _faster(bench: Bench, wanted: Sequence[Candidate], control: Sequence[Candidate]) -> Faster:
    """The float graphs of a cell and its control, timed in turns in all engines; the best of each compared.

    Raises:
        EngineError: one of them could not be timed in any.
    """
    running = os.getloadavg()[0]
    table = bench.speed([*wanted, *control], beside_eager=False).value
    best = []
    for group in (wanted, control):
        timed = [each for each in group if each.id in table.speeds]
        if not timed:
            raise EngineError("; ".join(f"{each.id}: {table.skipped.get(each.id, 'no times')}" for each in group))
        best.append(min(timed, key=lambda each: statistics.median(table.speeds[each.id].per_image(_BATCH))))
    rounds = [table.speeds[each.id].per_image(_BATCH) for each in best]
    ratio = ratio_interval(rounds[1], rounds[0])
    return Faster(
        ratio=ratio.median,
        low=ratio.low,
        high=ratio.high,
        engine=best[0].execution.engine,
        control_engine=best[1].execution.engine,
        running=round(running, 1),
    )
