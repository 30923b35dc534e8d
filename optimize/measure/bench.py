"""Measures the artifacts of a run with every execution, and keeps each measurement in the store.

Accuracy and footprint are kept for each pair of artifact and execution. Speed is kept for the set that was measured in
turns: if any member changes, all are timed again, because times from different quarters of an hour are not comparable.
Each execution is measured in its own process, by the serving runtime. If everything is in the store, no process is
started.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

from optimize.context import Context
from optimize.data.loading import loader
from optimize.measure import processes
from optimize.measure.accuracy import Answers, answer, load_answers, save_answers
from optimize.measure.chosen_executions import wanted_executions
from optimize.measure.contention import Watch
from optimize.measure.figures import Footprint
from optimize.measure.key_inputs import surroundings
from optimize.measure.latency import Call, Speed, Turn, measure_speed
from optimize.measure.process_pool import MAX_BATCH, Loaded, Pool
from optimize.measure.processes import Worker
from optimize.measure.references import REFERENCES, pickled, references_on
from optimize.measure.timing import Timing
from optimize.measure.worker import Child
from optimize.store.artifact import Artifact
from optimize.store.atomic_files import write_json
from optimize.store.keys import AnswersKey, FootprintKey, Key, ProbeKey, SpeedKey, opening, paired
from optimize.store.objects import Store
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import execution_id, find_engine, pair_id
from serve.runtime.errors import EngineError, PipelineError, UserError, one_line
from serve.runtime.service.predictor import Predictor
from serve.runtime.tasks.base import find_task

_T = TypeVar("_T")

_SPEED_FILE = "speed.json"
_FOOTPRINT_FILE = "footprint.json"
_PROBE_FILE = "probe.json"
# The number of further images to try if none of those that a turn needs can be read.
_SPARE = 64


@dataclass(frozen=True)
class Candidate:
    """A pair to measure: an artifact and its execution."""

    artifact: Artifact
    execution: Execution

    @property
    def id(self) -> str:
        """See `pair_id`."""
        return pair_id(self.artifact.name, self.execution)

    @property
    def digest(self) -> str:
        """See `paired`."""
        return paired(self.artifact.card, self.execution)


@dataclass(frozen=True)
class Kept(Generic[_T]):
    """A measurement's value with its key in the store and its cost, whether it was measured now or earlier.

    Attributes:
        value: the measured value.
        key: key of the object in the store.
        seconds: how long the measurement took.
        cached: whether it was taken from the store.
        created: when it was measured, ISO 8601 in UTC.
    """

    value: _T
    key: str
    seconds: float
    cached: bool
    created: str


@dataclass(frozen=True)
class Weighed:
    """The result of opening a pair in its own process. ``provider`` is the library that executes it."""

    provider: str
    footprint: Footprint


@dataclass(frozen=True)
class Working:
    """An execution whose engine works on this machine. ``key`` is the key of the stored object that records it."""

    execution: Execution
    key: str


@dataclass(frozen=True)
class SpeedTable:
    """Times of a set measured in turns.

    Attributes:
        speeds: the speeds of pairs by id, and of references by name.
        references: names of the references that were timed.
        skipped: pairs and references that could not be timed, with the reason.
    """

    speeds: Mapping[str, Speed]
    references: tuple[str, ...]
    skipped: Mapping[str, str]


@dataclass(frozen=True)
class Bench:
    """Measures on one machine, with one data set, through one store. A context manager that ends its processes.

    Attributes:
        store: keeps the measurements.
        context: data, preprocessing, listener.
        timing: the executions to measure, and how to measure speed.
        devices: where to measure: existing devices as ``cpu``, ``cuda`` or ``cuda:N``.
        remeasure: never take speed from the store.
    """

    store: Store
    context: Context
    timing: Timing = field(default_factory=Timing)
    devices: tuple[str, ...] = ("cpu",)
    remeasure: bool = False
    _pool: Pool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pool", Pool(self.timing.batch_sizes, MAX_BATCH, self.context.listener))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    def candidates(self, artifact: Artifact, *, baseline: bool = False) -> list[Candidate]:
        """Return the artifact with each execution to measure, the preferred one first.

        Args:
            artifact: the artifact to measure.
            baseline: whether the others are compared with it. It has an execution even if no requested one can run it.

        Raises:
            EngineError: there is no execution. The message is the reason.
        """
        executions = wanted_executions(artifact.card, self.devices, self.timing.executions, needed=baseline)
        return [Candidate(artifact, execution) for execution in executions]

    def probe(self, execution: Execution) -> str:
        """Check once for this machine and its libraries whether an execution's engine works.

        Returns:
            Key of the object that records it.

        Raises:
            EngineError: the engine does not work. This is checked again each time.
        """

        def build(folder: Path) -> None:
            if (reason := self._prober.probe(execution.engine, execution.device_type)) is not None:
                raise EngineError(reason)
            write_json({}, folder / _PROBE_FILE)

        key = ProbeKey(
            engine=execution.engine,
            device=execution.device_type,
            **surroundings(execution, makers=(find_engine(execution.engine).open,)),
        )
        self.store.obtain(key.digest, build, about=f"{execution.engine} works on {execution.device_type}")
        return key.digest

    def working(self, *artifacts: Artifact) -> list[Working]:
        """Return the executions that run all of these artifacts on this machine, the preferred one first.

        Raises:
            EngineError: there are none. The message has the reason for each.
        """
        runs = [{execution_id(c.execution): c.execution for c in self.candidates(each)} for each in artifacts]
        found, reasons = [], []
        for name, execution in runs[0].items():
            if any(name not in others for others in runs):
                continue
            try:
                found.append(Working(execution, self.probe(execution)))
            except PipelineError as error:
                reasons.append(f"{name}: {error}")
        if not found:
            names = " and ".join(dict.fromkeys(artifact.name for artifact in artifacts))
            apart = f"none is common to {' and to '.join(', '.join(each) for each in runs)}"
            raise EngineError(f"no execution runs {names} here: {'; '.join(reasons) or apart}")
        return found

    def answers(self, candidate: Candidate) -> Kept[Answers]:
        """Return the pair's answers on the validation images."""

        def build(folder: Path) -> None:
            worker = self._load(candidate).worker
            with self._network(candidate, worker) as network:
                save_answers(answer(worker.ended, self.context, MAX_BATCH, network), folder)

        key = AnswersKey(
            artifact=opening(candidate.artifact.card),
            execution=candidate.execution.to_json(),
            # The run decides how validation images are prepared. The card's preprocessing is part of ``artifact``.
            preprocessing=self.context.preprocessing,
            images=self.context.data.val.fingerprint,
            skip_unreadable=self.context.skip_unreadable,
            max_batch=MAX_BATCH,
            task=self.context.task.name,
            **surroundings(candidate.execution, makers=(answer, type(self.context.task), *self._makers(candidate))),
        )
        return self._obtain(key, build, load_answers, candidate.artifact)

    def footprint(self, candidate: Candidate) -> Kept[Weighed]:
        """Measure load time and peak memory, with the largest batch that is timed."""

        def build(folder: Path) -> None:
            loaded = self._load(candidate)
            body = {"provider": loaded.provider, "footprint": loaded.footprint.to_json()}
            write_json(body, folder / _FOOTPRINT_FILE)

        def read(folder: Path) -> Weighed:
            body = _read(folder / _FOOTPRINT_FILE)
            return Weighed(body["provider"], Footprint.from_json(body["footprint"]))

        key = FootprintKey(
            artifact=opening(candidate.artifact.card),
            execution=candidate.execution.to_json(),
            batch=self.timing.batch_sizes[-1],
            **surroundings(candidate.execution, makers=self._makers(candidate)),
        )
        return self._obtain(key, build, read, candidate.artifact)

    def speed(self, candidates: Sequence[Candidate], *, beside_eager: bool = True) -> Kept[SpeedTable]:
        """Time the pairs and the eager references of the first pair's artifact in turns.

        If that artifact has no eager module, its nearest ancestor with one is used. Without ``beside_eager`` only the
        pairs take turns.
        """
        first = candidates[0].artifact
        eager = eager_origin(first) if beside_eager else None
        # Names are no inputs: two pairs that the runtime cannot tell apart are measured once.
        distinct = {candidate.digest: candidate for candidate in reversed(candidates)}
        references = references_on(self.devices) if beside_eager else {}

        def build(folder: Path) -> None:
            skipped: dict[str, str] = {}
            with self._pool.alone():
                eager_turns = self._eager_turns(eager, references, skipped)
                turns = self._turns(distinct, skipped) | eager_turns.turns
                speeds = measure_speed(
                    turns,
                    self.timing,
                    self.context.listener,
                    renew=lambda name: self._renewed(name, skipped) if name in distinct else eager_turns.renewed(name),
                    watch=Watch(self._pool.pids),
                )
            body = {name: _speed_as_json(speed) for name, speed in speeds.items()}
            write_json({"speeds": body, "skipped": skipped}, folder / _SPEED_FILE)

        executions = [candidate.execution for candidate in distinct.values()]
        makers = {maker for candidate in distinct.values() for maker in self._makers(candidate)}
        inputs = surroundings(*executions, makers=(measure_speed, pickled, *makers))
        key = SpeedKey(
            pairs=tuple(sorted(distinct)),
            references=tuple(references.values()),
            eager=eager.key if eager else None,
            timing=self.timing.of_a_turn,
            max_batch=MAX_BATCH,
            preprocessing=self.context.preprocessing,
            images=self.context.data.val.fingerprint,
            **inputs,
        )
        if self.remeasure:
            self.store.forget(key.digest)

        def obtain() -> Kept[SpeedTable]:
            return self._obtain(key, build, lambda folder: _speed_table(folder, candidates, references), first)

        found = obtain()
        if found.cached and found.value.skipped.keys() - references:  # memory may have been short then
            self.store.forget(key.digest)
            found = obtain()
        return found

    def release(self, candidate: Candidate) -> None:
        """End the pair's process, if it has one.

        If many pairs are measured one after the other, only few can stay alive.
        """
        self._pool.release(candidate.digest)

    @contextlib.contextmanager
    def _network(self, candidate: Candidate, worker: Worker) -> Iterator[Call | None]:
        """Return what gives the network's own outputs. None: answers are made of these.

        If the file has the task's ending, this is another process, so that the timed one stays as a server's.
        """
        if not find_task(candidate.artifact.card.task).ended:
            yield None
        elif not candidate.artifact.card.ending:
            yield worker.outputs
        else:
            with processes.worker() as other:
                other.open(candidate.artifact.folder, candidate.execution, MAX_BATCH)
                yield other.outputs

    def _load(self, candidate: Candidate) -> Loaded:
        return self._pool.load(candidate.digest, candidate.artifact.folder, candidate.execution)

    @functools.cached_property
    def _prober(self) -> Worker:
        return self._pool.another()

    def _turns(self, candidates: Mapping[str, Candidate], skipped: dict[str, str]) -> dict[str, Turn]:
        """Return the turn of each pair after warming it up. ``skipped`` gets the reason for each pair that fails."""
        found: dict[str, Turn] = {}
        for digest in sorted(candidates):
            try:
                worker = self._load(candidates[digest]).worker
                found[digest] = self._warmed(digest, worker, skipped)
            except PipelineError as error:
                skipped[digest] = str(error)
        return found

    def _renewed(self, digest: str, skipped: dict[str, str]) -> Turn:
        """Return the turn of a pair in a new, warmed-up process. The old process has ended."""
        try:
            return self._warmed(digest, self._pool.renew(digest), skipped)
        except PipelineError as error:
            skipped[digest] = str(error)
            raise

    def _eager_turns(
        self, eager: Artifact | None, references: Mapping[str, tuple[str, str]], skipped: dict[str, str]
    ) -> _EagerTurns:
        found = _EagerTurns(self, references, skipped)
        if not references:
            return found
        if eager is None:
            skipped |= dict.fromkeys(references, "a quantized artifact without an eager module cannot run here")
            return found
        try:
            found.body = pickled(eager.module, self.context.preprocessing, self.context.data.task)
        except Exception as error:  # noqa: BLE001 - the user's module may refuse in any way
            skipped |= dict.fromkeys(references, f"the module cannot be sent to another process: {one_line(error)}")
            return found
        for name in references:
            self.context.listener.progressed(0.0, f"warming up {name}")  # a compiler takes its time
            with contextlib.suppress(PipelineError):
                found.open(name)
        return found

    def _warmed(self, name: str, worker: Worker, skipped: dict[str, str]) -> Turn:
        """Send the images to a process and warm it up. Returns its turn, which records a failure in ``skipped``."""
        for size in self.timing.batch_sizes:
            worker.keep(self._batch(size))
        worker.warm(self.timing.batch_sizes)

        def turn(size: int) -> list[float]:
            try:
                return worker.turn(size, self.timing)
            except PipelineError as error:
                skipped[name] = str(error)
                raise

        return turn

    def _batch(self, size: int) -> torch.Tensor:
        """Return ``size`` validation images, repeated if there are fewer, ``uint8 (size, C, H, W)``."""
        split = self.context.data.val
        count = min(size, len(split))
        # Decode only as many as needed, because worker processes would read a large split. Try more if none can be
        # read.
        for limit in sorted({count, min(len(split), count + _SPARE), len(split)}):
            batches = loader(
                split,
                self.context.preprocessing,
                batch_size=count,
                device=torch.device("cpu"),
                limit=limit,
                skip_unreadable=1.0,  # measuring accuracy refuses them
            )
            try:
                images, _ = next(iter(batches))
            except UserError:
                if limit == len(split):
                    raise
            else:
                break
        return images.repeat(-(-size // len(images)), 1, 1, 1)[:size].contiguous()

    def _makers(self, candidate: Candidate) -> tuple[Callable[..., Any], ...]:
        """Return the functions that are called to open and run a pair."""
        return (Child, Predictor, find_engine(candidate.execution.engine).open, find_task(candidate.artifact.card.task))

    def _obtain(
        self, key: Key, build: Callable[[Path], None], read: Callable[[Path], _T], artifact: Artifact
    ) -> Kept[_T]:
        about = f"{artifact.card.model} on {self.context.data.name}: {key.kind}"
        stored = self.store.obtain(key.digest, build, about=about)
        return Kept(read(stored.folder), key.digest, stored.seconds, stored.cached, stored.created)


class _EagerTurns:
    """The turns of an eager module's references, each in its own process.

    Args:
        bench: provides the processes and images.
        references: kind and device of each reference, by name.
        skipped: receives the reason for each reference without turns.
    """

    def __init__(self, bench: Bench, references: Mapping[str, tuple[str, str]], skipped: dict[str, str]) -> None:
        self.turns: dict[str, Turn] = {}
        self.body = b""
        self._bench, self._references, self._skipped = bench, references, skipped
        self._workers: dict[str, Worker] = {}

    def open(self, name: str) -> Turn:
        """Start a new process for a reference, and end its previous one.

        Raises:
            PipelineError: the reference does not run here.
        """
        kind, device = self._references[name]
        if name in self._workers:
            self._workers.pop(name).close()
        worker = self._workers[name] = self._bench._pool.another()
        try:
            worker.reference(kind, device, self.body)
            self.turns[name] = self._bench._warmed(name, worker, self._skipped)
        except PipelineError as error:  # Inductor passes on any exception of its compiler
            self._skipped[name] = f"does not run here: {error}"
            worker.close()
            raise
        return self.turns[name]

    def renewed(self, name: str) -> Turn:
        """Return the turns in a new process. A compiled module keeps its process, because compiling takes minutes."""
        return self.turns[name] if REFERENCES[self._references[name][0]].compiled else self.open(name)


def _speed_as_json(speed: Speed) -> dict[str, Any]:
    return {
        "rounds": {str(size): turns for size, turns in speed.rounds.items()},
        "starts": list(speed.starts),
        "others": {str(size): shares for size, shares in speed.others.items()},
        "clocks": list(speed.clocks),
    }


def _speed_from_json(body: Mapping[str, Any]) -> Speed:
    rounds, others = ({int(size): turns for size, turns in body[name].items()} for name in ("rounds", "others"))
    return Speed(rounds, tuple(body["starts"]), others, tuple(body["clocks"]))


def eager_origin(artifact: Artifact) -> Artifact | None:
    """Return the artifact or its nearest ancestor with an eager float module. None if there is none."""
    origin: Artifact | None = artifact
    while origin is not None and (origin.kind != "module" or origin.build_module is None):
        origin = origin.parent
    return origin


def _speed_table(folder: Path, candidates: Sequence[Candidate], references: Mapping[str, object]) -> SpeedTable:
    body = _read(folder / _SPEED_FILE)
    found = {name: _speed_from_json(speed) for name, speed in body["speeds"].items()}
    digests = {candidate.id: candidate.digest for candidate in candidates} | {name: name for name in references}
    return SpeedTable(
        speeds={name: found[digest] for name, digest in digests.items() if digest in found},
        references=tuple(name for name in references if name in found),
        skipped={name: body["skipped"][digest] for name, digest in digests.items() if digest in body["skipped"]},
    )


def _read(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return body
