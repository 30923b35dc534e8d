"""What the benchmark of CPUs makes of its figures. Those here were made up; what follows was computed by hand."""

from __future__ import annotations

import argparse
import datetime
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optimize.measure.figures import Accuracy, Footprint, Latency, Measured, Ratio, Timed
from optimize.measure.rows import ModelFile, Pair, Reference, Row, Skip
from optimize.tracing.trace import trace
from serve.runtime.card.execution import Execution
from tests.benchmarked import benchmark

EVEN = Ratio(value=1.0, low=1.0, high=1.0, coverage=0.98, slower=False)


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The benchmark; the peers' passes that it brings go when these tests are over: the project does not have them."""
    with benchmark("benchmarks.cpu") as bench:
        yield bench


def timed(p50: float, images_s: float) -> Timed:
    latency = Latency(p50=p50, p95=2 * p50, p99=3 * p50, samples=100)
    return Timed(latency_ms=latency, throughput={1: 999.0, 16: images_s}, speedup=EVEN, vs_eager=EVEN)


def row(name: str, precision: str, **engines: tuple[float, float]) -> Row:
    """An artifact by some engines: the milliseconds of an image, and images a second at batch 16."""
    accuracy, footprint = (
        Accuracy(scores={"top1": 0.9, "top5": 1.0}, interval=(0.6, 1.0), images=10, answers="a"),
        Footprint(load_ms=1, memory_bytes=1),
    )
    pairs = [
        Pair(
            id=f"{name}@{engine}",
            execution=Execution(engine),
            measured=Measured(**dict(timed(*figures)), accuracy=accuracy, footprint=footprint),
        )
        for engine, figures in engines.items()
    ]
    skip = Skip(kind="cannot_run_here", reason="no")
    pairs.append(Pair(id=f"{name}@absent", execution=Execution("absent"), skip=skip))
    file = ModelFile(path="model", bytes=1, key="0", format="onnx", precision=precision)
    return Row(name=name, operation="pass", config={}, parent=None, file=file, pairs=tuple(pairs))


@pytest.fixture(scope="module")
def found(bench: Any) -> list[Any]:
    rows = (
        row("onnx", "float32", openvino=(8.0, 120.0)),
        row("onnx-int8", "int8", openvino=(2.0, 480.0), onnxruntime=(4.0, 500.0)),
        row("nncf", "int8", openvino=(3.0, 400.0)),
        row("ort-static", "int8", onnxruntime=(5.0, 450.0)),
    )
    references = (
        Reference(name="eager", measured=timed(16.0, 60.0)),
        Reference(name="torch.compile", skip=Skip(kind="failed", reason="no compiler")),
    )
    lines: list[Any] = bench.lines(SimpleNamespace(rows=rows, references=references))
    return lines


def test_every_execution_that_was_measured_is_a_line_the_fastest_first(found: list[Any]) -> None:
    assert [(line.name, line.p50, line.throughput, line.int8, line.ours) for line in found] == [
        ("onnx-int8@openvino", 2.0, 480.0, True, True),
        ("nncf@openvino", 3.0, 400.0, True, False),
        ("onnx-int8@onnxruntime", 4.0, 500.0, True, True),
        ("ort-static@onnxruntime", 5.0, 450.0, True, False),
        ("onnx@openvino", 8.0, 120.0, False, False),
        ("float@eager", 16.0, 60.0, False, False),
    ]


def test_the_verdict_holds_our_best_against_the_best_of_each_kind_at_each_batch(bench: Any, found: list[Any]) -> None:
    assert bench.verdict(found) == [
        # 8 / 2 and 3 / 2 milliseconds
        "Batch 1: our fastest int8 is onnx-int8@openvino. It is 4.00 times as fast as the fastest float execution "
        "(onnx@openvino). It is 1.50 times as fast as the fastest peer (nncf@openvino). "
        # 500 / 120 and 500 / 450 images a second
        "Batch 16: our fastest int8 is onnx-int8@onnxruntime. It is 4.17 times as fast as the fastest float execution "
        "(onnx@openvino). It is 1.11 times as fast as the fastest peer (ort-static@onnxruntime)."
    ]


def test_without_peers_the_verdict_is_about_floats_alone(bench: Any, found: list[Any]) -> None:
    (sentence,) = bench.verdict([line for line in found if line.artifact not in bench.PEERS])
    assert "4.00 times as fast as the fastest float execution (onnx@openvino). Batch 16" in sentence
    assert "peer" not in sentence


def test_the_table_holds_every_line_against_nncf(bench: Any, found: list[Any]) -> None:
    title, _, _, _, *rows = bench.table("resnet18", found)
    assert title == "## resnet18"
    assert rows[:6] == [
        "| **ours, onnx-int8** | openvino | 2.00 | 480 | 1.50× | 1.20× |",
        "| NNCF | openvino | 3.00 | 400 | 1.00× | 1.00× |",
        "| **ours, onnx-int8** | onnxruntime | 4.00 | 500 | 0.75× | 1.25× |",
        "| ONNX Runtime's static quantization | onnxruntime | 5.00 | 450 | 0.60× | 1.12× |",
        "| float graph | openvino | 8.00 | 120 | 0.38× | 0.30× |",
        "| float | eager | 16.00 | 60 | 0.19× | 0.15× |",
    ]
    assert rows[7] == bench.verdict(found)[0]
    alone = bench.table("resnet18", [line for line in found if line.artifact != "nncf"])
    assert "| **ours, onnx-int8** | openvino | 2.00 | 480 | – | – |" in alone


def test_the_page_has_what_was_called_when_how_long_and_every_table(bench: Any, found: list[Any]) -> None:
    pytest.importorskip("nncf")
    options = argparse.Namespace(image_size=96, rounds=5, seconds=0.25)
    text = bench.page({"resnet18": found, "resnet50": found[:3] + found[4:]}, options, "the command", 0.44)
    assert f"Made by `the command` on {datetime.date.today().isoformat()}: " in text
    assert "0.4 processes were running when it began." in text
    assert "10 classes at 96x96" in text
    assert "5 rounds of 0.25 s for each" in text
    for name in ("resnet18", "resnet50"):
        assert text.count(f"\n## {name}\n") == 1
    assert text.count("| NNCF | openvino | 3.00 | 400 | 1.00× | 1.00× |") == 2
    assert text.count("| ONNX Runtime's static quantization |") == 1


def test_each_call_of_a_module_is_one_of_its_own_to_torch_export(bench: Any) -> None:
    relu = nn.ReLU()
    peers = importlib.import_module("benchmarks.peers")
    alone = peers._each_call_alone(trace(nn.Sequential(relu, nn.Flatten(), relu)))
    graph = torch.export.export(alone, (torch.rand(2, 3),)).module().graph
    called = [[*node.meta["nn_module_stack"].values()][-1][0] for node in graph.nodes if "relu" in node.name]
    assert called[0] == "0"
    assert called[1].startswith("0_again")
