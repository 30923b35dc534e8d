"""What each layer takes: names, MACs and bytes against sums by hand, shares, the trace, and what is refused."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

import optimize as opt
from optimize import cli
from optimize.models.model_names import resolve_model
from optimize.passes.base import find_pass
from optimize.profiling import peaks, profiling_process
from optimize.profiling.base import readers
from optimize.profiling.chrome_trace import chrome_trace
from optimize.profiling.int8_products import INPUT, activations, int8_product_graph
from optimize.profiling.int8_products import weights as product_weights
from optimize.profiling.layer_matching import GraphLayers
from optimize.profiling.layer_names import float_layers
from optimize.profiling.profile_chart import profile_svg
from optimize.profiling.profile_files import layer_charts, write_page
from optimize.profiling.profile_records import Layer, Peak, Profile, Profiled
from optimize.profiling.profile_table import HEADS, amount, caption, markdown, rows
from optimize.profiling.profiling import float_program, profile_artifact
from optimize.profiling.profiling_process import in_process
from optimize.profiling.tensorboard import write_graphs
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.store.atomic_files import write_json
from optimize.store.objects import Store
from serve.runtime.card.execution import Execution
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.errors import UserError
from serve.runtime.model_files.onnx_session import cpu_session
from tests.optimize.branched import baseline
from tests.optimize.runs_fixtures import TinyRun, copied_store, tiny_run
from tests.optimize.tiny_net import speck
from tests.optimize.workbench import TINY_NET, noise_context
from tests.processor import WIDEST

__all__ = ["copied_store", "tiny_run"]  # fixtures

#: Of `tiny_net.Tiny` at 16 x 16, for one image: MACs, and numbers of weights, of what the layer is given and gives.
TINY = {
    "stem.0": (16 * 16 * 16 * 9, 16 * 9, 16 * 16, 16 * 16 * 16),
    "depthwise.0": (16 * 16 * 16 * 9, 16 * 9, 16 * 16 * 16, 16 * 16 * 16),
    "expand.0": (8 * 8 * 32 * 16 * 9, 32 * 16 * 9, 16 * 16 * 16, 8 * 8 * 32),
    "residual.0": (8 * 8 * 32 * 32 * 9, 32 * 32 * 9, 8 * 8 * 32, 8 * 8 * 32),
    "head": (128 * 10, 1280, 128, 10),
}
MACS = sum(macs for macs, *_ in TINY.values())


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shortest measurement, in this process, whose threads stay as they were."""
    monkeypatch.setattr(profiling_process, "_SECONDS", 0.01)
    monkeypatch.setattr(peaks, "_SECONDS", 0.001)
    monkeypatch.setattr(peaks, "_SIDES", (32, 64))
    monkeypatch.setattr(peaks, "_COPIED", 1 << 16)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def profiled_here(artifact: Artifact, engine: str, batch: int = 2) -> Profile:
    floats = float_program((one.folder, one.card) for one in artifact.line())
    return Profile.from_json(
        in_process(
            bytearray(batch * 16 * 16),
            folder=str(artifact.folder),
            execution=Execution(engine).to_json(),
            batch=batch,
            floats=str(floats),
        )
    )


@pytest.mark.parametrize(
    ("passes", "engine", "precision"),
    [
        (("fuse",), "exported", "float32"),
        (("fuse", "onnx"), "onnxruntime", "float32"),
        (("fuse", "onnx"), "openvino", "float32"),
        (("fuse", "ptq", "onnx-int8"), "onnxruntime", "int8"),
        (("fuse", "ptq", "onnx-int8"), "openvino", "int8"),
        (("fuse", "ptq"), "torchscript", "int8"),
    ],
)
def test_each_engine_tells_every_layer_by_the_models_own_name_with_its_macs_and_bytes(
    passes: tuple[str, ...], engine: str, precision: str, made, brief: None
) -> None:
    found = profiled_here(made(*passes), engine)
    assert (found.runs_on, found.left_macs) == (engine, 0)
    layers = {layer.name: layer for layer in found.layers if layer.macs}
    assert {name: layer.macs for name, layer in layers.items()} == {name: 2 * one[0] for name, one in TINY.items()}
    size = 1 if precision == "int8" else 4
    for name, (_, weights, given, _) in TINY.items():
        layer = layers[name]
        assert layer.precision == precision, name
        assert layer.weights is not None
        assert weights * size <= layer.weights <= weights * size + 12 * 32 + 16, name  # biases, scales and zero-points
        assert layer.read is not None
        assert 2 * given * size <= layer.read, name
    assert all(layer.ms >= 0 for layer in found.layers)
    assert sum(layer.ms for layer in found.layers) > 0
    (peak,) = found.peaks
    assert peak.precision == precision
    assert peak.macs_per_s
    head = layers["head"]
    assert head.macs is not None
    if head.ms:
        assert found.of_peak(head) == pytest.approx(head.macs / (head.ms * 1e-3) / peak.macs_per_s)


