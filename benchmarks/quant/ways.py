"""The ways to quantize that are compared: what each starts from, which passes it is, which engines run it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal

import optimize as opt
from benchmarks.peers import Nncf, NncfAccuracy, OrtStatic, Pt2e
from optimize.passes.base import pass_of
from optimize.quantization.ranges import OBSERVERS
from optimize.variant import Variant
from serve.common.config import Config

Start = Literal["fused", "equalized", "floats"]

#: What every graph with ONNX's quantizers is run by; the first is what ours and ONNX Runtime's are made for.
_OF_GRAPHS = ("onnxruntime", "openvino")

#: Distributions whose versions decide what a peer makes.
_PEERS = ("nncf", "onnx", "onnxruntime-gpu", "openvino", "torch", "torchao")

#: The float network, in the table beside all others.
FLOAT = "float"

#: What ``ptq`` makes unasked, by either front end.
DEFAULTS = ("histogram", "histogram-pt2e")


@dataclass(frozen=True)
class Way:
    """One way to quantize.

    Attributes:
        name: the word for it in tables, and of its artifact.
        start: the float artifact that it takes.
        stages: the passes, by their settings; none for the float graph.
        engines: what runs the result; top-1 is compared in the first that does.
        ours: whether no peer made it.
    """

    name: str
    start: Start
    stages: tuple[Config, ...]
    engines: tuple[str, ...] = _OF_GRAPHS
    ours: bool = True


def ways(images: int) -> tuple[Way, ...]:
    """All of them, the float graph first; each calibrated on the same ``images`` training images."""

    def own(name: str, start: Start, ptq: opt.Ptq) -> Way:
        return Way(name, start, (ptq, opt.OnnxInt8()))

    corrected = opt.Ptq(images=images, bias_correction=True)
    return (
        Way(FLOAT, "floats", (), ours=False),
        *(own(name, "fused", opt.Ptq(observer=name, images=images)) for name in OBSERVERS),
        own("auto", "fused", opt.Ptq(observer="auto", images=images)),
        own("bias-correction", "fused", corrected),
        own("adaround", "fused", opt.Ptq(images=images, bias_correction=True, rounding="adaround")),
        own("equalized", "equalized", corrected),
        Way("histogram-pt2e", "fused", (opt.Ptq(images=images, front_end="pt2e"),), ("inductor",)),
        Way("ort-static", "floats", (OrtStatic(images=images),), ours=False),
        Way("nncf", "floats", (Nncf(images=images),), ("openvino",), ours=False),
        Way("nncf-accuracy", "floats", (NncfAccuracy(images=images),), ("openvino",), ours=False),
        Way("pt2e", "fused", (Pt2e(images=images),), ("inductor",), ours=False),
    )


@dataclass(frozen=True)
class Bed:
    """A float network, and what the ways start from.

    Attributes:
        base: as it was loaded.
        starts: what was made of it, by the word for it.
    """

    base: Variant
    starts: dict[Start, Variant] = field(default_factory=dict)

    def start(self, name: Start) -> Variant:
        """What a way starts from.

        Raises:
            NotApplicableError: there is nothing to equalize.
        """
        if name not in self.starts:
            self.starts[name] = self._made(name)
        return self.starts[name]

    def made(self, way: Way) -> list[Variant]:
        """What each stage of a way gives, what it starts from first.

        Raises:
            PassError: a stage's result is broken.
            NotApplicableError: it has nothing to do here, or what it needs is not installed.
        """
        made = [self.start(way.start)]
        for number, config in enumerate(way.stages, start=1):
            name = way.name if number == len(way.stages) else f"{way.name}-{pass_of(config).name}"
            made.append(opt.apply(made[-1], config, name))
        return made

    def inputs(self, way: Way) -> str:
        """SHA-256 of what a way's row is made from: the float network, the settings, the code and the libraries."""
        stages = [(pass_of(config).name, config.model_dump(mode="json")) for config in way.stages]
        code = sorted({pass_of(config).source_digest() for config in way.stages})
        libraries = {name: version for name in _PEERS if (version := _version(name))}
        body = json.dumps([self.base.artifact.key, way.start, stages, way.engines, code, libraries])
        return hashlib.sha256(body.encode()).hexdigest()

    def _made(self, name: Start) -> Variant:
        if name == "fused":
            try:
                return opt.apply(self.base, opt.Fuse())
            except opt.NotApplicableError:
                return self.base
        if name == "equalized":
            return opt.apply(self.start("fused"), opt.Equalize())
        return opt.apply(self.start("fused"), opt.Onnx(input="float"), FLOAT)  # what the peers' tools take


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
