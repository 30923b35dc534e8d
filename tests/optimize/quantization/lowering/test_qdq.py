"""The int8 ONNX graph: what the linter refuses, and that torch's own integers arrive in ONNX Runtime."""

from __future__ import annotations

import dataclasses
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx, nn

from optimize.errors import PassError
from optimize.export.onnx_graph.write import export_onnx
from optimize.lint.base import lint
from optimize.lint.untrusted_files import read_graph
from optimize.passes import onnx_int8
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.quantization.lowering.narrow_ranges import NarrowRange
from optimize.quantization.lowering.qdq import explicit_form, verify
from optimize.quantization.rewrites.full_slices import drop_whole_slices
from optimize.store.artifact import REFERENCE_FILE
from optimize.tracing.trace import note_shapes
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program
from tests.optimize.explicit_nets import Int8Linear
from tests.optimize.workbench import (
    lowered,
    noise_context,
    of_seven_bits,
    packed_in_torchscript,
    packed_weights,
    parent_of,
    quantizers,
    run,
    with_running_statistics,
)
from tests.processor import NEEDS_VNNI, WIDEST


def infer(path: Path, batch: torch.Tensor) -> torch.Tensor:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    opened = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (logits,) = opened.run(None, {opened.get_inputs()[0].name: batch.numpy()})
    return torch.from_numpy(logits)


# --- the linter, on graphs made by hand --------------------------------------------------------------------------


def graph(
    *,
    weight: str = "int8",
    scale: float = 0.1,
    clip: tuple[float, float] | None = None,
    quantized: bool = True,
    computed_scale: bool = False,
    as_constant: bool = False,
) -> onnx.ModelProto:
    """``input`` → (Clip) → Q → DQ → MatMul with a dequantized weight → ``logits``."""
    nodes, initializers = (
        [],
        [
            numpy_helper.from_array(np.array(0.5, np.float32), "weight_scale"),
            numpy_helper.from_array(np.array(0, np.int8), "weight_zero"),
            numpy_helper.from_array(np.array(128, np.uint8), "zero"),
            numpy_helper.from_array(np.array(0, np.uint8), "unsigned_zero"),
            numpy_helper.from_array(np.array((clip or (0, 0))[0], np.float32), "low"),
            numpy_helper.from_array(np.array((clip or (0, 0))[1], np.float32), "high"),
        ],
    )
    if as_constant:
        nodes.append(
            helper.make_node("Constant", [], ["scale"], value=numpy_helper.from_array(np.array(scale, np.float32), ""))
        )
    elif computed_scale:
        initializers.append(numpy_helper.from_array(np.array(scale, np.float32), "raw_scale"))
        nodes.append(helper.make_node("Abs", ["raw_scale"], ["scale"]))
    else:
        initializers.append(numpy_helper.from_array(np.array(scale, np.float32), "scale"))
    value = "input"
    if clip:
        nodes.append(helper.make_node("Clip", [value, "low", "high"], ["clipped"]))
        value = "clipped"
    if quantized:
        nodes.append(helper.make_node("QuantizeLinear", [value, "scale", "zero"], ["q"]))
        nodes.append(helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["dq"]))
        value = "dq"
    matrix = np.arange(6).reshape(3, 2)
    if weight == "int8":
        initializers.append(numpy_helper.from_array(matrix.astype(np.int8), "weight"))
        nodes.append(helper.make_node("DequantizeLinear", ["weight", "weight_scale", "weight_zero"], ["w"]))
    elif weight == "uint8":
        initializers.append(numpy_helper.from_array(matrix.astype(np.uint8), "weight"))
        nodes.append(helper.make_node("DequantizeLinear", ["weight", "weight_scale", "unsigned_zero"], ["w"]))
    elif weight == "float behind Q":
        initializers.append(numpy_helper.from_array(matrix.astype(np.float32), "weight"))
        nodes.append(helper.make_node("QuantizeLinear", ["weight", "weight_scale", "weight_zero"], ["wq"]))
        nodes.append(helper.make_node("DequantizeLinear", ["wq", "weight_scale", "weight_zero"], ["w"]))
    else:
        initializers.append(numpy_helper.from_array(matrix.astype(np.float32), "w"))
    nodes.append(helper.make_node("MatMul", [value, "w"], ["logits"]))
    return helper.make_model(
        helper.make_graph(
            nodes,
            "test",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
            initializers,
        ),
        opset_imports=[helper.make_opsetid("", 20)],
    )


