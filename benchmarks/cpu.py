"""INT8 and float on this machine's CPU, ours against the peers': ResNet-18, ResNet-50 and MobileNetV2 from pixels.

Everything is measured in one run, interleaved, each execution in a process of its own, by the code that measures runs
and serves archives: our artifacts in every engine that opens them; NNCF's quantization in OpenVINO; ONNX Runtime's
static quantization; the float graph in OpenVINO and ONNX Runtime; eager, channels-last and compiled PyTorch.

Needs the extra ``peers``: ``make bench-cpu``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import matplotlib as mpl
import torch
import torchvision
from torch import nn

import optimize as opt
from benchmarks import commands
from benchmarks.here import here
from benchmarks.peers import Nncf, OrtStatic
from optimize.measure.rows import Pair, Reference, Row
from optimize.report.comparison import Comparison

mpl.use("Agg")

MODELS = ("resnet18", "resnet50", "mobilenet_v2")
BATCHES = (1, 16)
#: What each artifact is called in the tables.
MAKERS = {
    "baseline": "float",
    "fuse": "float, fused",
    "onnx": "float graph",
    "onnx-floats": "float graph, floats in",
    "ptq": "ours, ptq",
    "onnx-int8": "ours, onnx-int8",
    "onnx-int8-floats": "ours, onnx-int8, floats in",
    "nncf": "NNCF",
    "ort-static": "ONNX Runtime's static quantization",
}
PEERS = ("nncf", "ort-static")


@dataclass(frozen=True)
class Line:
    """One execution: the artifact, what runs it, whether it computes in int8, and its times."""

    artifact: str
    runs_on: str
    int8: bool
    p50: float
    throughput: float

    @property
    def ours(self) -> bool:
        """Whether it is an int8 artifact of this project's."""
        return self.int8 and self.artifact not in PEERS

    @property
    def name(self) -> str:
        """Both, in one."""
        return f"{self.artifact}@{self.runs_on}"


def model(name: str, images: torch.Tensor) -> nn.Module:
    """A torchvision model of 10 classes, whose batch norms have the statistics of these images.

    Random weights: what is timed does not depend on them, as long as no activation dies out or explodes.
    """
    torch.manual_seed(0)
    module: nn.Module = getattr(torchvision.models, name)(num_classes=10)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # a mean over what was seen
            layer.reset_running_stats()
    module.train()
    with torch.no_grad():
        module(images)
    return module.eval()


def compare(name: str, options: argparse.Namespace) -> Comparison:
    """Make all artifacts of a model and measure them in turns."""
    settings = {"data": "digits", "image_size": options.image_size, "store": options.store, "device": "cpu"}
    plain = opt.load(getattr(torchvision.models, name)(num_classes=10), **settings)
    images = plain.session.context.example(64)
    base = opt.load(model(name, images), **settings)
    fused = opt.apply(base, opt.Fuse())
    graph = opt.apply(fused, opt.Onnx(), "onnx")
    floats = opt.apply(fused, opt.Onnx(input="float"), "onnx-floats")  # what the peers' tools take
    ptq = opt.apply(fused, opt.Ptq(), "ptq")
    variants = [
        base,
        fused,
        graph,
        floats,
        ptq,
        opt.apply(ptq, opt.OnnxInt8(), "onnx-int8"),
        opt.apply(ptq, opt.OnnxInt8(input="float"), "onnx-int8-floats"),
        opt.apply(floats, Nncf(), "nncf"),
        opt.apply(floats, OrtStatic(), "ort-static"),
    ]
    timing = opt.Timing(rounds=options.rounds, processes=1, batch_sizes=BATCHES, seconds=options.seconds)
    return opt.compare(*variants, timing=timing)


def lines(found: Comparison) -> list[Line]:
    """Every execution that was measured, the fastest at batch 1 first."""
    measured = [_line(row, pair) for row in found.rows for pair in row.pairs if pair.measured is not None]
    measured += [_reference(reference) for reference in found.references if reference.measured is not None]
    return sorted(measured, key=lambda line: line.p50)


def _line(row: Row, pair: Pair) -> Line:
    assert pair.measured is not None
    assert row.file is not None
    return Line(
        artifact=row.name,
        runs_on=pair.id.partition("@")[2],
        int8=not row.file.is_float,
        p50=pair.measured.latency_ms.p50,
        throughput=pair.measured.throughput[BATCHES[-1]],
    )


def _reference(reference: Reference) -> Line:
    assert reference.measured is not None
    measured = reference.measured
    return Line("float", reference.name, False, measured.latency_ms.p50, measured.throughput[BATCHES[-1]])


