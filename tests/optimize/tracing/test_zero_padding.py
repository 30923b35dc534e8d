"""Zeros that a network puts around its images itself: a convolution's own padding, and the same integers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
import torch.ao.nn.quantized as nnq
from numpy.typing import NDArray
from torch import fx, nn
from torch.nn import functional

from optimize.errors import PassError
from optimize.export.onnx_graph.write import run_onnx
from optimize.lint.base import LintTarget, lint
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.quantization.convert import trace_calls
from optimize.quantization.lowering.qdq import explicit_form, lower, reference_program
from optimize.quantization.lowering.uneven_padding import embed_padding, put_padding, take_padding
from optimize.quantization.targets import target_named
from optimize.tracing.folding import fuse_module
from optimize.tracing.trace import trace
from optimize.tracing.zero_padding import fold_padding
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program
from tests.optimize.explicit_nets import OPS, rounded
from tests.optimize.foreign_layers import GatedSameConv, SameConv
from tests.optimize.workbench import decibels, lowered, noise_context, through_int8

LINTED: dict[str, LintTarget] = {"x86-vnni": "cpu", "tensorrt": "tensorrt"}


class Padded(nn.Module):
    """A layer of answers below and above zero, zeros around these, and a convolution that reads both."""

    def __init__(self, pad: Callable[[torch.Tensor], torch.Tensor], convolution: nn.Module) -> None:
        super().__init__()
        self.stem, self.pad, self.middle = nn.Conv2d(1, 8, 3), pad, convolution
        self.last, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.pad(self.stem(x)))
        found: torch.Tensor = self.head(self.last(torch.relu(x)).mean((2, 3)))
        return found


def uneven(x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x, (0, 1, 1, 2))


def even(x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x, [1, 1, 2, 2], value=0.0)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "a layer's": lambda: Padded(nn.ZeroPad2d(1), nn.Conv2d(8, 8, 3)),
    "a function's": lambda: Padded(even, nn.Conv2d(8, 8, 3)),
    "uneven": lambda: Padded(uneven, nn.Conv2d(8, 8, 3, 2)),
    "before channels of their own": lambda: Padded(nn.ZeroPad2d((1, 2, 1, 2)), nn.Conv2d(8, 8, 5, 2, groups=8)),
    "behind a bound": lambda: Padded(nn.Sequential(nn.ReLU6(), nn.ZeroPad2d((0, 1, 0, 1))), nn.Conv2d(8, 8, 3, 2)),
    "along one axis": lambda: Padded(nn.ConstantPad2d((0, 1, 0, 0), 0), nn.Conv2d(8, 8, 3, 2)),
    "by the images' size": lambda: Padded(nn.Identity(), SameConv(8, 8, 3, stride=2)),
    "by a word": lambda: Padded(nn.Identity(), nn.Conv2d(8, 8, 4, padding="same")),
    "with a border of its own": lambda: Padded(uneven, nn.Conv2d(8, 8, 3, 2, 1)),
    "more than a kernel": lambda: Padded(nn.ZeroPad2d((3, 4, 3, 4)), nn.Conv2d(8, 8, 3)),
    "twice": lambda: Padded(nn.Sequential(nn.ZeroPad2d(1), nn.ZeroPad2d((0, 1, 0, 1))), nn.Conv2d(8, 8, 3, 2)),
    "before an activation": lambda: Padded(nn.Sequential(nn.ZeroPad2d(1), nn.ReLU(inplace=True)), nn.Conv2d(8, 8, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_no_pad_is_left_and_every_engine_computes_the_same(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = NETWORKS[name]().eval()
    quantized, path = lowered(module, tmp_path, "x86-vnni")
    operators = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert not operators["Pad"]
    assert not operators["Clip"]
    # The image, three layers, the activation with its layer, the mean, and the answer are rounded once each at most.
    assert operators["QuantizeLinear"] <= 7
    batch = noise_context().example(16)
    with torch.no_grad():
        meant, floats = load_program(quantized / "reference.pt2").module()(batch), module(batch)
        assert decibels(floats, meant) > 35
        use_int8_kernels()
        program = torch.jit.load(str(quantized / "model.pt"))
        packed = program(batch)
    # The image, what the mean is taken of, and the mean: zeros are put around integers.
    assert [node.kind() for node in program.inlined_graph.nodes()].count("aten::quantize_per_tensor") == 3
    (in_openvino,) = compile_bytes(path.read_bytes(), 1)(batch.numpy()).values()
    torch.testing.assert_close(run_onnx(path, batch, literal=True), meant)
    for found in (run_onnx(path, batch), packed, torch.from_numpy(in_openvino)):
        assert decibels(meant, found) > 45


@pytest.mark.parametrize("name", ["uneven", "by the images' size"])
def test_for_tensorrt_no_pad_is_left(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    quantized, path = lowered(NETWORKS[name]().eval(), tmp_path, "tensorrt")
    assert "Pad" not in {node.op_type for node in onnx.load(path).graph.node}
    batch = noise_context().example(16)
    with torch.no_grad():
        meant = load_program(quantized / "reference.pt2").module()(batch)
    assert decibels(meant, run_onnx(path, batch, literal=True)) > 45


@pytest.mark.parametrize("front_end", ["fx", "pt2e"])
def test_uneven_zeros_bring_no_quantizer_and_no_other_scale(front_end: Literal["fx", "pt2e"], tmp_path: Path) -> None:
    if front_end == "pt2e":
        pytest.importorskip("torchao")
    config, counts = Ptq(observer="histogram", target="x86-vnni", front_end=front_end), []
    for name in ("a function's", "uneven"):
        torch.manual_seed(1)
        (tmp_path / name).mkdir()
        module, graph = NETWORKS[name]().eval(), OnnxInt8(input="float")
        _, path = through_int8(module, tmp_path / name, config, graph, noise_context())
        counts.append(Counter(node.op_type for node in onnx.load(path).graph.node))
    assert counts[0] == counts[1]
    assert not counts[0]["Pad"]


class Rounded(nn.Module):
    """Integers, zeros around them, perhaps rounded to another scale, and a convolution of integers."""

    def __init__(self, sides: tuple[int, ...], stride: int, zero: int, scale: float) -> None:
        super().__init__()
        self.sides, self.stride, self.zero, self.scale = sides, stride, zero, scale
        self.weight = nn.Parameter(torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(3)))
        self.register_buffer("scales", torch.full((6,), 0.03))
        self.register_buffer("zeros", torch.zeros(6, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = rounded(functional.pad(rounded(x, 0.02, self.zero), self.sides), self.scale, self.zero)
        weight: Any = OPS.quantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        weight = OPS.dequantize_per_channel(weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        return rounded(functional.conv2d(x, weight, None, self.stride), 0.07, 100)


def by_hand(net: Rounded, x: NDArray[np.float32]) -> NDArray[Any]:
    """The integers of a network's answer, in whole numbers but for the last step."""
    integers = np.rint(x / 0.02) + net.zero
    again = np.rint((np.clip(integers, 0, 255) - net.zero) * (0.02 / net.scale)) + net.zero
    left, right, above, below = net.sides
    wide = ((0, 0), (0, 0), (above, below), (left, right))
    # Zeros are the zero-point, which is 0 where it is taken off.
    shifted = np.pad(np.clip(again, 0, 255).astype(np.int64) - net.zero, wide)
    weight = np.clip(np.rint(net.weight.detach().numpy() / np.float32(0.03)), -127, 127).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(shifted, (3, 3), (2, 3))[:, :, :: net.stride, :: net.stride]
    sums = np.einsum("nchwij,ocij->nohw", windows, weight)
    return np.clip(np.rint(sums * (net.scale * 0.03 / 0.07)) + 100, 0, 255)


