"""``onnx`` and ``onnx-half``: what is in the file, that it computes what its parent does, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import onnx
import openvino
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torchvision.models import VisionTransformer

from optimize.errors import NotApplicableError, PassError
from optimize.export.onnx_graph.translations import read_once
from optimize.export.onnx_graph.write import check_against, export_onnx, run_onnx
from optimize.passes.onnx import ONNX, Onnx
from optimize.passes.onnx_half import ONNX_HALF, OnnxHalf
from tests.narrow import layer
from tests.optimize.quantization.lowering.test_qdq import infer
from tests.optimize.workbench import noise_context, parent_of, run


def types(model: onnx.ModelProto) -> tuple[int, int]:
    """Element types of input and output."""
    return (
        model.graph.input[0].type.tensor_type.elem_type,
        model.graph.output[0].type.tensor_type.elem_type,
    )


def test_the_float_graph_computes_what_its_parent_does_at_any_batch_size(trained, made, digits_context):
    module, batch = trained.module(), digits_context.example(16)
    for given, inputs in (("uint8", digits_context.pixels(16)), ("float", batch)):
        path = made("onnx", input=given).path
        for count in (1, 3, 16):
            with torch.no_grad():
                expected = module(batch[:count])
            torch.testing.assert_close(infer(path, inputs[:count]), expected, rtol=1e-4, atol=1e-4)


def test_the_float_graph_is_valid_and_names_its_ends_and_its_batch(made):
    model = onnx.load(made("onnx").path)
    onnx.checker.check_model(model, full_check=True)
    (given,), (taken,) = model.graph.input, model.graph.output
    assert (given.name, taken.name) == ("input", "logits")
    first, *rest = given.type.tensor_type.shape.dim
    assert first.dim_param == "batch"
    assert [dimension.dim_value for dimension in rest] == [1, 16, 16]
    assert [d.dim_param or d.dim_value for d in taken.type.tensor_type.shape.dim] == ["batch", 10]
    assert types(model) == (TensorProto.UINT8, TensorProto.FLOAT)
    assert (made("onnx").card.precision, made("onnx").card.input_dtype) == ("float32", "uint8")


def test_the_file_holds_its_weights_and_no_note_of_the_machine_that_built_it(made, trained):
    for artifact in (made("onnx"), made("onnx-half")):
        assert [path.name for path in artifact.folder.iterdir() if path.suffix == ".onnx"] == ["model.onnx"]
        assert not list(artifact.folder.glob("*.data"))
        model = onnx.load(artifact.path, load_external_data=False)
        assert not model.metadata_props
        assert not any(node.metadata_props or node.doc_string for node in model.graph.node)


def test_the_half_graph_stores_every_weight_in_fp16(made):
    model = onnx.load(made("onnx-half").path)
    stored = {tensor.data_type for tensor in model.graph.initializer if numpy_helper.to_array(tensor).size > 1}
    assert TensorProto.FLOAT16 in stored
    assert TensorProto.FLOAT not in stored
    assert types(model) == (TensorProto.UINT8, TensorProto.FLOAT)
    assert made("onnx-half").path.stat().st_size < 0.65 * made("onnx").path.stat().st_size
    assert made("onnx-half").card.precision == "float16"


@pytest.mark.parametrize(
    ("io", "expected"), [("float32", TensorProto.FLOAT), ("float16", TensorProto.FLOAT16)], ids=["float32", "float16"]
)
def test_the_ends_of_the_half_graph_are_as_asked(io, expected, session, trained, digits_context):
    artifact = session.apply(trained, OnnxHalf(io=io, input="float"), f"half-{io}").artifact
    assert types(onnx.load(artifact.path)) == (expected, expected)
    assert artifact.card.input_dtype == io
    batch = digits_context.example(16)
    logits = run(artifact, batch.to(getattr(torch, io)))
    assert logits.dtype == getattr(torch, io)
    with torch.no_grad():
        wanted = trained.module()(batch)
    assert (logits.float() - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert not torch.equal(logits.float(), wanted), "FP16 that rounds nothing is not FP16"
    for count in (1, 3):
        torch.testing.assert_close(
            run(artifact, batch[:count].to(getattr(torch, io))), logits[:count], rtol=2e-2, atol=2e-2
        )


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)).eval()


def test_a_weight_that_fp16_cannot_hold_is_named(tmp_path):
    context, module = noise_context(), classifier()
    layer(module, 4, nn.Linear).weight.data[2, 1] = -1e6
    with pytest.raises(NotApplicableError, match=r"weight 4\.weight holds 1e\+06, more than float16's 65504"):
        ONNX_HALF.apply(parent_of(module, context, tmp_path / "parent"), OnnxHalf(), context, tmp_path)


def test_a_tolerance_that_is_not_met_is_an_error_with_both_numbers(tmp_path):
    context = noise_context()
    parent = parent_of(classifier(), context, tmp_path / "parent")
    with pytest.raises(PassError, match=r"differ from the parent's by .* more than the tolerance 1e-07"):
        ONNX_HALF.apply(parent, OnnxHalf(tolerance=1e-7), context, tmp_path)


def test_a_graph_of_other_weights_is_noticed(tmp_path):
    context, module = noise_context(), classifier()
    export_onnx(module, context.example(), tmp_path / "model.onnx")
    batch = context.example(8)
    with torch.no_grad():
        check_against(tmp_path / "model.onnx", batch, module(batch), 1e-3)
        layer(module, 4, nn.Linear).weight.data += 0.1
        with pytest.raises(PassError, match="differ from the parent's"):
            check_against(tmp_path / "model.onnx", batch, module(batch), 1e-3)


class TwoOutputs(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean((2, 3)), x.sum((2, 3))


def test_a_graph_with_two_outputs_is_refused(tmp_path):
    with pytest.raises(PassError, match="1 inputs and 2 outputs, expected 1 input and 1 outputs"):
        export_onnx(TwoOutputs(), torch.randn(2, 1, 4, 4), tmp_path / "model.onnx")


class Foreign(nn.Module):
    """Takes a function that ONNX has no operator for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i0e(x.mean((2, 3)))