def test_layers_of_less_than_openvinos_microsecond_are_named_as_others_are(tmp_path: Path, brief: None) -> None:
    session = Session(Store(tmp_path), resolve_model(f"{TINY_NET}:speck"), noise_context())
    artifact = baseline(session, partial(speck, 4))
    found = profiled_here(session.apply(artifact, find_pass("onnx").config()).artifact, "openvino", batch=1)
    assert {layer.name: layer.macs for layer in found.layers if layer.macs} == {"0": 2 * 2, "2": 4}
    assert found.left_macs == 0


def test_a_torch_program_with_layers_in_float_names_them_all_each_in_its_precision(made, brief: None) -> None:
    found = profiled_here(made("fuse", "ptq", keep_float=("stem", "residual")), "torchscript")
    assert (found.note, found.left_macs) == ("", 0)
    layers = {layer.name: layer for layer in found.layers if layer.macs}
    assert {name: layer.macs for name, layer in layers.items()} == {name: 2 * one[0] for name, one in TINY.items()}
    in_float = {"stem.0", "residual.0"}
    assert {name: layer.precision for name, layer in layers.items()} == {
        name: "float32" if name in in_float else "int8" for name in TINY
    }
    for name, (_, weights, given, _) in TINY.items():
        size = 4 if name in in_float else 1
        assert layers[name].read == 2 * given * size
        own = layers[name].weights
        assert own is not None
        assert weights * size <= own <= weights * size + 12 * 32 + 16, name
    assert {peak.precision for peak in found.peaks} == {"float32", "int8"}


def test_a_program_without_shapes_says_so_and_names_operators_by_their_place(made, brief: None) -> None:
    found = profiled_here(made("fuse", "dynamic"), "torchscript")
    assert "no shapes" in found.note
    assert {layer.macs for layer in found.layers} == {None}
    kinds = [layer.kind for layer in found.layers]
    assert sum("conv" in kind for kind in kinds) == 4
    assert kinds.count("linear_dynamic") == 1
    assert len({layer.name for layer in found.layers}) == len(kinds)


@pytest.mark.parametrize("passes", [("fuse", "onnx"), ("fuse", "ptq", "onnx-int8")])
def test_a_graphs_layers_have_the_models_names_and_are_given_once(passes: tuple[str, ...], made) -> None:
    artifact = made(*passes)
    floats = float_program((one.folder, one.card) for one in artifact.line())
    assert floats is not None
    path, known = artifact.path, float_layers(floats, 3, (1, 16, 16))
    assert [name for name, _ in known] == list(TINY)
    layers = GraphLayers(path, 3, known)
    assert layers.macs == layers.left == 3 * MACS
    convolution = next(node for node in onnx.load(path).graph.node if node.op_type == "Conv")
    for name in (f"{convolution.name}_token_12", f"{convolution.output[0]}_nchwc"):
        layer = GraphLayers(path, 3, known).take(name)
        assert layer is not None
        assert (layer.name, layer.macs) == ("stem.0", 3 * TINY["stem.0"][0])
    assert layers.take(f"{convolution.name}/WithoutBiases") is not None
    assert layers.take(convolution.name) is None
    assert layers.left == 3 * (MACS - TINY["stem.0"][0])