def test_a_whole_graph_is_counted():
    summary = verify(graph(), "cpu", activations=1, weights=1)
    assert (summary.activations, summary.weights) == (1, 1)
    assert summary.float_bytes == 4 * 4, "four float scalars: two scales and two bounds"


#: Integers 64 to 191 around the graph's zero point of 128, in steps of 0.1.
NARROW = NarrowRange(scale=0.1, zero_point=128, low=64, high=191)


@pytest.mark.parametrize("bounds", [(-6.4, 6.3), (0.0, 6.0), (-6.44, 6.34)])
def test_a_clamp_that_is_there_is_accepted(bounds):
    assert verify(graph(clip=bounds), "cpu", activations=1, weights=1, clamps=[NARROW]).activations == 1


@pytest.mark.parametrize(
    ("bounds", "narrow"),
    [
        ((0.0, 6.4), NARROW),
        ((-6.5, 6.3), NARROW),
        ((-1e4, 1e4), NARROW),
        # A ReLU6's, where the range was found to be 0 to 3.
        ((0.0, 6.0), NarrowRange(0.1, 128, 128, 158)),
        # Within the bounds of another quantizer.
        ((-6.4, 6.3), NarrowRange(0.2, 128, 64, 191)),
        ((-6.4, 6.3), NarrowRange(0.1, 0, 0, 127)),
    ],
)
def test_a_clip_that_does_not_keep_to_the_quantizers_range_is_no_clamp(bounds, narrow):
    with pytest.raises(PassError, match="1 activation ranges need a clamp, only 0 have one"):
        verify(graph(clip=bounds), "cpu", activations=1, weights=1, clamps=[narrow])


@pytest.mark.parametrize(
    ("bounds", "narrow"),
    [
        ((float("-inf"), -6.4), NarrowRange(0.1, 128, 0, 64)),
        ((6.3, float("inf")), NarrowRange(0.1, 128, 191, 255)),
    ],
)
def test_where_a_bound_is_infinite_the_integers_own_end_is_one_and_the_other_bound_counts(bounds, narrow):
    assert verify(graph(clip=bounds), "cpu", activations=1, weights=1, clamps=[narrow]).activations == 1
    with pytest.raises(PassError, match="1 activation ranges need a clamp, only 0 have one"):
        verify(graph(clip=bounds), "cpu", activations=1, weights=1, clamps=[NARROW])


@pytest.mark.parametrize(
    ("model", "expected", "complaint"),
    [
        (graph(quantized=False, weight="float"), (1, 1, []), "nothing is quantized: this is a float graph"),
        (graph(quantized=False, weight="float"), (0, 0, []), "nothing is quantized: this is a float graph"),
        (graph(weight="float"), (1, 0, []), "nothing is quantized"),
        (graph(weight="float behind Q"), (1, 1, []), "the constant weight is stored in float"),
        (graph(weight="uint8"), (1, 1, []), "weight weight is UINT8, not INT8"),
        (graph(), (2, 1, []), "1 activation and 1 weight quantizers came out of the export, but torch has 2 and 1"),
        (graph(), (1, 2, []), "torch has 1 and 2"),
        (graph(), (1, 1, [NARROW]), "1 activation ranges need a clamp, only 0 have one"),
        (graph(scale=0.0), (1, 1, []), "its scale is 0"),
        (graph(scale=-0.1), (1, 1, []), "its scale is negative"),
        (graph(scale=float("nan")), (1, 1, []), "its scale is NaN"),
        (graph(scale=0.0, as_constant=True), (1, 1, []), "its scale is 0"),
        (graph(computed_scale=True), (1, 1, []), "is computed, not a constant"),
    ],
)
def test_a_graph_that_is_not_what_torch_meant_is_refused(model, expected, complaint):
    onnx.checker.check_model(model, full_check=True)  # ONNX itself has nothing against it
    activations, weights, clamps = expected
    with pytest.raises(PassError, match=complaint):
        verify(model, "cpu", activations=activations, weights=weights, clamps=clamps)


