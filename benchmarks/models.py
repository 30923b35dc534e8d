"""``make optimize`` to its end for models of several kinds, as a page.

``make bench-models`` writes docs/benchmarks/models.md.

What was made and timed before comes from the store, whose keys know what it depends on: it can be stopped and goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks import commands
from optimize.measure.rows import Report, Row
from optimize.report.number_format import percent, points


@dataclass(frozen=True)
class Case:
    """A model as users bring it: what it is, its options, and how its baseline is trained if not by default.

    ``baseline`` replaces the training settings of the default recipe; ``qat`` trains with the same optimizer and the
    settings that are given for it.
    """

    kind: str
    model: str
    options: tuple[str, ...] = ()
    baseline: Mapping[str, Any] = field(default_factory=dict)
    qat: Mapping[str, Any] = field(default_factory=dict)


#: Attention learns little of 1,300 images in eight epochs.
_ATTENTION = {"optimizer": "adamw", "learning_rate": 2e-4, "batch_size": 32, "epochs": 10, "precision": "bfloat16"}

CASES = (
    Case("torchvision, depthwise convolutions", "mobilenet_v2"),
    Case("torchvision, layer norms", "convnext_tiny", ("--image-size", "64"), {"optimizer": "adamw", "epochs": 8}),
    Case("torchvision, attention", "vit_b_16", ("--image-size", "64"), _ATTENTION, {"epochs": 1}),
    Case("timm", "timm:efficientnet_lite0"),
    Case("a user's own, of several files", "examples/neighbours/net.py:build"),
)


@dataclass(frozen=True)
class Finished:
    """A case that ran to its end."""

    case: Case
    report: Report


def take(case: Case, store: Path, remeasure: bool = False) -> Finished:
    """Run the command line on a case; what the store has is not made again.

    Args:
        case: what to run.
        store: where artifacts are kept.
        remeasure: time everything anew, where the artifacts were made on a machine that had other work.

    Raises:
        subprocess.CalledProcessError: it ended with another code than 0.
    """
    command = [sys.executable, "-m", "optimize", "run", case.model, "--store", str(store), "--json", *case.options]
    command += ["--remeasure"] if remeasure else []
    with tempfile.TemporaryDirectory() as scratch:
        if case.baseline:
            command += ["--recipe", str(_recipe(case, Path(scratch)))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Finished(case, Report.from_json(json.loads(done.stdout)))


def _recipe(case: Case, folder: Path) -> Path:
    recipe = yaml.safe_load(Path("optimize/run/recipes/default.yaml").read_text(encoding="utf-8"))
    recipe["baseline"] = dict(case.baseline)
    for stage in recipe["stages"]:
        if stage["pass"] == "qat":
            stage["config"] = {"optimizer": case.baseline["optimizer"], **case.qat}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def page(done: Sequence[Finished], command: str) -> str:
    """The document.

    Args:
        done: the cases in the order of the table.
        command: that made it.
    """
    return "\n".join([*_head(done, command), "", *_accuracies(done), "", *_speeds(done), "", *_words(done), ""])


def _head(done: Sequence[Finished], command: str) -> Iterator[str]:
    report = done[0].report
    names = [name for name in ("torch", "torchvision", "onnxruntime-gpu", "openvino") if name in report.versions]
    versions = ", ".join(f"{name} {report.versions[name]}" for name in names)
    days = sorted({each.report.measurement.taken.date().isoformat() for each in done})
    yield "# Models of several kinds"
    yield ""
    yield (
        f"Made by `{command}`, timed on {' and '.join(days)}: `make optimize` from nothing to the recommendation. "
        f"{report.machine.cpu}, {report.machine.cores} cores, {versions}."
    )
    yield ""
    yield (
        f"Each is trained here on {report.data.name} ({report.data.train:,} training images). The recipe is the "
        f"default one, unless the table says otherwise. All are judged on the same {report.data.val:,} images. "
        "Differences are paired, with 95 % intervals. The training is short: compare each step with its own baseline."
    )


def _accuracies(done: Sequence[Finished]) -> Iterator[str]:
    yield "| model | what it is | options | top-1 of the baseline | `ptq` | `onnx-int8` | `qat` | `onnx-int8-qat` |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for each in done:
        rows = {row.name: row for row in each.report.rows}
        cells = " | ".join(_change(rows[name]) for name in ("ptq", "onnx-int8", "qat", "onnx-int8-qat"))
        yield (
            f"| `{each.case.model}` | {each.case.kind} | {_options(each.case)} | "
            f"{_top1(each.report.baseline)} | {cells} |"
        )


def _options(case: Case) -> str:
    told = [f"`{' '.join(case.options)}`"] if case.options else []
    told += [f"{name}: {value}" for name, value in case.baseline.items()]
    told += [f"{name} of `qat`: {value}" for name, value in case.qat.items()]
    return ", ".join(told)


def _top1(row: Row) -> str:
    return percent(row.measured.accuracy.score) if row.measured else "–"


def _change(row: Row) -> str:
    if row.measured is None:
        return f"not measured: {row.skip}"
    difference = row.measured.accuracy.difference
    assert difference is not None
    return f"{points(difference.delta)} [{points(difference.low)}, {points(difference.high)}]"


def _speeds(done: Sequence[Finished]) -> Iterator[str]:
    yield "| model | recommended | its p50 | fastest float | times as fast | file | baseline's file |"
    yield "|---|---|---:|---|---:|---:|---:|"
    for each in done:
        report = each.report
        chosen, pair = report.chosen, report.chosen_pair
        if chosen is None or pair is None or pair.measured is None or chosen.file is None:
            yield f"| `{each.case.model}` | none: {report.recommendation.rule} | | | | | |"
            continue
        baseline = report.baseline.file
        assert baseline is not None
        yield (
            f"| `{each.case.model}` | {pair.id} | {pair.measured.latency_ms.p50:.2f} ms | {report.yardstick} | "
            f"{pair.measured.speedup.value:.2f}× | {chosen.file.bytes / 1e6:.1f} MB | {baseline.bytes / 1e6:.1f} MB |"
        )


def _words(done: Sequence[Finished]) -> Iterator[str]:
    """What was not made and why, and where torch's program and the ONNX graph of the same integers differ."""
    for each in done:
        rows = {row.name: row for row in each.report.rows}
        torch_int8, onnx_int8 = rows["ptq"].measured, rows["onnx-int8"].measured
        if torch_int8 and onnx_int8:
            apart = abs(torch_int8.accuracy.score - onnx_int8.accuracy.score)
            yield f"- `{each.case.model}`: `ptq` and `onnx-int8` are {apart * 100:.2f} points of top-1 apart."
        for row in each.report.rows:
            if row.skip and row.name != "half":
                yield f"- `{each.case.model}`, {row.name}: {row.skip}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each case in turn, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    models = [case.model for case in CASES]
    parser.add_argument("--only", nargs="+", choices=models, default=models, metavar="MODEL", help="by default all")
    parser.add_argument("--store", type=Path, default=Path("model_store"))
    parser.add_argument("--remeasure", action="store_true", help="time anew what was made before")
    parser.add_argument("--write", type=Path, default=None, help="the Markdown file to write")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    done = []
    for case in CASES:
        if case.model not in options.only:
            continue
        try:
            done.append(take(case, options.store, options.remeasure))
        except subprocess.CalledProcessError as error:  # whose reason it has written itself
            return int(error.returncode)
        text = page(done, commands.command("benchmarks.models", words, told=("--only",)))
        if options.write is not None:
            options.write.write_text(text, encoding="utf-8")
    if options.write is None:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