@pytest.mark.parametrize("widest", sorted({63, WIDEST}))
def test_the_product_that_int8_is_compared_with_is_computed_in_integers_by_each_engine(
    widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is that product: with weights of 8 bits sums saturate on a CPU without VNNI."""
    monkeypatch.setattr("optimize.quantization.targets.has_vnni", lambda: widest == 127)
    graph, given = int8_product_graph(64), activations(64)
    assert (given.min(), given.max()) == (0, 255)
    compiled = compile_bytes(graph, 1)
    kinds = {
        getattr(node.get_rt_info()["layerType"], "value", node.get_rt_info()["layerType"]): node
        for node in compiled.get_runtime_model().get_ops()
    }
    product = kinds.get("FullyConnected") or kinds["MatMul"]
    assert str(getattr(product.get_rt_info()["runtimePrecision"], "value", "")) in ("u8", "i8")
    weights = onnx.numpy_helper.to_array(onnx.load_from_string(graph).graph.initializer[0]).astype(np.int64)
    assert abs(weights).max() == widest
    exact = np.clip(np.rint((given.astype(np.int64) - 128) @ weights * 0.01) + 128, 0, 255)
    assert len(np.unique(exact)) > 100
    answers = (
        next(iter(compiled(given).values())),
        cpu_session(graph, half=False, threads=1).run(None, {INPUT: given})[0],
    )
    for answer in answers:
        assert np.abs(answer.astype(np.int64) - exact).max() <= 1


def test_torchs_own_product_is_of_integers() -> None:
    reader = readers()["torchscript"]
    assert reader.int8_product is not None
    torch.manual_seed(0)
    answer = reader.int8_product(64, 1)()
    assert isinstance(answer, torch.Tensor)
    assert answer.dtype == torch.quint8
    integers = torch.from_numpy(product_weights(64)).long()
    exact = (torch.from_numpy(activations(64)).long() @ integers.T / answer.q_scale()).round() + answer.q_zero_point()
    assert (answer.int_repr().long() - exact.clamp(0, 255)).abs().max() <= 1
    assert len(exact.unique()) > 50


def layer(name: str, ms: float, **more: object) -> Layer:
    return Layer.model_validate({"name": name, "kind": "Conv", "precision": "float32", "ms": ms, **more})


FOUND = Profile(
    runs_on="onnxruntime",
    execution=Execution("onnxruntime", threads=2),
    provider="onnxruntime/CPU",
    calls=7,
    call_ms=5.0,
    layers=(
        layer("stem", 1.0, macs=50_000_000, weights=1_000_000, read=3_000_000, written=6_000_000, start_ms=0.5),
        layer("pool", 3.0, macs=0, weights=0, read=6_000_000, written=0, start_ms=1.75, after=("stem",)),
        layer("other", 0.0, start_ms=4.75, after=("pool",)),
    ),
    left_macs=1_500,
    peaks=(Peak(precision="float32", macs_per_s=100e9, how="torch.mm of large matrices"),),
    copy_bytes_per_s=20e9,
)
WHOLE = Profiled(
    title="net on images",
    artifact="onnx",
    precision="float32",
    batch=4,
    profiles=(FOUND, FOUND.model_copy(update={"runs_on": "openvino", "layers": (layer("a", 1.0), layer("b", 2.0))})),
    unable={"inductor": "it does not say"},
    cpu="Imaginary CPU",
    taken=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
)


def test_shares_are_of_what_the_machine_was_seen_to_do() -> None:
    stem, pool, other = FOUND.layers
    # 50 million in a millisecond are 50 thousand million a second; 10 MB in it are 10 GB a second.
    assert FOUND.of_peak(stem) == pytest.approx(0.5)
    assert FOUND.of_copy(stem) == pytest.approx(0.5)
    assert FOUND.of_peak(pool) is None
    assert FOUND.of_copy(pool) == pytest.approx(0.1)
    assert FOUND.of_peak(other) is None
    assert FOUND.of_copy(other) is None
    assert FOUND.macs == 50_001_500
    assert FOUND.of_peak(stem.model_copy(update={"precision": "int8"})) is None


def test_the_table_has_a_line_for_each_layer_and_one_for_all() -> None:
    lines = [dict(zip(HEADS, row, strict=True)) for row in rows(FOUND)]
    assert [line["layer"] for line in lines] == ["stem", "pool", "other", "all 3 layers"]
    assert [line["time %"] for line in lines] == ["25.0", "75.0", "0.0", "100.0"]
    assert [line["of peak %"] for line in lines] == ["50", "–", "–", ""]
    assert [line["MACs"] for line in lines] == ["50.00 M", "0", "–", "50.00 M"]
    assert lines[-1]["read"] == "9.00 MB"
    said = caption(WHOLE, FOUND)
    assert "batch 4" in said
    assert "100 GMACs a second, by torch.mm" in said
    assert "1.50 k of the MACs belong to no layer" in said
    document = markdown(WHOLE)
    assert "| stem | Conv | float32 |" in document
    assert "inductor: it does not say" in document
    assert [amount(macs) for macs in (None, 0, 12, 1_814_000_000)] == ["–", "0", "12", "1.81 G"]
    assert Profiled.from_json(json.loads(json.dumps(WHOLE.to_json()))) == WHOLE


def test_the_trace_is_one_that_chrome_reads() -> None:
    body = json.loads(json.dumps(chrome_trace(WHOLE)))
    events = body["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in events:
        assert isinstance(event["name"], str)
        assert (type(event["pid"]), type(event["tid"])) == (int, int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
    timed = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert timed == [("stem", 500.0, 1000.0), ("pool", 1750.0, 3000.0), ("other", 4750.0, 0.0)]
    laid = [(event["name"], event["ts"]) for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert laid == [("a", 0.0), ("b", 1000.0)]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "as they began" in names[0]
    assert "end to end" in names[1]
    assert body["otherData"]["batch"] == "4"


def test_the_chart_names_every_layer() -> None:
    svg = profile_svg("net", FOUND)
    texts = {text.text for text in ElementTree.fromstring(svg).iter() if text.tag.endswith("text")}
    assert {"stem · Conv", "pool · Conv", "time, ms"} <= texts
    assert svg == profile_svg("net", FOUND)


def test_without_tensorboard_its_graph_is_refused_in_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"^a graph for TensorBoard needs the package tensorboard: .*\[tensorboard\]'$"):
        write_graphs(WHOLE, tmp_path)


def test_the_graph_for_tensorboard_has_layers_edges_and_times(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = write_graphs(WHOLE, tmp_path)
    assert [path.name for path in written] == ["onnxruntime", "openvino"]
    events = EventAccumulator(str(written[0])).Reload()
    nodes = {node.name: node for node in events.Graph().node}
    assert list(nodes["pool"].input) == ["stem"]
    assert nodes["stem"].attr["macs"].i == 50_000_000
    (tag,) = events.Tags()["run_metadata"]
    (device,) = events.RunMetadata(tag).step_stats.dev_stats
    assert {one.node_name: one.all_end_rel_micros for one in device.node_stats}["pool"] == 3000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("profile", "tiny"), "profile takes RUN/ARTIFACT, such as tiny/baseline"),
        (("profile", "tiny/nothing"), "run 'tiny' has no artifact 'nothing'"),
        (("profile", "tiny/onnx", "--execution", "openvin"), "unknown engine 'openvin' (did you mean openvino?)"),
        (("profile", "tiny/onnx", "--execution", "exported"), "exported opens exported_program files, not onnx"),
        (("profile", "tiny/fuse", "--execution", "inductor"), "it cannot time single layers"),
        (("profile", "tiny/onnx", "--batch", "0"), "Invalid value for '--batch'"),
        (("profile", "tiny/onnx", "--batch", "5000"), "from 1 to 1,024, found 5000"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_line(words: tuple[str, ...], said: str, tiny_run: TinyRun) -> None:
    result = CliRunner().invoke(cli.app, [*words, "--store", str(tiny_run.store)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.strip().count("\n") == 0


def test_the_command_writes_figures_tables_charts_and_a_trace(copied_store: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    words = ["profile", "tiny/onnx-int8", "--execution", "openvino", "--batch", "2", "--store", str(copied_store)]
    result = CliRunner().invoke(cli.app, [*words, "--trace", str(trace), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = Profiled.from_json(json.loads(result.stdout))
    assert (found.artifact, found.batch) == ("onnx-int8", 2)
    (one,) = found.profiles
    assert one.left_macs == 0
    assert one.macs > 0
    assert one.call_ms > 0
    folder = copied_store / "tiny.profile"
    names = {path.name for path in folder.iterdir()}
    assert names == {"files.json", "onnx-int8.json", "onnx-int8.md", "onnx-int8@openvino.svg"}
    assert {event["name"] for event in json.loads(trace.read_text())["traceEvents"]} >= {
        layer.name for layer in one.layers
    }
    drawn = base64.b64encode((folder / "onnx-int8@openvino.svg").read_bytes()).decode()
    page = (copied_store / "tiny" / "report.html").read_text(encoding="utf-8")
    assert f'src="data:image/svg+xml;base64,{drawn}"' in page
    (chart,) = layer_charts(copied_store, "tiny")
    assert (chart.name, f"{len(one.layers)} layers" in chart.said) == ("onnx-int8 by openvino", True)
    # Of an artifact that was made anew since nothing is shown.
    write_json(found.model_copy(update={"content": "another"}).to_json(), folder / "onnx-int8.json")
    assert layer_charts(copied_store, "tiny") == []
    write_page(copied_store, "tiny")
    assert "Where the time goes" not in (copied_store / "tiny" / "report.html").read_text(encoding="utf-8")


def test_a_variant_is_profiled_from_python(made, session) -> None:
    with pytest.raises(UserError, match="profile takes a variant"):
        opt.profile("onnx")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="batch: must be a whole number"):
        profile_artifact(made("fuse").folder, batch=True)
    with pytest.raises(UserError, match="cannot be profiled"):
        profile_artifact(Path("nowhere"))


def test_a_peak_is_the_rate_of_the_faster_matrices_or_says_why_there_is_none(brief: None, monkeypatch) -> None:
    taken = {32: 1e-3, 64: 1e-3}
    monkeypatch.setattr(peaks, "fastest", lambda call: taken[call().shape[0]])
    torchs = peaks.peak("float32", readers()["exported"], 1)
    assert torchs.macs_per_s == pytest.approx(64**3 * 1e3)
    assert torchs.how == "torch.mm of 64 × 64 matrices"
    none = peaks.peak("int8", readers()["exported"], 1)
    assert none.macs_per_s is None
    assert none.how == "exported has no product of int8 matrices to compare with"