# --- from torch.ao to ONNX Runtime -------------------------------------------------------------------------------


def integer_weights(path: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each int8 weight of a graph with its scales."""
    model = onnx.load(path)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return [
        (torch.from_numpy(values[node.input[0]].copy()), torch.from_numpy(values[node.input[1]].copy()))
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in values
    ]


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_weights_and_scales_are_torchs_own(name, made):
    quantized, graph_ = made(name), made(name, "onnx-int8")
    expected, found = packed_in_torchscript(quantized.path), integer_weights(graph_.path)
    assert len(expected) == len(found) == 5
    assert quantized.card.notes[0].startswith("5 quantized layers")
    for weight, scale in expected:
        ((integers, scales),) = [
            (w, s) for w, s in found if w.shape == weight.shape and torch.equal(s.flatten(), scale)
        ]
        assert scales.dtype == torch.float32
        assert torch.equal(integers, weight)
        assert weight.min() >= -127


def test_the_graph_has_nothing_left_in_float_but_scales_and_biases(made):
    model = onnx.load(made("ptq", "onnx-int8").path)
    floats = [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT]
    assert max(numpy_helper.to_array(tensor).size for tensor in floats) <= 32  # the widest layer has 32 channels
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("QuantizeLinear") == len(quantizers(made("ptq").folder)) > 5
    assert kinds.count("Conv") == 4


def test_the_file_says_nothing_of_where_it_was_built(made):
    data = made("ptq", "onnx-int8").path.read_bytes() + made("onnx").path.read_bytes()
    for word in (str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[4]), "site-packages", "tiny_net"):
        assert word.encode() not in data, word


@pytest.mark.parametrize("count", [1, 3, 16])
def test_any_batch_size_gives_each_image_the_same_logits(made, digits_context, count):
    batch = digits_context.pixels(16)
    artifact = made("ptq", "onnx-int8")
    assert torch.equal(infer(artifact.path, batch[:count]), infer(artifact.path, batch)[:count])


def test_the_graph_classifies_as_torchs_program_does(made, digits):
    from optimize.data.loading import loader
    from serve.runtime.images.image_preprocessing import normalise
    from tests.optimize.workbench import CPU, GREY16

    ((images, _),) = loader(digits.val, GREY16, batch_size=len(digits.val), device=CPU)
    batch = normalise(images, GREY16, CPU, torch.float32)
    for parents in (("ptq",), ("qat",), ("fuse", "ptq")):
        expected, found = run(made(*parents), batch), run(made(*parents, "onnx-int8"), images)
        assert (expected.argmax(1) == found.argmax(1)).float().mean() > 0.99, parents
        # Ties of rounding that spread through five layers; more than that is another network.
        step = quantizers(made(*parents).folder)[-1][0]
        assert (expected - found).abs().max() <= 2.01 * step, parents


def layer(name: str) -> nn.Module:
    """A layer with the same weights, whatever was drawn before."""
    torch.manual_seed(0)
    return LAYERS[name]()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Flatten()),
    "conv-relu": lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten()),
    "conv-bn-relu": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    ),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 8)),
    "pool": lambda: nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_on_equal_integers_each_layer_agrees_with_torch_to_a_step(name, tmp_path):
    folder, path = lowered(with_running_statistics(layer(name)), tmp_path)
    scale, zero_point, low, high = quantizers(folder)[0]
    integers = torch.randint(low, high + 1, (4, 1, 16, 16), generator=torch.Generator().manual_seed(5))
    batch = (integers - zero_point) * scale  # on the grid: both sides quantize it to the same integers
    use_int8_kernels()
    with torch.no_grad():
        expected = torch.jit.load(str(folder / "model.pt"))(batch)
    found = infer(path, batch)
    step = quantizers(folder)[-1][0]
    difference = ((found - expected) / step).round().abs()
    assert difference.max() <= 1
    assert (difference == 0).float().mean() > 0.995
    assert expected.unique().numel() > 8


def test_a_range_narrower_than_the_type_keeps_its_clamp(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(784, 4)).eval()
    with of_seven_bits():
        folder, path = lowered(module, tmp_path, "x86")
    assert {entry[2:] for entry in quantizers(folder)} == {(0, 127)}
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("Clip") >= kinds.count("QuantizeLinear") == len(quantizers(folder))
    assert lint(read_graph(path), "x86") == ()
    # Far outside of what calibration saw, where without the clamp integers above 127 would appear.
    scale, zero_point, _, _ = quantizers(folder)[0]
    integers = torch.randint(-500, 600, (8, 1, 16, 16), generator=torch.Generator().manual_seed(1))
    batch = (integers - zero_point) * scale
    reference = load_program(folder / REFERENCE_FILE).module()
    with torch.no_grad():
        expected = reference(batch)
        clamped = reference((integers.clamp(0, 127) - zero_point) * scale)
    assert torch.equal(expected, clamped)
    use_int8_kernels()
    with torch.no_grad():
        packed = torch.jit.load(str(folder / "model.pt"))(batch)
    step = quantizers(folder)[-1][0]
    assert ((infer(path, batch) - expected) / step).abs().max() <= 1.01
    assert ((packed - expected) / step).abs().max() <= 1.01


class Scaled(nn.Module):
    """ConvNeXt's layer scale: a parameter that torch quantizes as if it were an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 1.0]).view(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return torch.flatten(x + self.scale * self.second(x), 1)


class ScaledByView(nn.Module):
    """timm's: a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return torch.flatten(x + self.second(x) * self.scale.reshape(1, -1, 1, 1), 1)


class Ghost(nn.Module):
    """GhostNet's: half of the channels are made of the others, and of what there is then as many as are wanted: all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cheap = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.next = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.cat([x, self.cheap(x)], dim=1)
        return torch.flatten(self.next(x[:, :8, :, :]), 1)


class Queried(nn.Module):
    """GCViT's: products of one query, which each layer moves for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Conv2d(1, 4, 4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.first(x)
        tokens = query.flatten(2).transpose(1, 2)
        left = query.flatten(2).repeat_interleave(2, dim=1) @ self.left(tokens)
        right = query.flatten(2).repeat_interleave(2, dim=1) @ self.right(tokens)
        return torch.flatten(left + right, 1)


class QueriedToScale(nn.Module):
    """GCViT's too: each layer scales the one query for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Conv2d(1, 4, 4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.first(x).flatten(2)
        tokens = query.transpose(1, 2)
        return torch.flatten((query * 0.5) @ self.left(tokens) + (query * 0.5) @ self.right(tokens), 1)


class Pooled(nn.Module):
    """DLA's: the trees of two levels pool one map, each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        left, right = (nn.functional.max_pool2d(x, 2, 2) for _ in range(2))
        return torch.flatten(self.left(left) + self.right(right), 1)


class Placed(nn.Module):
    """ConViT's: each layer has the same places, as a constant of its own that it repeats for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Conv2d(1, 4, 4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.places, self.again = (nn.Parameter(torch.linspace(-1, 1, 64).view(1, 16, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.first(x).flatten(2)
        left = query @ self.left(self.places.expand(x.shape[0], -1, -1))
        return torch.flatten(left + query @ self.right(self.again.expand(x.shape[0], -1, -1)), 1)


class OnItsDevice(nn.Module):
    """XCiT's: positions are made where a layer's weight is, and of its type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(2, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.places.weight
        steps = torch.arange(16, device=weight.device, dtype=weight.dtype) / 16
        grid = torch.stack([steps.expand(16, 16), steps.unsqueeze(1).expand(16, 16)])
        return torch.flatten(self.first(x) + self.places(grid.unsqueeze(0)), 1)


class Upsampling(nn.Module):
    """A transposed convolution, which torch's x86 kernels get wrong (2.14), so that it stays in float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.second(torch.relu(self.first(x))), 1)


class Twice(nn.Module):
    """One convolution called twice."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.shared = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.shared(torch.relu(self.shared(torch.relu(self.first(x))))), 1)


@pytest.mark.parametrize(
    "kind", [Scaled, ScaledByView, Ghost, Queried, QueriedToScale, Pooled, Placed, OnItsDevice, Upsampling, Twice]
)
def test_unusual_constants_are_lowered_too(kind, tmp_path):
    torch.manual_seed(0)
    module = kind().eval()
    folder, path = lowered(module, tmp_path)
    batch = noise_context().example(8)
    use_int8_kernels()
    with torch.no_grad():
        expected = torch.jit.load(str(folder / "model.pt"))(batch)
        in_float = module(batch)
    step = quantizers(folder)[-1][0]
    difference = ((infer(path, batch) - expected) / step).abs()
    assert difference.max() <= 2.01
    assert difference.mean() < 0.2
    # Of 7-bit weights a step of the answer, which has 8 bits, is half as long as an error of their rounding.
    assert ((expected - in_float) / step).abs().max() < 4 * 127 / WIDEST, (
        "what is served has lost the network's numbers"
    )


def test_the_weight_of_a_layer_that_is_called_twice_is_in_the_file_once(tmp_path):
    _, path = lowered(Twice(channels=48).eval(), tmp_path)
    weights = [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
    assert [weight.shape for weight in weights if weight.dtype == np.int8 and weight.ndim == 4] == [
        (48, 1, 3, 3),
        (48, 48, 3, 3),
    ]


class Computed(Int8Linear):
    """A layer whose weight is computed before it is quantized: of itself, or of the images, too."""

    def __init__(self, of_images: bool) -> None:
        super().__init__(16, 4, 0.02, 128)
        self.of_images = of_images

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean()
        return torch.nn.functional.linear(x, self.quantized(weight + x.mean() if self.of_images else weight))


def test_a_weight_that_is_computed_of_constants_is_folded_and_one_of_the_images_refused():
    batch = noise_context().example(2).flatten(1)[:, :16]
    module = Computed(of_images=False).eval()
    form = explicit_form(module, batch)
    assert torch.equal(form(batch), module(batch))
    centred = module.weight - module.weight.mean()
    assert torch.equal(form.get_buffer("weight_int8_0"), (centred / 0.02).round().clamp(-127, 127).to(torch.int8))
    with pytest.raises(PassError, match="cannot fold the weight behind quantize_per_channel: its value or scale"):
        explicit_form(Computed(of_images=True).eval(), batch)


@pytest.mark.parametrize("kind", [ScaledByView, Ghost])
def test_no_constant_and_no_slice_of_everything_keeps_a_quantizer_of_its_own(kind, tmp_path):
    torch.manual_seed(0)
    _, path = lowered(kind().eval(), tmp_path)
    for target in ("cpu", "x86"):
        assert not {finding.rule for finding in lint(read_graph(path), target)} & {"doubled-pair", "unfolded-weight"}
    # In a process of its own: it was a crash.
    opening = f"import openvino; openvino.compile_model({str(path)!r}, 'CPU')"
    subprocess.run([sys.executable, "-c", opening], check=True)


def test_only_a_slice_that_takes_everything_of_any_batch_is_left_out():
    class Sliced(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = x[:, :3] + x[..., 0:4] + x[:] + x[:, :, :, :9] + x[()] + x[...] + x[..., :, :, :, 0:4]
            return whole + x[:2] + x[:, :, ::1][:, :1] + x[:, [0, 1, 2]] + x[..., :2, :, :, :]

    module = fx.symbolic_trace(Sliced())
    batch = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    note_shapes(module, batch)
    expected = module(batch)
    assert drop_whole_slices(module) == 8  # and not the first images, a part, or a list
    assert torch.equal(module(batch), expected)
    left = [node.args[1] for node in module.graph.nodes if node.target is operator.getitem]
    assert (..., slice(None, 2), *[slice(None)] * 3) in left


@NEEDS_VNNI
def test_a_full_range_has_no_clamp(tmp_path):
    _, path = lowered(layer("linear").eval(), tmp_path, "x86-vnni")
    assert "Clip" not in [node.op_type for node in onnx.load(path).graph.node]


def test_a_lost_clamp_is_noticed(tmp_path, monkeypatch):
    from optimize.quantization.lowering import qdq

    def losing(module, example, path, opset, **options):
        for node in list(module.graph.nodes):
            if node.target is torch.ops.aten.clamp.default:
                node.replace_all_uses_with(node.args[0])
        module.recompile()
        return export_onnx(module, example, path, opset, **options)

    monkeypatch.setattr(qdq, "export_onnx", losing)
    with of_seven_bits(), pytest.raises(PassError, match="need a clamp, only 0 have one"):
        lowered(layer("linear").eval(), tmp_path, "x86")


def test_a_lost_clamp_before_a_relu6_is_noticed(tmp_path, monkeypatch):
    """Its Clip to [0, 6] stays (behind a pool it is none of a layer's), and lets integers pass beyond the range."""
    from optimize.quantization.lowering import qdq

    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU6(), nn.Flatten(), nn.Linear(196, 4)).eval()

    def losing(program, example, path, opset, **options):
        for node in list(program.graph.nodes):
            if node.target is torch.ops.aten.clamp.default:
                node.replace_all_uses_with(node.args[0])
        program.recompile()
        return export_onnx(program, example, path, opset, **options)

    with of_seven_bits():
        lowered(module, tmp_path / "whole", "x86")
        monkeypatch.setattr(qdq, "export_onnx", losing)
        with pytest.raises(PassError, match="need a clamp, only 0 have one"):
            lowered(module, tmp_path / "lost", "x86")


def test_lowering_twice_gives_the_same_bytes(tmp_path, made, digits_context):
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ONNX_INT8.apply(made("ptq"), OnnxInt8(), digits_context, tmp_path / name)
        files.append((tmp_path / name / "model.onnx").read_bytes())
    assert files[0] == files[1] == made("ptq", "onnx-int8").path.read_bytes()


def test_a_file_with_its_weights_in_float_is_refused_for_its_size(tmp_path, monkeypatch, made, digits_context):
    monkeypatch.setattr(onnx_int8, "_STRUCTURE_BYTES", 0)
    with pytest.raises(PassError, match=r"the file has \d+ bytes, more than 0\.001 of the \d+ bytes"):
        ONNX_INT8.apply(made("ptq"), OnnxInt8(max_size_ratio=0.001), digits_context, tmp_path)


@pytest.mark.slow
def test_a_resnet_has_at_most_27_hundredths_of_the_float_graphs_bytes(tmp_path):
    """ResNet-18's widths, with one block of each: 12 convolutions, 3 of them in shortcuts, and a linear layer."""
    from torchvision.models.resnet import BasicBlock, ResNet

    from optimize.passes.onnx import ONNX, Onnx
    from serve.runtime.card.card import Preprocessing

    torch.manual_seed(0)
    module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4).eval()
    context = dataclasses.replace(noise_context(), preprocessing=Preprocessing(32, (32, 32)))
    parent = parent_of(module, context, tmp_path / "parent")
    for name in ("ptq", "onnx-int8", "onnx"):
        (tmp_path / name).mkdir()
    quantized = PTQ.apply(parent, Ptq(images=8), context, tmp_path / "ptq")
    card = dataclasses.replace(parent.card, target=quantized.target)
    artifact = type(parent)("ptq", "quantized", "1" * 64, tmp_path / "ptq", card, parent)
    product = ONNX_INT8.apply(artifact, OnnxInt8(), context, tmp_path / "onnx-int8")
    ONNX.apply(parent, Onnx(), context, tmp_path / "onnx")
    size, floats = ((tmp_path / name / "model.onnx").stat().st_size for name in ("onnx-int8", "onnx"))
    assert floats > 19e6
    assert size <= 0.27 * floats
    assert "13 int8 weights" in product.notes[0]
    weights = packed_weights(tmp_path / "ptq")
    assert sum(weight.numel() for weight in weights) == sum(
        layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)
    )
