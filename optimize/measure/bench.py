"""Measures the artifacts of a run through the serving runtime, each measurement kept in the store.

Accuracy and footprint belong to one artifact and are kept for it. Speed belongs to the set that was
measured in turns: if any member of the set changes, all are timed again, because times of two
different quarters of an hour are not comparable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from optimize.context import Context
from optimize.data.loading import loader
from optimize.measure.accuracy import Answers, answer, load_answers, save_answers
from optimize.measure.footprint import FootprintMeter
from optimize.measure.latency import Call, Speed, measure_speed
from optimize.measure.machine import machine, versions
from optimize.measure.references import REFERENCES, references
from optimize.measure.rows import Footprint
from optimize.measure.timing import Timing
from optimize.store.artifact import Artifact
from optimize.store.files import write_json
from optimize.store.keys import AnswersKey, FootprintKey, Key, SpeedKey, opened, opening
from optimize.store.objects import Store
from optimize.store.sources import code_of
from serve.runtime.engines.base import engines_for, preferred
from serve.runtime.predictor import Predictor

_T = TypeVar("_T")

_MAX_BATCH = 64
_SPEED_FILE = "speed.json"
_FOOTPRINT_FILE = "footprint.json"


@dataclass(frozen=True)
class Kept(Generic[_T]):
    """A measurement's value, the key that the store has it by, and what taking it cost, now or at another time.

    Attributes:
        value: what was measured.
        key: of the object in the store.
        seconds: how long the measuring took.
        cached: whether it was taken from the store.
        created: when it was measured, ISO 8601 in UTC.
    """

    value: _T
    key: str
    seconds: float
    cached: bool
    created: str


@dataclass(frozen=True)
class SpeedTable:
    """Times of a set measured in turns.

    Attributes:
        speeds: by artifact's or reference's name.
        skipped: references that do not run here, with the reason.
        providers: what executed each artifact.
    """

    speeds: Mapping[str, Speed]
    skipped: Mapping[str, str]
    providers: Mapping[str, str]


@dataclass(frozen=True)
class Bench:
    """Measures on one machine, with one data set, through one store.

    With ``remeasure`` speed is never taken from the store.
    """

    store: Store
    context: Context
    remeasure: bool = False

    def refuses(self, artifact: Artifact) -> str | None:
        """Why this artifact cannot be measured in this run; None if it can."""
        device, wanted = self.context.device.type, artifact.card.device
        if wanted in ("any", device):
            return None
        if wanted == "cuda":
            return "runs on CUDA only, and this run is on the CPU" + (
                "" if torch.cuda.is_available() else " (this machine has no CUDA device)"
            )
        return "runs on the CPU only; measure it with DEVICE=cpu"

    def answers(self, artifact: Artifact) -> Kept[Answers]:
        """The artifact's answers on the validation images."""

        def build(folder: Path) -> None:
            save_answers(answer(self._open(artifact), self.context), folder)

        key = AnswersKey(
            artifact=opening(artifact.card),
            # How the validation images are prepared is the run's; the card's is in what the artifact is opened with.
            preprocessing=self.context.preprocessing,
            images=self.context.data.val.fingerprint,
            skip_unreadable=self.context.skip_unreadable,
            max_batch=_MAX_BATCH,
            **self._bench(artifact, makers=(answer, Predictor)),
        )
        return self._obtain(key, build, load_answers, artifact)

    def footprint_meter(self) -> FootprintMeter:
        """What `footprint` measures with; to be used as a context."""
        return FootprintMeter(str(self.context.device), torch.get_num_threads())

    def footprint(self, artifact: Artifact, batch: int, meter: FootprintMeter) -> Kept[Footprint]:
        """Load time and peak memory, see `FootprintMeter.measure`."""

        def build(folder: Path) -> None:
            write_json(meter.measure(artifact.folder, batch).to_json(), folder / _FOOTPRINT_FILE)

        bench = self._bench(artifact, makers=(FootprintMeter,))
        key = FootprintKey(artifact=opening(artifact.card), batch=batch, **bench)
        return self._obtain(key, build, lambda folder: Footprint.from_json(_read(folder / _FOOTPRINT_FILE)), artifact)

    def speed(self, artifacts: Sequence[Artifact], timing: Timing) -> Kept[SpeedTable]:
        """Times of the artifacts and of the eager references of the first one, in turns.

        An artifact without an eager module is represented by the nearest ancestor that has one.
        """
        eager = eager_origin(artifacts[0])
        # Names are no inputs: two that the runtime cannot tell apart are measured once.
        distinct = {opened(artifact.card): artifact for artifact in reversed(artifacts)}

        def build(folder: Path) -> None:
            predictors = {digest: self._open(distinct[digest]) for digest in sorted(distinct)}
            for predictor in predictors.values():
                predictor.warm_up(timing.batch_sizes)
            calls: dict[str, Call] = {digest: predictor.probabilities for digest, predictor in predictors.items()}
            skipped = {}
            for name, found in self._references(eager, timing):
                if isinstance(found, str):
                    skipped[name] = found
                else:
                    calls[name] = found
            speeds = measure_speed(calls, self._batch, self.context.device, timing, self.context.listener)
            write_json(
                {
                    "speeds": {name: {str(k): v for k, v in speed.rounds.items()} for name, speed in speeds.items()},
                    "skipped": skipped,
                    "providers": {digest: predictor.engine.provider for digest, predictor in predictors.items()},
                },
                folder / _SPEED_FILE,
            )

        key = SpeedKey(
            artifacts=tuple(sorted(distinct)),
            eager=eager.key if eager else None,
            timing=timing.model_dump(mode="json"),
            max_batch=_MAX_BATCH,
            preprocessing=self.context.preprocessing,
            images=self.context.data.val.fingerprint,
            **self._bench(*distinct.values(), makers=(measure_speed, references, Predictor)),
        )
        if self.remeasure:
            self.store.forget(key.digest)
        return self._obtain(key, build, lambda folder: _speed_table(folder, artifacts), artifacts[0])

    def _references(self, eager: Artifact | None, timing: Timing) -> Iterable[tuple[str, Call | str]]:
        if eager is None:
            return ((name, "no eager module to run: of a quantized artifact alone") for name in REFERENCES)
        device = self.context.device
        return references(eager.module, self.context.preprocessing, device, self._warm(timing))

    def _open(self, artifact: Artifact) -> Predictor:
        return Predictor(artifact.folder, preferred(artifact.card, str(self.context.device)), max_batch=_MAX_BATCH)

    def _batch(self, size: int) -> torch.Tensor:
        """``size`` validation images, repeated if there are fewer, ``uint8 (size, C, H, W)``."""
        split = self.context.data.val
        count = min(size, len(split))
        # Only so many are decoded: a large split would be read by worker processes.
        batches = loader(
            split,
            self.context.preprocessing,
            batch_size=count,
            device=torch.device("cpu"),
            limit=count,
            skip_unreadable=1.0,  # accuracy is where they are refused
        )
        images, _ = next(iter(batches))
        return images.repeat(-(-size // len(images)), 1, 1, 1)[:size].contiguous()

    def _warm(self, timing: Timing) -> Any:
        def warm(call: Call) -> None:
            for size in timing.batch_sizes:
                images = self._batch(size)
                for _ in range(3):
                    call(images)

        return warm

    def _bench(self, *artifacts: Artifact, makers: Sequence[Callable[..., Any]]) -> dict[str, Any]:
        """The inputs that all keys of measurements have in common; ``makers`` are called to measure."""
        found = machine(self.context.device)
        engines = [entry.open for artifact in artifacts for entry in engines_for(artifact.card)]
        return {
            "device": str(self.context.device),
            "machine": {name: found[name] for name in ("cpu", "cores", "threads", "memory_bytes", "gpu")},
            "libraries": versions(),
            "code": code_of(*makers, *engines),
        }

    def _obtain(
        self, key: Key, build: Callable[[Path], None], read: Callable[[Path], _T], artifact: Artifact
    ) -> Kept[_T]:
        about = f"{artifact.card.model} on {self.context.data.name}: {key.kind}"
        stored = self.store.obtain(key.digest, build, about=about)
        return Kept(read(stored.folder), key.digest, stored.seconds, stored.cached, stored.created)


def eager_origin(artifact: Artifact) -> Artifact | None:
    """The artifact itself, or the nearest that it was made from, that has an eager float module; None if none has."""
    origin: Artifact | None = artifact
    while origin is not None and (origin.kind != "module" or origin.build_module is None):
        origin = origin.parent
    return origin


def _speed_table(folder: Path, artifacts: Sequence[Artifact]) -> SpeedTable:
    body = _read(folder / _SPEED_FILE)
    found = {name: Speed({int(size): turns for size, turns in r.items()}) for name, r in body["speeds"].items()}
    speeds = {artifact.name: found[opened(artifact.card)] for artifact in artifacts}
    speeds |= {name: speed for name, speed in found.items() if name not in body["providers"]}
    providers = {artifact.name: body["providers"][opened(artifact.card)] for artifact in artifacts}
    return SpeedTable(speeds, body["skipped"], providers)


def _read(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return body