@pytest.mark.parametrize(
    ("sides", "stride", "zero", "scale"),
    [
        ((1, 1, 1, 1), 1, 117, 0.02),
        ((0, 1, 0, 1), 2, 117, 0.02),
        ((0, 1, 0, 1), 2, 0, 0.02),
        ((2, 0, 0, 1), 1, 117, 0.02),
        ((0, 0, 0, 1), 2, 117, 0.02),
        ((0, 1, 0, 1), 2, 117, 0.031),
    ],
)
def test_the_integers_are_those_of_whole_numbers(
    sides: tuple[int, ...], stride: int, zero: int, scale: float, tmp_path: Path
) -> None:
    net, path = Rounded(sides, stride, zero, scale).eval(), tmp_path / "model.onnx"
    x = 0.02 * torch.randint(-100, 100, (4, 5, 9, 8), generator=torch.Generator().manual_seed(0)).float()
    program = reference_program(explicit_form(net, x), x)
    lower(program, x, path, target_named("x86-vnni"))
    operators = Counter(node.op_type for node in onnx.load(path).graph.node)
    # Of two pairs in a row ONNX Runtime makes one, of other integers: a Pad between two scales stays.
    assert (operators["Pad"], operators["QuantizeLinear"]) == ((0, 2) if scale == 0.02 else (1, 3))
    expected = by_hand(net, x.numpy())
    (in_openvino,) = compile_bytes(path.read_bytes(), 1)(x.numpy()).values()
    for found in (run_onnx(path, x).numpy(), in_openvino):
        integers = np.rint(found / 0.07) + 100
        assert integers.shape == expected.shape
        assert np.abs(integers - expected).max() <= 1  # halfway between two, in floats
        assert (integers == expected).mean() > 0.998


