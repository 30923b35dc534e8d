"""``ptq-lowbit``, ``qat-lowbit`` and ``onnx-packed``: the integers they make, what they say, what follows them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from optimize.context import Context
from optimize.data.loading import loader
from optimize.errors import NotApplicableError
from optimize.export.onnx_graph.weight_packing import pack_weights
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.onnx_packed import OnnxPacked
from optimize.passes.ptq_lowbit import PTQ_LOWBIT, PtqLowbit
from optimize.passes.qat_lowbit import QAT_LOWBIT, QatLowbit
from optimize.quantization.convert import trace_calls
from optimize.quantization.lowbit.execution_kind import of_graph
from optimize.quantization.rewrites.batch_norms import turn_signs
from optimize.run.certification.parity_certificates import reference_origin
from optimize.run.saved_artifacts import take
from optimize.store.artifact import Artifact
from optimize.store.layer_effects import read_effects
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import open_engine
from serve.runtime.errors import PipelineError, UserError
from serve.runtime.images.image_preprocessing import normalise
from tests.optimize.workbench import (
    CPU,
    applied,
    noise_context,
    packed_weights,
    parent_of,
    quantizers,
    run,
    with_running_statistics,
)

#: A moment's training.
SHORT = {"epochs": 1, "batch_size": 64, "augment": "none", "images": 64, "learning_rate": 0.02}


def loss(artifact: Artifact, context: Context) -> float:
    """Mean cross-entropy on the validation images, in nats."""
    batches = loader(context.data.val, context.preprocessing, batch_size=512, device=CPU)
    losses = [
        nn.functional.cross_entropy(
            run(artifact, normalise(images, context.preprocessing, CPU, torch.float32)), labels, reduction="sum"
        )
        for images, labels in batches
    ]
    return float(sum(losses)) / len(context.data.val)


def wide(width: int = 32) -> nn.Sequential:
    """Mostly convolutions."""
    torch.manual_seed(1)
    blocks = [
        layer
        for given, taken in ((8, width), (width, width), (width, width))
        for layer in (nn.Conv2d(given, taken, 3, padding=1, stride=2), nn.BatchNorm2d(taken), nn.ReLU())
    ]
    return with_running_statistics(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), *blocks, nn.Flatten(), nn.Linear(4 * width, 4))
    )


@pytest.fixture(scope="module")
def w2(made) -> Artifact:
    """2 bits, trained from 4."""
    return made("qat-lowbit", "qat-lowbit", weight_bits=2, activation_bits=2, **SHORT)


@pytest.fixture(scope="module")
def w4(made) -> Artifact:
    return made("qat-lowbit", **SHORT)


def test_trained_layers_have_4_bits_and_the_ends_8(w4: Artifact) -> None:
    ends = [max(abs(int(weight.min())), int(weight.max())) for weight in packed_weights(w4.folder)]
    assert ends[0] > 8
    assert ends[-1] > 8
    assert all(weight.min() >= -8 and weight.max() <= 7 for weight in packed_weights(w4.folder)[1:-1])
    highs = [high for _, _, _, high in quantizers(w4.folder)]
    assert highs.count(15) == 3, "each of three layers reads 16 integers"
    assert set(highs) == {15, 255}


def test_the_integers_are_those_that_were_trained(w4: Artifact, session) -> None:
    """The float weights beside the program, on the grid of their channel's scale, are the program's integers."""
    trained = w4.module()
    layers = [layer for layer in trained.modules() if isinstance(layer, nn.Conv2d)]
    for layer, integers in zip(layers[1:], packed_weights(w4.folder)[1:-1], strict=True):
        weight = layer.weight.detach().flatten(1).double().numpy()
        own = integers.flatten(1).double().numpy()
        inside = np.abs(own) < 7
        for row, found, free in zip(weight, own, inside, strict=True):
            assert np.all(np.diff(found[np.argsort(row)]) >= 0), "rounding keeps the order"
            step = (row[free] * found[free]).sum() / max((found[free] ** 2).sum(), 1)
            assert np.abs(row[free] - step * found[free]).max() < 0.75 * abs(step) + 1e-6


def test_training_with_3_bits_is_better_than_calibrating_them(made, session) -> None:
    """With the ends at 3 bits, too: at 4 this network hardly loses anything, and a rounding decides."""
    few = {"weight_bits": 3, "activation_bits": 3, "ends_int8": False}
    calibrated = made("ptq-lowbit", **few, min_sqnr=-20.0, min_agreement=0.0)
    learned = made("qat-lowbit", **SHORT | few | {"epochs": 2, "batch_size": 32})
    assert all(weight.min() >= -4 and weight.max() <= 3 for weight in packed_weights(learned.folder))
    assert loss(learned, session.context) < loss(calibrated, session.context)


def test_fewer_bits_start_from_the_trained_weights_of_more(w2: Artifact, w4: Artifact, made, session) -> None:
    at_once = made("ptq-lowbit", weight_bits=2, activation_bits=2, min_sqnr=-20.0, min_agreement=0.0)
    assert w2.parent is not None
    assert w2.parent.kind == "lowbit"
    assert all(set(weight.unique().tolist()) <= {-2, -1, 0, 1} for weight in packed_weights(w2.folder)[1:-1])
    assert any(set(weight.unique().tolist()) == {-2, -1, 0, 1} for weight in packed_weights(w2.folder)[1:-1])
    assert loss(w2, session.context) < loss(at_once, session.context)


def test_an_artifact_says_what_it_is_and_no_more(w4: Artifact, w2: Artifact, tmp_path: Path) -> None:
    assert w4.card.precision == "int8 (W4A4 executed)"
    assert "W4A4 in 3 layers, the others int8: executed by int8 kernels" in w4.card.notes[0]
    assert w2.card.precision == "int8 (W2A2 executed)"
    context = noise_context()
    config = QatLowbit(**SHORT, holdout=0.3, target="tensorrt")
    simulated = QAT_LOWBIT.apply(parent_of(wide(), context, tmp_path / "parent"), config, context, tmp_path)
    assert simulated.precision == "int8 in float arithmetic (W4A4 simulated)"
    assert [of_graph(each) for each in (simulated.precision, w4.card.precision, "int8")] == [
        "int8 (W4A4 simulated)",
        "int8 (W4A4 executed)",
        "int8",
    ], "no graph says that it was executed which nothing here executes"
    assert "no faster than float (1.0×)" in simulated.notes[0]
    assert [note for note in simulated.notes if "what the integers mean against float arithmetic" in note]


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"weight_bits": 2, "weight_quantizer": "twn"}, 3),
        ({"weight_bits": 2, "weight_quantizer": "ttq"}, 3),
        ({"weight_bits": 1}, 2),
        ({"weight_bits": 3, "weight_quantizer": "dorefa", "activation_quantizer": "pact", "activation_bits": 3}, 8),
    ],
)
def test_each_method_runs_as_int8_with_its_number_of_values(settings, values: int, tmp_path: Path) -> None:
    context, module = noise_context(), wide()
    config = QatLowbit(**{"activation_bits": 8, **SHORT, **settings}, holdout=0.3, min_sqnr=10.0)
    product = QAT_LOWBIT.apply(parent_of(module, context, tmp_path / "parent"), config, context, tmp_path)
    for weight in packed_weights(tmp_path)[1:-1]:
        counts = [len(row.unique()) for row in weight.flatten(1)]
        assert max(counts) == values
    low = {high for _, _, _, high in quantizers(tmp_path) if high < 100}
    assert low == ({7} if settings.get("activation_bits") == 3 else set())
    expected = "ternary A8" if values == 3 else "W1A8" if values == 2 else "W3A3"
    assert product.precision == f"int8 ({expected} executed)"
    largest = max(int(weight.abs().max()) for weight in packed_weights(tmp_path)[1:-1])
    stored = {1: "2 or 4", 7: "4"}.get(largest)  # ttq's take int8
    said = f"onnx-packed stores them in {stored} bits" if stored else "ONNX has no smaller type for them"
    assert product.notes[0].endswith(said)


def test_a_negative_factor_of_a_norm_changes_no_answer_and_no_grid(tmp_path: Path) -> None:
    context, module = noise_context(), wide()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data[::2] *= -1
    traced = trace_calls(copy.deepcopy(module), context.example())
    turn_signs(traced)
    assert all(bool((n.weight > 0).all()) for n in traced.modules() if isinstance(n, nn.BatchNorm2d))
    with torch.no_grad():
        assert torch.allclose(traced(context.example()), module(context.example()), atol=1e-4)
    config = QatLowbit(**SHORT, holdout=0.3, min_sqnr=10.0)
    QAT_LOWBIT.apply(parent_of(module, context, tmp_path / "parent"), config, context, tmp_path)
    assert all(weight.min() >= -8 and weight.max() <= 7 for weight in packed_weights(tmp_path)[1:-1])


def test_ptq_of_4_bits_takes_the_range_of_the_least_error_of_its_16_integers(tmp_path: Path) -> None:
    context, module = noise_context(), wide()
    PTQ_LOWBIT.apply(parent_of(module, context, tmp_path / "parent"), PtqLowbit(min_sqnr=-20.0), context, tmp_path)
    for weight in packed_weights(tmp_path)[1:-1]:
        assert weight.min() >= -8
        assert weight.max() <= 7
        assert len(weight.unique()) >= 15
    assert {high for _, _, _, high in quantizers(tmp_path)} >= {15}


def test_adaround_finds_better_integers_below_8_bits_too(tmp_path: Path) -> None:
    context, module = noise_context(), wide()
    parent = parent_of(module, context, tmp_path / "parent")
    nearest, learned = tmp_path / "nearest", tmp_path / "learned"
    for folder, settings in ((nearest, {}), (learned, {"rounding": "adaround", "rounding_steps": 60})):
        folder.mkdir()
        config = PtqLowbit(activation_bits=8, min_sqnr=-20.0, images=16, **settings)
        PTQ_LOWBIT.apply(parent, config, context, folder)
    pairs = list(zip(packed_weights(learned)[1:-1], packed_weights(nearest)[1:-1], strict=True))
    assert all(weight.min() >= -8 and weight.max() <= 7 for weight, _ in pairs)
    assert all((weight.int() - other.int()).abs().max() <= 1 for weight, other in pairs)
    # A layer for which learning finds nothing better keeps the nearest.
    moved = [(weight, other) for weight, other in pairs if not torch.equal(weight, other)]
    assert moved
    assert all((weight != other).float().mean() < 0.5 for weight, other in moved)
    ends = [bool((weight != other)[other.abs() >= 7].any()) for weight, other in moved]
    assert any(ends), "with a scale that is known, the ends of the grid are learned, too"
    effects = read_effects(learned)
    assert len(effects) == 5
    assert all(effect.after <= effect.before for effect in effects)
    assert sum(effect.after < effect.before for effect in effects[1:-1]) == len(moved)


def test_binary_weights_are_calibrated_by_their_signs(tmp_path: Path) -> None:
    context, module = noise_context(), wide()
    config = PtqLowbit(weight_bits=1, activation_bits=8, min_sqnr=-20.0, min_agreement=0.0)
    PTQ_LOWBIT.apply(parent_of(module, context, tmp_path / "parent"), config, context, tmp_path)
    for weight in packed_weights(tmp_path)[1:-1]:
        assert set(weight.unique().tolist()) == {-1, 1}


# --- packed --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> tuple[Path, Context]:
    """An int8 graph of 4-bit weights, mostly convolutions."""
    folder, context = tmp_path_factory.mktemp("graphs"), noise_context()
    parent = parent_of(wide(128), context, folder / "parent")
    quantized = applied(PTQ_LOWBIT, PtqLowbit(min_sqnr=-20.0), parent, context, folder / "ptq")
    return applied(ONNX_INT8, OnnxInt8(), quantized, context, folder / "onnx").path, context


def test_onnx_runtime_computes_layers_of_few_bits_in_integers(graphs, tmp_path: Path) -> None:
    """And not in float between quantizers, as it does where a Clip stands before one."""
    import onnxruntime

    path, _ = graphs
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimised.onnx"), 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    assert kinds.count("QLinearConv") == 4
    highs = [high for _, _, _, high in quantizers(path.parents[1] / "ptq")]
    assert highs.count(15) == 3, "of what three layers of 4 bits read"
    assert highs.count(255) == len(highs) - 3
    assert kinds.count("Clip") == sum(high < 255 for high in highs)
    assert not {"Conv", "FusedConv", "Gemm", "FusedGemm"} & set(kinds)


@pytest.mark.parametrize(("smallest", "most"), [("int4", 0.6), ("int2", 0.6)])
def test_packed_weights_take_half_of_the_file_and_answer_alike(graphs, smallest, most: float, tmp_path: Path) -> None:
    path, context = graphs
    packed = pack_weights(onnx.load(path), smallest)
    small = tmp_path / "packed.onnx"
    onnx.save(packed.model, small)
    onnx.checker.check_model(packed.model, full_check=True)
    assert small.stat().st_size <= most * path.stat().st_size
    assert packed.weights == {4: 3, 8: 2}
    assert not packed.model.graph.value_info, "of shapes between layers, of which the graph had none before"
    images = context.pixels(8)
    import onnxruntime

    answers = [
        onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"input": images.numpy()})
        for file in (path, small)
    ]
    assert np.array_equal(answers[0][0], answers[1][0])


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("count", [1, 7, 8])
def test_what_is_packed_is_what_onnx_reads(bits: int, count: int) -> None:
    half = 1 << (bits - 1)
    integers = (np.arange(count) % (2 * half) - half).astype(np.int8)
    node = onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["y"])
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [],
        [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, [count])],
        [numpy_helper.from_array(integers, "w"), numpy_helper.from_array(np.ones((), np.float32), "s")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    packed = pack_weights(model, "int2")
    assert packed.weights == {bits: 1}
    (tensor,) = [t for t in packed.model.graph.initializer if t.name != "s"]
    assert len(tensor.raw_data) == -(-count * bits // 8)
    assert numpy_helper.to_array(tensor).astype(np.int8).tolist() == integers.tolist()
    assert model.graph.node[0].op_type == "DequantizeLinear", "the graph that was given stays as it was"


def test_a_packed_artifact_is_checked_certified_and_opened_by_both_engines(w4: Artifact, session) -> None:
    graph = session.apply(w4, OnnxInt8()).artifact
    packed = session.apply(graph, OnnxPacked()).artifact
    assert graph.card.precision == "int8 (W4A4 executed)"
    assert packed.card.precision == "int8 (W4A4 packed)"
    assert "3 in int4" in packed.card.notes[0]
    assert not [note for note in packed.card.notes if "of the float weights' bytes" in note], "another file's size"
    assert [note for note in packed.card.notes if note.startswith("ONNX Runtime against exact arithmetic")]
    assert packed.path.stat().st_size < graph.path.stat().st_size
    assert reference_origin(packed) == reference_origin(graph) == w4
    batch = session.context.pixels(16)
    for engine in ("onnxruntime", "openvino"):
        before, after = (open_engine(a.folder, a.card, Execution(engine)).run(batch)[0] for a in (graph, packed))
        assert torch.equal(before, after), engine


def test_weights_of_2_bits_are_stored_in_2_bits_where_that_is_asked_and_answer_alike(w2: Artifact, session) -> None:
    """By ONNX Runtime; OpenVINO does not read the type, and says so in a line."""
    graph = session.apply(w2, OnnxInt8(min_sqnr=-20.0, min_agreement=0.0)).artifact
    four, two = (session.apply(graph, OnnxPacked(smallest=smallest)).artifact for smallest in ("int4", "int2"))
    assert two.card.precision == "int8 (W2A2 packed)"
    stored = {tensor.name: tensor for tensor in onnx.load(two.path).graph.initializer}
    small = [tensor for tensor in stored.values() if tensor.data_type == TensorProto.INT2]
    assert len(small) == 3
    assert all(len(tensor.raw_data) == -(-int(np.prod(tensor.dims)) // 4) for tensor in small)
    assert not [tensor for tensor in onnx.load(four.path).graph.initializer if tensor.data_type == TensorProto.INT2]
    batch, by = session.context.pixels(16), Execution("onnxruntime")
    before, *after = (open_engine(each.folder, each.card, by).run(batch)[0] for each in (graph, four, two))
    assert all(torch.equal(before, each) for each in after)
    with pytest.raises(PipelineError) as refused:
        open_engine(two.folder, two.card, Execution("openvino")).run(batch)
    assert str(refused.value) == "onnx-packed: OpenVINO cannot compile it: Unsupported type"


def test_an_int8_graph_has_nothing_to_pack(made, session) -> None:
    graph = made("ptq", "onnx-int8")
    with pytest.raises(NotApplicableError, match="no weight of this graph fits into 4 bits"):
        session.apply(graph, OnnxPacked())


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (QatLowbit, {"weight_bits": 9}, "weight_bits"),
        (QatLowbit, {"activation_bits": 0}, "activation_bits"),
        (QatLowbit, {"weight_quantizer": "twn"}, "twn is for weight_bits 2"),
        (QatLowbit, {"weight_quantizer": "xnor"}, "xnor is for weight_bits 1"),
        (QatLowbit, {"weight_bits": 1, "weight_quantizer": "lsq"}, "lsq needs weight_bits 2 to 7"),
        (QatLowbit, {"weight_bits": 8, "weight_quantizer": "twn"}, "twn is for fewer than 8 bits"),
        (QatLowbit, {"activation_bits": 8, "activation_quantizer": "pact"}, "pact is for fewer than 8 bits"),
        (QatLowbit, {"weight_bits": 8, "activation_bits": 8}, "which is int8: use ptq or qat"),
        (PtqLowbit, {"weight_bits": 8, "activation_bits": 8}, "which is int8: use ptq or qat"),
        (PtqLowbit, {"weight_bits": 1, "rounding": "adaround"}, "needs weight_bits 2 to 8"),
        (OnnxPacked, {"smallest": "int1"}, "smallest"),
    ],
)
def test_what_fits_no_bits_is_refused_in_a_line(config, settings, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        config(**settings)
    assert "\n" not in str(refused.value)


def test_a_pattern_that_matches_nothing_is_refused(session, trained) -> None:
    with pytest.raises(UserError, match=r"qat-lowbit.keep_int8: the model has no module whose name or class is 'stm'"):
        session.check(QatLowbit(keep_int8=("stm",)))


def test_layers_stay_int8_where_that_is_asked(made) -> None:
    artifact = made("ptq-lowbit", keep_int8=("depthwise", "resi*"), min_sqnr=-20.0)
    ends = [int(weight.abs().max()) for weight in packed_weights(artifact.folder)]
    assert [end > 8 for end in ends] == [True, True, False, True, True]


def test_a_network_of_two_layers_has_none_for_fewer_bits(tmp_path: Path) -> None:
    context = noise_context()
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 4)).eval()
    with pytest.raises(NotApplicableError, match="ends_int8"):
        PTQ_LOWBIT.apply(parent_of(module, context, tmp_path / "parent"), PtqLowbit(), context, tmp_path)


def test_what_was_trained_is_found_again_after_saving(w2: Artifact, session, tmp_path: Path) -> None:
    found = take(session, w2.folder).artifact
    assert found.kind == "lowbit"
    for (name, own), other in zip(w2.module().state_dict().items(), found.module().state_dict().values(), strict=True):
        assert torch.equal(own, other), name