def table(name: str, found: list[Line]) -> list[str]:
    """The Markdown of one model: its executions, and what ours are worth beside the peers'."""
    nncf = next((line for line in found if line.artifact == "nncf"), None)
    rows = [
        f"## {name}",
        "",
        f"| | runs on | batch 1, p50 ms | batch {BATCHES[-1]}, images/s | "
        "batch 1 against NNCF in OpenVINO | "
        f"batch {BATCHES[-1]} |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for line in found:
        who = MAKERS.get(line.artifact, line.artifact)
        against = (
            f"{nncf.p50 / line.p50:.2f}× | {line.throughput / nncf.throughput:.2f}×" if nncf is not None else "– | –"
        )
        bold = "**" if line.ours else ""
        rows.append(f"| {bold}{who}{bold} | {line.runs_on} | {line.p50:.2f} | {line.throughput:,.0f} | {against} |")
    return [*rows, "", *verdict(found), ""]


def verdict(found: list[Line]) -> list[str]:
    """What the table says of our best int8 execution, in sentences."""
    ours = [line for line in found if line.ours]
    rivals = {"float execution": [line for line in found if not line.int8]}
    if peers := [line for line in found if line.artifact in PEERS]:
        rivals["peer"] = peers
    best, widest = min(ours, key=lambda line: line.p50), max(ours, key=lambda line: line.throughput)
    single, batch = [], []
    for what, others in rivals.items():
        rival = min(others, key=lambda line: line.p50)
        single.append(f"It is {rival.p50 / best.p50:.2f} times as fast as the fastest {what} ({rival.name}).")
        rival = max(others, key=lambda line: line.throughput)
        ratio = widest.throughput / rival.throughput
        batch.append(f"It is {ratio:.2f} times as fast as the fastest {what} ({rival.name}).")
    return [
        f"Batch 1: our fastest int8 is {best.name}. {' '.join(single)} "
        f"Batch {BATCHES[-1]}: our fastest int8 is {widest.name}. {' '.join(batch)}"
    ]


def plot(results: dict[str, list[Line]], path: Path) -> None:
    """Bars of the milliseconds at batch 1, one panel a model, ours in colour."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(results), 1, figsize=(8, 0.4 + 2.9 * len(results)), squeeze=False)
    for axes, (name, found) in zip(panels[:, 0], results.items(), strict=True):
        shown = list(reversed(found))
        colours = ["#1a7f4b" if line.ours else "#c2703d" if line.artifact in PEERS else "#9aa4b1" for line in shown]
        axes.barh([line.name for line in shown], [line.p50 for line in shown], color=colours)
        axes.bar_label(axes.containers[0], fmt="%.2f", padding=3, fontsize=7)
        axes.set_title(name, loc="left", fontsize=10)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.1)
    panels[-1, 0].set_xlabel(
        "ms, one image from pixels to logits (green: ours in int8, orange: the peers', grey: float)"
    )
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def page(results: dict[str, list[Line]], options: argparse.Namespace, command: str, load: float) -> str:
    """The document."""
    machine = here("torch", "onnxruntime-gpu", "openvino")
    body = [
        "# INT8 and float on a CPU",
        "",
        f"Made by `{command}` on {datetime.date.today().isoformat()}: {machine}, nncf {metadata.version('nncf')}. "
        f"{load:.1f} processes were running when it began.",
        "",
        f"The networks are torchvision's, with 10 classes at {options.image_size}x{options.image_size}. Their weights "
        "are random, with the batch-norm statistics of real images. All are calibrated on the same 256 images. A call "
        "takes pixels (uint8) to logits, so normalising is part of it. There are "
        f"{options.rounds} rounds of {options.seconds:g} s for each execution and batch size, in turns. Each execution "
        "has a process of its own, with its threads on all cores. The p50 is the median of the rounds' medians. The "
        "throughput is the median of the rounds.",
        "",
        "![milliseconds of one image](cpu.svg)",
        "",
    ]
    for name, found in results.items():
        body += table(name, found)
    return "\n".join(body)


def main() -> int:
    """Measure each model, write the page and its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="torchvision's names")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each execution")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one turn")
    parser.add_argument("--store", default="model_store", help="where artifacts are kept")
    parser.add_argument("--write", type=Path, default=None, help="the Markdown file to write, its plot beside it")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results = {}
    for name in options.models:
        results[name] = lines(compare(name, options))
        print("\n".join(table(name, results[name])), flush=True)
    if options.write is not None:
        plot(results, options.write.with_suffix(".svg"))
        made = commands.command("benchmarks.cpu", sys.argv[1:])
        options.write.write_text(page(results, options, made, load) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