@pytest.mark.parametrize(
    ("sides", "settings", "wide"),
    [
        ((0, 1, 0, 1), {"stride": 2}, (4, 4)),
        ((1, 0, 2, 2), {"stride": 2}, (3, 4)),
        ((1, 2, 1, 2), {"groups": 8}, (4, 4)),
        ((1, 1, 1, 1), {"padding": 1}, (3, 3)),
        ((2, 2, 2, 2), {"dilation": 2}, (3, 3)),
        ((0, 2, 0, 0), {}, None),  # torch is slower with a kernel that is wider by two than with a pad
        ((0, 1, 0, 1), {"dilation": 2}, None),  # a zero between two zeros is no place of the kernel
        ((0, 0, 0, 0, 0, 1), {}, None),
    ],
)
def test_in_torchs_packed_program_a_kernel_gets_a_side_of_zeros(
    sides: tuple[int, ...], settings: dict[str, Any], wide: tuple[int, int] | None
) -> None:
    use_int8_kernels()
    generator = torch.Generator().manual_seed(0)
    more = sum(sides[4:])
    layer = nnq.Conv2d(8 + more, 8, 3, **settings)
    weight = torch.randint(-127, 128, (8, layer.in_channels // layer.groups, 3, 3), generator=generator).float() * 0.01
    scales, zeros = torch.full((8,), 0.01).double(), torch.zeros(8, dtype=torch.int64)
    layer.set_weight_bias(torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), torch.randn(8))
    layer.scale, layer.zero_point = 0.5, 128
    graph = fx.Graph()
    padded = graph.call_function(functional.pad, (graph.placeholder("x"), sides))
    graph.output(graph.call_module("layer", (padded,)))
    converted = fx.GraphModule(nn.ModuleDict({"layer": layer}), graph)
    images = torch.quantize_per_tensor(torch.randn(2, 8, 9, 12, generator=generator), 0.02, 97, torch.quint8)
    expected = converted(images).int_repr()
    assert expected.float().std() > 4
    assert embed_padding(converted) == (wide is not None)
    assert (functional.pad in {node.target for node in converted.graph.nodes}) is (wide is None)
    assert layer._weight_bias()[0].shape[2:] == (wide or (3, 3))
    assert torch.equal(converted(images).int_repr(), expected)


def test_no_kernel_becomes_one_that_amx_gets_wrong() -> None:
    """32 channels by a row of four: see `optimize.quantization.rewrites.wide_patches`."""
    layer = nnq.Conv2d(32, 8, 3, stride=2)
    graph = fx.Graph()
    padded = graph.call_function(functional.pad, (graph.placeholder("x"), (0, 1, 0, 1)))
    graph.output(graph.call_module("layer", (padded,)))
    assert embed_padding(fx.GraphModule(nn.ModuleDict({"layer": layer}), graph)) == 0


FOLDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "of lines": (lambda: nn.Sequential(nn.ZeroPad1d(2), nn.Conv1d(3, 4, 3, padding=1)), (2, 3, 9)),
    "of bodies": (lambda: nn.Sequential(nn.ZeroPad3d((1, 1, 2, 2, 0, 0)), nn.Conv3d(3, 4, 3)), (2, 3, 5, 6, 7)),
    "of maps": (lambda: nn.Sequential(nn.ZeroPad2d(1), nn.SiLU(), nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3)), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_even_zeros_are_a_float_convolutions_own_padding(name: str) -> None:
    torch.manual_seed(0)
    build, shape = FOLDED[name]
    module, x = build().eval(), torch.randn(shape)
    before = copy.deepcopy(module)
    fused = fuse_module(module, x)
    assert not [layer for layer in fused.modules() if "Pad" in type(layer).__name__]
    assert functional.pad not in {node.target for node in fused.graph.nodes}
    torch.testing.assert_close(fused(x), before(x))
    torch.testing.assert_close(module(x), before(x))  # what it was made from is as it was


class Shared(nn.Module):
    """Zeros that two convolutions read, or one and something else."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 3, 3), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.pad(x, (1, 1, 1, 1))
        found: torch.Tensor = self.one(x) + self.other(x)
        return found


@pytest.mark.parametrize(("other", "folded", "pads"), [(nn.Conv2d(3, 3, 3), 2, 0), (nn.MaxPool2d(3, 1), 1, 1)])
def test_zeros_that_two_read_stay_for_what_is_no_convolution(other: nn.Module, folded: int, pads: int) -> None:
    x = torch.randn(2, 3, 6, 6)
    module = Shared(other).eval()
    traced = trace(module, x)
    assert fold_padding(traced) == folded
    assert [node.target for node in traced.graph.nodes].count(functional.pad) == pads
    torch.testing.assert_close(traced(x), module(x))


class Alone(nn.Module):
    """What nothing is folded of."""

    def __init__(self, pad: Callable[[torch.Tensor], torch.Tensor], reader: nn.Module) -> None:
        super().__init__()
        self.pad, self.reader = pad, reader

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.reader(self.pad(x))
        return found


class Called(nn.Module):
    """One convolution, with zeros at one of its two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(functional.pad(self.layer(x), (1, 1, 1, 1)))
        return found


class Written(nn.Module):
    """An activation that writes into a part of what is read afterwards, if no zeros are in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.activation, self.layer = nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x[:, :, :4]
        found: torch.Tensor = self.layer(self.activation(functional.pad(part, (1, 1, 1, 1))))
        return found.mean((2, 3)) + x.mean((2, 3))


KEPT: dict[str, Callable[[], nn.Module]] = {
    "channels that a shortcut lacks": lambda: Alone(
        lambda x: functional.pad(x, (0, 0, 0, 0, 2, 2)), nn.Conv2d(7, 4, 1)
    ),
    "another number": lambda: Alone(nn.ConstantPad2d(1, 0.5), nn.Conv2d(3, 4, 3)),
    "what lies there": lambda: Alone(nn.ReplicationPad2d(1), nn.Conv2d(3, 4, 3)),
    "a reflection": lambda: Alone(lambda x: functional.pad(x, (1, 1, 1, 1), "reflect"), nn.Conv2d(3, 4, 3)),
    "a part cut off": lambda: Alone(nn.ZeroPad2d((-1, -1, 1, 1)), nn.Conv2d(3, 4, 3)),
    "uneven": lambda: Alone(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3)),
    "in front of a transposed convolution": lambda: Alone(nn.ZeroPad2d(1), nn.ConvTranspose2d(3, 4, 3)),
    "in front of a pool": lambda: Alone(nn.ZeroPad2d(1), nn.MaxPool2d(3)),
    "in front of a reflection": lambda: Alone(nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "at one call of two": Called,
    "in front of what gives 1 for 0": lambda: Alone(nn.ZeroPad2d(1), nn.Sequential(nn.Softplus(), nn.Conv2d(3, 4, 3))),
    "in front of what writes": Written,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_padding_stays(name: str) -> None:
    torch.manual_seed(0)
    module = KEPT[name]().eval()
    x = torch.randn(2, 3, 8, 8)
    traced, expected = trace(copy.deepcopy(module), x), module(x.clone())
    nodes = len(traced.graph.nodes)
    assert fold_padding(traced) == 0
    assert len(traced.graph.nodes) == nodes
    assert torch.equal(traced(x), expected)


def test_in_int8_channels_of_zeros_and_reflections_stay(tmp_path: Path) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.next = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(8, 8, 3)
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.pad(self.stem(x), (0, 0, 0, 0, 1, 1))
            found: torch.Tensor = self.head(self.next(functional.pad(x, (1, 1, 1, 1), "reflect")).mean((2, 3)))
            return found

    torch.manual_seed(0)
    quantized, path = lowered(Network().eval(), tmp_path, "x86-vnni")
    model, batch = onnx.load(path), noise_context().example(8)
    assert [node.op_type for node in model.graph.node].count("Pad") == 2
    assert not [finding for finding in lint(model, "cpu") if finding.rule == "padded-layer"]
    with torch.no_grad():
        meant = load_program(quantized / "reference.pt2").module()(batch)
    assert decibels(meant, run_onnx(path, batch)) > 45


def test_a_convolution_that_does_more_than_pad_is_left_whole() -> None:
    x = torch.randn(2, 3, 8, 8)
    traced = trace_calls(nn.Sequential(SameConv(3, 4, 3, 2), GatedSameConv(4, 4, 3, 2)).eval(), x)
    kinds = [type(layer) for layer in traced.modules() if isinstance(layer, nn.Conv2d)]
    assert kinds == [nn.Conv2d, GatedSameConv]


def test_one_layer_called_for_images_of_two_sizes_pads_each_as_it_does() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = SameConv(3, 3, 3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(self.layer(x))
            return found

    x = torch.randn(2, 3, 10, 10)  # to 5, which gets a zero at each side, and to 3
    module = Network().eval()
    traced = trace_calls(copy.deepcopy(module), x)
    assert {type(layer) for layer in traced.modules() if isinstance(layer, nn.Conv2d)} == {nn.Conv2d}
    torch.testing.assert_close(traced(x), module(x))


def test_timms_networks_from_tensorflow_are_wholly_in_integers() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    module = timm.create_model("tf_efficientnet_lite0", num_classes=4).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = module(x)
        traced = trace_calls(module, x)
        torch.testing.assert_close(traced(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert {type(layer) for layer in traced.modules() if isinstance(layer, nn.Conv2d)} == {nn.Conv2d}


def test_padding_that_would_be_lost_is_an_error() -> None:
    net = Rounded((0, 1, 0, 1), 2, 3, 0.02).eval()
    module: Any = torch.export.export(net, (torch.randn(2, 5, 8, 8),)).module()
    taken = take_padding(module)
    (node,) = taken
    node.replace_all_uses_with(node.all_input_nodes[0])
    module.graph.erase_node(node)
    with pytest.raises(PassError, match="would lose its padding"):
        put_padding(module, taken)