def test_an_operator_that_cannot_be_translated_is_named_in_one_line(tmp_path):
    with pytest.raises(PassError, match=r"^torch's ONNX exporter .*bessel_i0e.*: No ONNX function found") as refused:
        export_onnx(Foreign(), torch.randn(2, 1, 4, 4), tmp_path / "model.onnx")
    assert "\n" not in str(refused.value)


def test_a_graph_that_is_not_valid_is_refused_in_one_line(monkeypatch, tmp_path):
    def broken(model: onnx.ModelProto) -> None:
        model.graph.node[0].input[0] = "nothing"

    monkeypatch.setattr("optimize.export.onnx_graph.write._drop_metadata", broken)
    with pytest.raises(PassError, match=r"^ONNX graph: it is not valid: ValidationError: .*nothing") as refused:
        export_onnx(nn.Flatten(), torch.randn(2, 1, 4, 4), tmp_path / "model.onnx")
    assert "\n" not in str(refused.value)

    def mixed(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16

    monkeypatch.setattr("optimize.export.onnx_graph.write._drop_metadata", mixed)
    with pytest.raises(PassError, match=r"^ONNX graph: it is not valid: InferenceError: ") as refused:
        export_onnx(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), torch.randn(2, 1, 4, 4), tmp_path / "model.onnx")
    assert "\n" not in str(refused.value)


def test_exporting_twice_gives_the_same_bytes(tmp_path):
    context, module = noise_context(), classifier()
    parent = parent_of(module, context, tmp_path / "parent")
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ONNX.apply(parent, Onnx(), context, tmp_path / name)
        files.append((tmp_path / name / "model.onnx").read_bytes())
    assert files[0] == files[1]


def test_translations_that_were_read_before_are_those_that_torch_reads():
    """And what an export adds to them is its own."""
    opset = ONNXRegistry().opset_version
    own = {name: [one.onnx_function for one in found] for name, found in ONNXRegistry.from_torchlib().functions.items()}
    kept = []
    for _ in range(2):
        with read_once():
            registry = ONNXRegistry().from_torchlib(opset_version=opset)
        kept.append({name: [one.onnx_function for one in found] for name, found in registry.functions.items()})
        registry.register_op(torch.ops.aten.relu.default, classifier)
        registry.functions.pop("aten::add.Tensor")
    assert len(own) > 300
    assert kept == [own, own]
    assert ONNXRegistry.from_torchlib().functions.keys() == own.keys()


def test_the_weights_of_a_graph_that_was_exported_are_let_go_of(tmp_path):
    module = classifier()
    held = [weakref.ref(parameter) for parameter in module.parameters()]
    export_onnx(module, torch.randn(2, 1, 16, 16), tmp_path / "model.onnx")
    del module
    gc.collect()
    assert [one() for one in held] == [None] * 4


def test_the_exporter_says_nothing_on_stdout(tmp_path, capfd):
    export_onnx(classifier(), torch.randn(2, 1, 16, 16), tmp_path / "model.onnx")
    assert capfd.readouterr().out == ""


def test_the_fused_graph_has_no_batch_norm(made):
    plain, fused = (onnx.load(made(*names).path) for names in (("onnx",), ("fuse", "onnx")))
    assert "BatchNormalization" not in [node.op_type for node in fused.graph.node]
    names = [tensor.name for tensor in plain.graph.initializer]
    assert len(names) == len(set(names))
    assert all(np.isfinite(numpy_helper.to_array(tensor)).all() for tensor in fused.graph.initializer)


def test_the_fp16_graph_of_a_vision_transformer_opens(tmp_path):
    # ONNX Runtime 1.31 died of it, and the run with it.
    torch.manual_seed(0)
    module = VisionTransformer(64, 16, 2, 4, 64, 128, num_classes=4).eval()
    with torch.no_grad():
        module.get_parameter("heads.head.weight").normal_()  # zero by default, and so would be all logits
        batch = torch.rand(3, 3, 64, 64)
        expected = module(batch)
    path = tmp_path / "model.onnx"
    export_onnx(copy.deepcopy(module).half(), batch.half(), path)
    found = run_onnx(path, batch, half=True)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_weights_that_no_protobuf_holds_lie_beside_the_graph_and_travel_with_it(monkeypatch, tmp_path):
    monkeypatch.setattr("optimize.export.onnx_graph.write._LARGEST_FILE", 1000)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4)).eval()
    context, made = noise_context(), tmp_path / "made"
    made.mkdir()
    product = ONNX.apply(parent_of(module, context, tmp_path / "parent"), Onnx(input="float"), context, made)
    assert sorted(path.name for path in made.iterdir()) == ["model.onnx", "model.onnx.data"]
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert (made / "model.onnx.data").stat().st_size > 0.95 * weights
    assert (made / product.file).stat().st_size < 0.5 * weights
    named = tmp_path / "named"  # as the store gives an artifact its name
    named.mkdir()
    for path in made.iterdir():
        (named / path.name).hardlink_to(path)
    batch = context.example(3)
    with torch.no_grad():
        expected = module(batch)
    torch.testing.assert_close(run_onnx(named / "model.onnx", batch), expected, rtol=1e-4, atol=1e-4)
    opened = openvino.compile_model(str(named / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = torch.from_numpy(opened(batch.numpy())[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
