"""What is done with one model: its stages, in order, each from what the stage before it left in the store."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.zoo.agreement import Certify, agreements, disagreeing
from benchmarks.zoo.record import CLEAR_DB, ModelRecord, Passed, Signal, Speed
from benchmarks.zoo.weights import fit_head, initialise
from optimize.context import Context
from optimize.data.formats.base import open_data
from optimize.data.loading import loader
from optimize.data.pixels import decoded
from optimize.data.records import Split
from optimize.data.splits import subset
from optimize.errors import PassError
from optimize.measure.bench import Bench
from optimize.measure.references import REFERENCES
from optimize.measure.rows import Reference, Row
from optimize.measure.timing import Timing
from optimize.models.checkpoint import Checkpoint, read_checkpoint
from optimize.models.model_names import resolve_model, with_named_weights
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.source import ModelSource
from optimize.models.weight_matching import load_into
from optimize.passes.fuse import Fuse
from optimize.passes.onnx import Onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.passes.reestimate import reestimate
from optimize.quantization.targets import x86_target
from optimize.run.report_rows import measure
from optimize.run.session import Session, Step
from optimize.store.objects import Store
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from serve.common.config import Config
from serve.runtime.engines.base import executions_for
from serve.runtime.errors import UserError, one_line
from serve.runtime.images.image_preprocessing import normalise

_CPU = torch.device("cpu")
_IMAGENET = 1000
#: Epochs, over the few images that its head is fitted on, in which training brings a drawn network's images out of
#: rounding (`CLEAR_DB`). Narrow and deep networks need it: MNASNet, ShuffleNet, MobileNetV3.
_MOST_EPOCHS = 8


@dataclass(frozen=True)
class Settings:
    """How much is done with each model.

    Attributes:
        image_size: side of the images in pixels, raised to what a network takes.
        calibration: images that ranges and norms are found on.
        fitting: images that the head is fitted on.
        judging: images that agreement and top-1 are taken on.
        named_weights: take torchvision's own weights where they are on this machine or can be downloaded.
        large: bytes of float weights from which each stage has a process of its own, and executions are timed one after
            another, and not in turns: what the heap keeps of one, and all of them at once, would be more than the cap.
        speed: whether executions are timed now; a model that was not timed can be, later.
    """

    image_size: int = 224
    calibration: int = 64
    fitting: int = 256
    judging: int = 64
    named_weights: bool = True
    large: int = 1 << 30
    speed: bool = True

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that are wanted, in order."""
        return tuple(stage for stage in STAGES if self.speed or stage != "speed")

    def to_json(self) -> str:
        """For another process; `from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


#: Passes by the stage's name: what it goes on from, and the pass's settings for so many images to calibrate on.
PASSES: Mapping[str, tuple[str, Callable[[int], Config]]] = {
    "fuse": ("baseline", lambda images: Fuse()),
    "onnx": ("fuse", lambda images: Onnx()),
    "ptq": ("fuse", lambda images: Ptq(images=images)),
    "onnx-int8": ("ptq", lambda images: OnnxInt8()),
    "ptq-tensorrt": ("fuse", lambda images: Ptq(images=images, target="tensorrt")),
    "onnx-int8-tensorrt": ("ptq-tensorrt", lambda images: OnnxInt8()),
}
#: Every stage, in order.
STAGES = ("baseline", *PASSES, "agreement", "agreement-tensorrt", "speed")


def passes(record: ModelRecord) -> bool:
    """Whether a model was made, at every stage, into what agrees; it may not be timed yet."""
    made = {name: stage.status == "ok" for name, stage in record.stages.items()}
    return all(made.get(name, name == "speed") for name in STAGES)


@dataclass
class Model:
    """One model on its way through the stages; what it has made is in the store and in the record.

    Past ``until``, of `time.monotonic`, no stage is begun.
    """

    name: str
    store: Path
    settings: Settings
    record: ModelRecord
    keep: Callable[[ModelRecord], None]
    certify: Certify = agreements
    until: float = math.inf
    steps: dict[str, Step] = field(default_factory=dict)

    def run(self) -> ModelRecord:
        """Go through the stages that the record does not have yet.

        What they go on from is taken from the store, or made again where that was removed; what nothing of them goes
        on from is left. Of a large network it is one stage, and the next call's is another.
        """
        for stage in self.settings.stages:
            if time.monotonic() > self.until:
                break
            if stage in self.record.stages:
                continue
            self._note(running=stage)
            begun = _processor_s()
            try:
                passed = self._stage(stage)
            except MissingError as error:
                passed = Passed(status="not made", reason=str(error))
            except Exception as error:  # noqa: BLE001 - one model's fault, whatever it is, is what the table is to say
                said = str(error) if isinstance(error, UserError) else one_line(error)
                passed = Passed(status="failed", reason=said, seconds=_processor_s() - begun)
            self._note(running=None, stages={**self.record.stages, stage: passed})
            if self._large:
                break
        return self.record

    @property
    def _large(self) -> bool:
        return 4 * self.record.parameters >= self.settings.large

    def _note(self, **changes: object) -> None:
        self.record = self.record.model_copy(update=changes)
        self.keep(self.record)

    def _stage(self, stage: str) -> Passed:
        begun = _processor_s()
        if stage == "speed":
            self._note(speed=self._speed())
            return Passed(status="ok", seconds=_processor_s() - begun)
        if stage.startswith("agreement"):
            graph = self._made(stage.replace("agreement", "onnx-int8")).artifact
            found = self.certify(graph, self._made("fuse").artifact.module(), self._pixels())
            wrong = disagreeing(found)
            seconds = _processor_s() - begun
            return Passed(status="failed" if wrong else "ok", reason=wrong, seconds=seconds, agreements=found)
        artifact = self._make(stage).artifact
        size = sum(path.stat().st_size for path in artifact.folder.glob(f"{artifact.card.file}*"))
        return Passed(status="ok", seconds=_processor_s() - begun, bytes=size, notes=artifact.card.notes)

    def _make(self, stage: str) -> Step:
        """A pass's result or the baseline, by what it goes on from."""
        if stage not in self.steps:
            if stage == "baseline":
                self.steps[stage] = self._baseline()
            else:
                parent, config = PASSES[stage]
                artifact = self._made(parent).artifact
                self.steps[stage] = self._session.apply(artifact, config(self.settings.calibration), stage)
        return self.steps[stage]

    def _made(self, stage: str) -> Step:
        """What a stage has made, or makes again where it is not in the store any more.

        Raises:
            MissingError: it made nothing.
        """
        known = self.record.stages.get(stage)
        if known is None or known.status != "ok":
            raise MissingError(f"there is no {stage}")
        return self._make(stage)

    @functools.cached_property
    def _source(self) -> tuple[ModelSource, Checkpoint | None]:
        """The architecture, and its library's own weights where they can be had."""
        source = resolve_model(self.name)
        if self.settings.named_weights and source.origin == "torchvision":
            with contextlib.suppress(UserError):
                return with_named_weights(source, "DEFAULT")
        return source, None

    @property
    def _weights(self) -> Path:
        """The file of the network's weights, once it is made."""
        return self.store / "weights.pth"

    @functools.cached_property
    def _session(self) -> Session:
        source, _ = self._source
        data = open_data("digits")
        data = dataclasses.replace(data, val=subset(data.val, self.settings.judging), val_of=len(data.val))
        side = source.only_size or source.legal_size(self.settings.image_size)
        side = self.record.image_size or side  # what was begun goes on as it began
        preprocessing = choose_preprocessing(source, data, side).preprocessing
        return Session(Store(self.store), source, Context(data, preprocessing, _CPU))

    def _baseline(self) -> Step:
        """The network with its weights, its head fitted to the data; weights are drawn once."""
        session, file = self._session, self._weights
        if file.exists():
            return session.baseline(checkpoint=read_checkpoint(file))
        source, weights = self._source
        side = session.context.preprocessing.crop[0]
        self._note(weights=source.declared_by if weights is not None else "random", image_size=side)
        if (module := self._library_module()) is not None:
            signal = self._fit_head(module)
        else:
            module = self._drawn_module()
            signal = self._strengthened(module, self._fit_head(module))
        self._note(signal=signal, parameters=sum(parameter.numel() for parameter in module.parameters()))
        torch.save(module.state_dict(), file)
        del module
        return session.baseline(checkpoint=read_checkpoint(file))

    def _library_module(self) -> nn.Module | None:
        """The library's weights, but for the head; None where there are none."""
        source, checkpoint = self._source
        if checkpoint is None:
            return None
        classes, side = len(self._session.context.data.classes), self._session.context.preprocessing.crop[0]
        whole = source.build(_IMAGENET, side)
        load_into(whole, checkpoint, self.store)
        module = source.build(classes, side)
        own, state = module.state_dict(), whole.state_dict()
        fitting = {name: value for name, value in state.items() if value.shape == own[name].shape}
        metadata = getattr(own, "_metadata", None)
        merged = OrderedDict(own | fitting)
        merged._metadata = metadata  # type: ignore[attr-defined]  # without it MNASNet takes weights for old ones
        module.load_state_dict(merged)
        return module.eval()

    def _drawn_module(self) -> nn.Module:
        source, context = self._source[0], self._session.context
        torch.manual_seed(context.seed)
        module = source.build(len(context.data.classes), context.preprocessing.crop[0])
        images, _ = next(self._batches(context.data.train, self.settings.calibration, size=32))
        initialise(module, images, widest=x86_target().weight_max)
        return module

    def _fit_head(self, module: nn.Module) -> Signal:
        data = self._session.context.data
        return fit_head(
            module,
            lambda: self._batches(data.train, self.settings.fitting),
            lambda: self._batches(data.val, self.settings.judging),
            widest=x86_target().weight_max,
        )

    def _strengthened(self, module: nn.Module, signal: Signal) -> Signal:
        """Train a drawn network whose images do not stand out of rounding, a little, until they do."""
        context, images = self._session.context, self.settings.fitting
        data = dataclasses.replace(context.data, train=subset(context.data.train, images))
        few = dataclasses.replace(context, data=data)
        config, epochs = TrainingConfig(epochs=2, batch_size=16, learning_rate=0.01, augment="none"), 0
        careful = TrainingConfig(epochs=2, batch_size=16, optimizer="adamw", augment="none")
        if any(isinstance(layer, nn.LayerNorm) for layer in module.modules()):
            config = careful  # SGD makes NaNs of XCiT
        while signal.rounding_db < CLEAR_DB and epochs < _MOST_EPOCHS:
            before = copy.deepcopy(module.state_dict())
            for layer in module.modules():
                if isinstance(layer, _BatchNorm):
                    layer.momentum = 0.1  # they had the mean over all that they saw, of older weights too
            try:
                train(module, few, config)
                reestimate(module, few, images)
                found = self._fit_head(module)
            except PassError:  # its loss is no number, or what its head reads: ConvMixer's weights grow until there
                if config is careful:
                    raise
                module.load_state_dict(before)
                config = careful
                continue
            signal, epochs = found, epochs + config.epochs
            self._note(weights=f"random, trained for {epochs} epochs")
        return signal

    def _batches(self, split: Split, count: int, size: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Normalised images ``float32`` and labels."""
        preprocessing = self._session.context.preprocessing
        for images, labels in loader(split, preprocessing, batch_size=size, device=_CPU, limit=min(count, len(split))):
            yield normalise(images, preprocessing, _CPU, torch.float32), labels

    def _pixels(self) -> torch.Tensor:
        """The images that are judged by, ``uint8 (N, C, H, W)``."""
        context = self._session.context
        return decoded(context.data.val, context.preprocessing)

    def _speed(self) -> Speed:
        """The fastest execution of the program and the graph in int8, and of all in float."""
        steps = [self._made("fuse")]
        for name in ("onnx", "ptq", "onnx-int8"):
            with contextlib.suppress(MissingError):
                steps.append(self._made(name))
        timing = Timing(rounds=7, processes=1, batch_sizes=(1,), seconds=0.15)
        context = self._session.context
        if self._large:
            REFERENCES.clear()  # each is a process that holds all weights in float
        groups = [(steps, timing)]
        if self._large:
            groups = [
                ([step], timing.model_copy(update={"executions": (execution,)}))
                for step in steps
                for execution in executions_for(step.artifact.card, "cpu")
            ]
        times: list[_Time] = []
        for group, each in groups:
            found = measure(group, Bench(self._session.store, context, each, ("cpu",)))
            times += _times(found.rows, found.references)
        floats, integers = ([time for time in times if time.integers is kind] for kind in (False, True))
        if not integers:
            raise MissingError("there is no int8 execution to time")
        slow, fast = (min(group, key=lambda time: time.p50) for group in (floats, integers))
        interval = (None, None) if self._large else (fast.low, fast.high)
        return Speed(
            int8=fast.name, int8_ms=fast.p50, float_=slow.name, float_ms=slow.p50, low=interval[0], high=interval[1]
        )


def _processor_s() -> float:
    """Processor time so far, of this process and of those it has waited for; a busy machine adds little to it."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class MissingError(Exception):
    """What a stage goes on from was not made; that stage says why."""


@dataclass(frozen=True)
class _Time:
    """An execution, whether it computes with integers, its p50 in ms, and how much faster it is than the best float."""

    name: str
    integers: bool
    p50: float
    low: float
    high: float


def _times(rows: Sequence[Row], references: Sequence[Reference]) -> Iterator[_Time]:
    for row in rows:
        for pair in row.pairs:
            if pair.measured is not None and row.file is not None:
                speedup = pair.measured.speedup
                yield _Time(pair.id, not row.file.is_float, pair.measured.latency_ms.p50, speedup.low, speedup.high)
    for reference in references:
        if reference.measured is not None:
            speedup = reference.measured.speedup
            yield _Time(reference.name, False, reference.measured.latency_ms.p50, speedup.low, speedup.high)
