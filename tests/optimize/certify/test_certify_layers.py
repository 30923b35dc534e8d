"""Layers on equal integers: what is sound passes; each kind of fault is found at its layer and named by its cause."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import openvino
import pytest
import torch
from onnx import numpy_helper
from onnx.utils import Extractor
from torch import nn

from optimize.certify import layer_certification
from optimize.certify.layer_certification import check_layers, in_process
from optimize.certify.layer_findings import Cause, Engine, LayerParity
from optimize.certify.packed_program import PackedLayers
from optimize.certify.reference_program import Batch, Layer, ReferenceLayers
from optimize.export.onnx_graph.pixel_input import GraphInput
from optimize.measure.processes import worker
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.quantization.targets import TargetName
from optimize.store.artifact import REFERENCE_FILE
from optimize.tracing.rewrite_table import left_out
from serve.runtime.card.card import load_card, sha256_file, write_card
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import execution_id
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.errors import PipelineError
from serve.runtime.model_files.onnx_session import cpu_session
from serve.runtime.model_files.program_file import load_program
from tests.optimize.foreign_layers import SameConv
from tests.optimize.workbench import applied, noise, noise_context, of_seven_bits, parent_of, quantizers
from tests.processor import NEEDS_VNNI

ORT = Execution("onnxruntime")
LITERAL = Execution("onnxruntime", options={"optimizations": False})
OPENVINO = Execution("openvino")
TORCH = Execution("torchscript")
GRAPHS = (LITERAL, ORT, OPENVINO)

#: What OpenVINO 2026.4 makes of a sum is known, and of others nothing of the sort.
KNOWN = openvino.__version__.startswith("2026.4")


class Net(nn.Module):
    """A network with all that lies between quantizers: depthwise, ReLU6, a sum, pools, a dropout.

    Its last pool is one to ``side × side`` places: one to a single place is computed in floats, with what is before it.
    """

    def __init__(self, side: int = 1) -> None:
        super().__init__()
        self.side = side
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 16, 1)
        self.down = nn.Conv2d(16, 24, 3, stride=2)
        self.head = nn.Linear(24 * side * side, 4)
        self.relu6, self.dropout = nn.ReLU6(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.point(self.relu6(self.depth(x))))
        x = torch.relu(self.down(nn.functional.max_pool2d(x, 2)))
        x = torch.flatten(nn.functional.adaptive_avg_pool2d(x, self.side), 1)
        return self.head(self.dropout(x))


@dataclasses.dataclass(frozen=True)
class Made:
    """A quantized network: torch's packed program and its graph, and images."""

    packed: Path
    graph: Path
    pixels: torch.Tensor

    @property
    def reference(self) -> Path:
        return self.packed / REFERENCE_FILE

    def checked(self, execution: Execution) -> Engine:
        folder = self.packed if execution == TORCH else self.graph
        return check_layers(folder, self.reference, execution, self.pixels)


def quantized(
    module: nn.Module,
    root: Path,
    target: TargetName = "auto",
    grey: tuple[int, int] = (40, 200),
    given: GraphInput = "uint8",
    *,
    front_end: Literal["fx", "pt2e"] = "fx",
) -> Made:
    """``module`` after ptq with min-max ranges and onnx-int8, on grey noise of values in a range.

    Of the front end ``pt2e`` there is no packed program: what lies in its place is the reference.
    """
    context = noise_context(train=noise(64, 1, *grey))
    parent = parent_of(module.eval(), context, root / "parent")
    config = Ptq(front_end=front_end, observer="minmax", images=32, target=target, min_agreement=0.0)
    packed = applied(PTQ, config, parent, context, root / "ptq")
    lowering = OnnxInt8(max_size_ratio=1.0, min_agreement=0.0, input=given)
    graph = applied(ONNX_INT8, lowering, packed, context, root / "onnx-int8")
    return Made(packed.folder, graph.folder, context.pixels(16))


def faults(found: Engine) -> list[tuple[str, str]]:
    """The layers that compute something else, and why."""
    causes = [(layer.name, layer.cause) for layer in found.layers if layer.cause is not None]
    return [(name, cause.why) for name, cause in causes if cause.why != "rounding"]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(0)
    return quantized(Net(), tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Activations of 7 bits, each with a clamp, in a graph that takes normalised floats."""
    torch.manual_seed(0)
    with of_seven_bits():
        return quantized(Net(), tmp_path_factory.mktemp("narrow"), "x86", given="float")


def changed(made: Made, root: Path, change: Callable[[onnx.ModelProto], None]) -> Made:
    """The same with a graph that somebody has spoiled."""
    graph = root / "spoiled"
    graph.mkdir(parents=True)
    model = onnx.load(made.graph / "model.onnx")
    change(model)
    onnx.save(model, graph / "model.onnx")
    card = load_card(made.graph)
    write_card(graph, dataclasses.replace(card, files={"model.onnx": sha256_file(graph / "model.onnx")}))
    return dataclasses.replace(made, graph=graph)


@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_every_quantizer_of_the_program_is_a_layer_of_every_engine(net: Made, execution: Execution) -> None:
    found = net.checked(execution)
    assert [layer.number for layer in found.layers] == list(range(len(quantizers(net.packed))))
    assert found.apart is None
    batch = len(net.pixels)
    assert [layer.outputs for layer in found.layers[:2]] == [batch * 16 * 16, batch * 16 * 16 * 16]


@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_sound_kernels_differ_by_ties_alone(net: Made, execution: Execution) -> None:
    found = net.checked(execution)
    assert found.sound
    assert all(layer.steps <= 1 for layer in found.layers)
    assert sum(layer.different for layer in found.layers) < 0.01 * sum(layer.outputs for layer in found.layers)


@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_ranges_of_seven_bits_are_sound_with_their_clamps(narrow: Made, execution: Execution) -> None:
    found = narrow.checked(execution)
    assert found.layers
    assert found.sound
    assert all(layer.steps <= 1 for layer in found.layers)


@pytest.mark.parametrize("execution", GRAPHS, ids=execution_id)
def test_a_border_that_is_cut_off_is_no_part_of_a_layer(execution: Execution, tmp_path: Path) -> None:
    """Of what OpenVINO gets wrong without one; see `optimize.quantization.lowering.amx.group_widths`."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 144, 3), nn.ReLU(), nn.Conv2d(144, 8, 1, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 3)]
    made = quantized(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), tmp_path)
    found = made.checked(execution)
    assert found.sound
    assert [layer.outputs // len(made.pixels) for layer in found.layers[1:3]] == [144 * 14 * 14, 8 * 14 * 14]


@pytest.mark.parametrize(
    "pool",
    [nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, divisor_override=7), nn.AvgPool2d(3, 2, 1, ceil_mode=True)],
    ids=["counted", "divided", "rounded up"],
)
@pytest.mark.parametrize("execution", GRAPHS, ids=execution_id)
def test_averages_with_zeros_around_a_map_are_sound(execution: Execution, pool: nn.AvgPool2d, tmp_path: Path) -> None:
    """Of what no ReLU ends; sums of 9 have no ties."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), pool, nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert quantized(network, tmp_path).checked(execution).sound


@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_layers_that_pad_are_sound(execution: Execution, tmp_path: Path) -> None:
    """Of what no ReLU ends, too; graphs have no quantizer behind the zeros."""
    torch.manual_seed(0)
    layers = [SameConv(1, 8, 3, 2), nn.ReLU(), nn.ZeroPad2d((0, 1, 1, 2)), nn.Conv2d(8, 8, 3, groups=8)]
    network = nn.Sequential(*layers, SameConv(8, 4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = quantized(network, tmp_path).checked(execution)
    assert found.sound
    weighted = [layer.name for layer in found.layers if "conv2d" in layer.name]
    assert len(weighted) == 3


class Joined(nn.Module):
    """What two layers give, put together and cut off at 0: ONNX graphs for CPUs have one quantizer less."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first(x), self.second(x)], 1).relu()
        return self.last(x).mean((2, 3))


@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_layers_of_what_is_put_together_are_sound(execution: Execution, tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = quantized(Joined(), tmp_path).checked(execution)
    assert found.sound
    # The image, three layers, and what is put together; torch rounds that before its ReLU, too.
    assert len(found.layers) >= 5


def test_exact_arithmetic_is_that_of_integers(net: Made) -> None:
    """The stem, computed with numpy's whole numbers from the graph's weights."""
    program = ReferenceLayers(load_program(net.reference))
    layer = program.layers[1]
    assert layer.name == "stem: conv2d"
    batch = program.shown(net.pixels[:2], load_card(net.packed).preprocessing)
    model = onnx.load(net.graph / "model.onnx")
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weight = next(value for value in tensors.values() if value.shape == (16, 1, 3, 3) and value.dtype == np.int8)
    scale, zero, *_ = quantizers(net.packed)[0]
    codes = np.pad(batch.integers[0].numpy().astype(np.int64) - zero, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(codes, (3, 3), axis=(2, 3))[:, 0]
    sums = np.einsum("nhwij,oij->nohw", windows, weight[:, 0].astype(np.int64))
    dequantizer = next(
        node
        for node in model.graph.node
        if len(node.input) > 1 and node.input[0] in tensors and tensors[node.input[0]] is weight
    )
    scales = tensors[dequantizer.input[1]].astype(np.float64)
    convolution = next(node for node in model.graph.node if node.op_type == "Conv")
    bias = tensors[convolution.input[2]].astype(np.float64)
    values = sums * scales[:, None, None] * scale + bias[:, None, None]
    own, own_zero, *_ = quantizers(net.packed)[1]
    expected = np.clip(values / own + own_zero, 0, 255)
    np.testing.assert_allclose(program.exact(layer, batch).numpy(), expected, atol=1e-9)


def test_the_step_is_the_scale_of_the_answers_quantizer(net: Made) -> None:
    assert ReferenceLayers(load_program(net.reference)).steps == (quantizers(net.packed)[-1][0],)


class Wide(nn.Module):
    """A wide depthwise convolution whose products all have one sign, each near the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 128, 1), nn.Conv2d(128, 128, 3, padding=1, groups=128, bias=False)
        for parameter in self.first.parameters():
            nn.init.ones_(parameter)
        nn.init.constant_(self.last.weight, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.last(torch.relu(self.first(x))), 1)


@pytest.mark.skipif("x86" not in torch.backends.quantized.supported_engines, reason="no x86 quantized kernels")
@NEEDS_VNNI
def test_a_kernel_that_saturates_is_found_at_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = quantized(Wide(), tmp_path, grey=(200, 256))
    assert made.checked(TORCH).sound
    monkeypatch.setattr(
        layer_certification, "use_int8_kernels", lambda: monkeypatch.setattr(torch.backends.quantized, "engine", "x86")
    )
    found = made.checked(TORCH)
    assert not found.sound
    assert found.first is not None
    assert found.first.cause is not None
    assert found.first.cause.why == "saturation"
    assert found.first.name == "last: conv2d"
    # Those before it, a plain convolution, are right on the same kernels, and so is what follows on the right integers.
    assert [layer for layer in found.layers if not layer.holds] == [found.first]
    assert found.first.steps > 1


def without_clip(model: onnx.ModelProto, which: int) -> None:
    """Take one Clip away: what it gave is what it was given."""
    clip = [node for node in model.graph.node if node.op_type == "Clip"][which]
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == clip.output[0]:
                node.input[place] = clip.input[0]
    model.graph.node.remove(clip)


@pytest.fixture(scope="module")
def surprised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[GraphInput], Made]:
    """Activations of 7 bits, calibrated on a few greys, and shown all: they go beyond their ranges."""

    @functools.cache
    def made(given: GraphInput) -> Made:
        torch.manual_seed(0)
        with of_seven_bits():
            calibrated = quantized(Net(side=2), tmp_path_factory.mktemp("surprised"), "x86", (100, 130), given)
        return dataclasses.replace(calibrated, pixels=noise_pixels(16))

    return made


@pytest.mark.parametrize("execution", GRAPHS, ids=execution_id)
def test_a_lost_clamp_is_found_at_its_layer(
    surprised: Callable[[GraphInput], Made], tmp_path: Path, execution: Execution
) -> None:
    made = surprised("float")
    assert faults(made.checked(execution)) == []
    spoiled = changed(made, tmp_path, lambda model: without_clip(model, 1))
    found = spoiled.checked(execution)
    assert faults(found) == [("stem: conv2d", "lost clamp")]
    causes = [layer.cause for layer in found.layers if layer.name == "stem: conv2d"]
    assert all("without its quantizer's range of 0 to 127" in cause.said for cause in causes if cause)


def test_below_a_clamp_every_engine_gives_the_integers_that_are_meant(surprised: Callable[[GraphInput], Made]) -> None:
    """OpenVINO (2026.4.1) merges what multiplies, subtracts and clips with a quantizer behind it, and gives others.

    So the clamp is one of integers, behind the quantizer.
    """
    made = surprised("uint8")
    for execution in (LITERAL, OPENVINO):
        assert faults(made.checked(execution)) == []


def kept(model: onnx.ModelProto, quantizer: onnx.NodeProto) -> str:
    """The name of a quantizer's integers, behind the Clip that keeps them to 7 bits, if there is one."""
    given: str = quantizer.output[0]
    clips = [node.output[0] for node in model.graph.node if node.op_type == "Clip" and node.input[0] == given]
    return clips[0] if clips else given


def summed(made: Made, *, rounded: bool) -> onnx.ModelProto:
    """The graph up to its sum's integers; the convolution's addend goes through its quantizer, or comes as it is."""
    model = onnx.shape_inference.infer_shapes(onnx.load(made.graph / "model.onnx"))
    (layer,) = [layer for layer in ReferenceLayers(load_program(made.reference)).layers if layer.name == "add relu"]
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    convolved = quantizers[layer.number - 1]
    if not rounded:
        integers = kept(model, convolved)
        dequantized = {node.output[0] for node in model.graph.node if node.input and node.input[0] == integers}
        (add,) = [node for node in model.graph.node if node.op_type == "Add"]
        (place,) = [place for place, name in enumerate(add.input) if name in dequantized]
        add.input[place] = convolved.input[0]
    return Extractor(model).extract_model([model.graph.input[0].name], [kept(model, quantizers[layer.number])])


@pytest.mark.skipif(not KNOWN, reason="what another OpenVINO does is not known")
def test_openvino_adds_what_a_convolution_gives_before_it_is_rounded(net: Made) -> None:
    """A sum that becomes part of a convolution, which is nearer to the float network and not what the graph says."""
    written, merged = summed(net, rounded=True).SerializeToString(), summed(net, rounded=False).SerializeToString()
    found = torch.from_numpy(next(iter(compile_bytes(written, 1)({0: net.pixels.numpy()}).values())))
    meant, without = (literal(body, net.pixels) for body in (written, merged))
    assert (meant != without).float().mean() > 0.02
    assert (found != without).float().mean() < 1e-3


def literal(body: bytes, pixels: torch.Tensor) -> torch.Tensor:
    """What ONNX Runtime gives where it rewrites nothing."""
    session = cpu_session(body, half=False, optimized=False)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: pixels.numpy()})[0])


def noise_pixels(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 1, 16, 16), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("execution", GRAPHS, ids=execution_id)
def test_a_layer_that_computes_with_another_weight_is_a_kernels_fault(
    net: Made, tmp_path: Path, execution: Execution
) -> None:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [16, 16, 1, 1])
        tensor.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(tensor), 1, axis=0), tensor.name))

    found = changed(net, tmp_path, change).checked(execution)
    assert faults(found) == [("point: conv2d", "kernel")], "those after it are given the right integers"
    assert not found.sound


def test_a_tie_that_is_rounded_up_is_called_rounding(net: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that rounds 2.5 to 3, where the reference rounds to even."""

    class RoundsUp:
        def every(self, batch: Batch) -> dict[int, torch.Tensor]:
            return {layer.number: self.one(layer, batch) for layer in PROGRAM.layers}

        def one(self, layer: Layer, batch: Batch) -> torch.Tensor:
            exact = PROGRAM.exact(layer, batch)
            nearly = exact + torch.where((exact - exact.floor() - 0.5).abs() < 2e-3, 2e-3, 0.0)
            return (nearly + 0.5).floor().clamp(0, 255).to(torch.uint8)

        def astray(self, layer: Layer) -> tuple[str, ...]:
            return ()

    PROGRAM = ReferenceLayers(load_program(net.reference))  # noqa: N806
    monkeypatch.setitem(layer_certification._RUNNERS, "onnxruntime", lambda *_: RoundsUp())
    found = net.checked(ORT)
    assert found.sound
    assert found.first is not None
    assert found.first.cause is not None
    assert found.first.cause.why == "rounding"
    assert found.first.steps == 1


def unknown_operator(model: onnx.ModelProto, groups: int) -> None:
    """Let the convolution of so many groups be an operator that nobody knows."""
    (node,) = [
        node
        for node in model.graph.node
        for attribute in node.attribute
        if node.op_type == "Conv" and attribute.name == "group" and attribute.i == groups
    ]
    node.op_type = "Unknown"


@pytest.mark.parametrize("execution", GRAPHS, ids=execution_id)
def test_a_layer_that_an_engine_refuses_is_listed_and_costs_no_other(
    net: Made, tmp_path: Path, execution: Execution
) -> None:
    found = changed(net, tmp_path, lambda model: unknown_operator(model, 16)).checked(execution)
    (unable,) = found.unable
    assert unable.name.startswith("depth: conv2d")
    assert unable.reason
    assert "\n" not in unable.reason
    numbers = sorted([unable.number, *(layer.number for layer in found.layers)])
    assert numbers == list(range(len(quantizers(net.packed))))
    assert found.sound
    assert Engine.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_behind_an_operator_of_torch_that_cannot_be_run_layers_are_listed(
    net: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = PackedLayers._called

    def refuse(self: PackedLayers, node: Any, given: Sequence[Any]) -> Any:
        if node.kind() == "quantized::linear":
            raise RuntimeError("no kernel\nfor it")
        return called(self, node, given)

    monkeypatch.setattr(PackedLayers, "_called", refuse)
    found = net.checked(TORCH)
    last = len(quantizers(net.packed)) - 1
    assert [(layer.number, layer.reason) for layer in found.unable] == [
        (last, "quantized::linear: RuntimeError: no kernel")
    ]
    assert [layer.number for layer in found.layers] == list(range(last))


def test_a_layer_that_gives_another_shape_cannot_be_judged() -> None:
    count = layer_certification._Count()
    assert count.compare(torch.zeros(4, 2), torch.zeros(0, 2), lambda: Cause("kernel", "")) == (
        "it gives integers of the shape (0, 2) instead of (4, 2)"
    )


def test_a_layer_whose_difference_cannot_be_explained_says_so() -> None:
    def refuse() -> Cause:
        raise NotImplementedError("no kernel of float64")

    said = layer_certification._Count().compare(torch.zeros(4, 2), torch.full((4, 2), 3.0), refuse)
    assert said is not None
    assert said.startswith("its integers differ by 3 at most")
    assert said.endswith("NotImplementedError: no kernel of float64")


class Gelu(nn.Module):
    """An activation whose operator takes an argument by name alone, and stays in float between quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.first(x), approximate="tanh")
        return torch.flatten(self.last(x), 1)


class Shuffled(nn.Module):
    """Channels in another order, by a view whose first size is asked of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 3, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        count, channels, height, width = x.size()
        x = x.view(count, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        x = self.last(x.view(count, channels, height, width))
        return x.view(x.shape[0], -1)


@pytest.fixture(scope="module", params=[Gelu, Shuffled])
def asking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(0)
    return quantized(request.param(), tmp_path_factory.mktemp("asking"))


@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_layers_that_ask_for_a_size_or_take_an_argument_by_name_are_run(asking: Made, execution: Execution) -> None:
    found = asking.checked(execution)
    assert found.unable == ()
    assert found.sound
    compared = [layer.number for layer in found.layers]
    if execution == TORCH:  # views have no step of their own in its program
        assert compared
        assert compared[-1] == len(quantizers(asking.packed)) - 1
    else:
        assert compared == list(range(len(quantizers(asking.packed))))


class Scaled(nn.Module):
    """A product with a number between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.last(torch.relu(self.first(x)) * 0.37 + 0.02), 1)


@pytest.mark.parametrize("target", ["x86", pytest.param("x86-vnni", marks=NEEDS_VNNI)])
def test_of_a_kernel_that_has_no_step_of_its_own_the_layer_that_reads_it_is_not_blamed(
    target: TargetName, tmp_path: Path
) -> None:
    """torch's sum with a number, which is kept in float otherwise, takes the scale of what it is given.

    So does its product in the reference form: the clamp that keeps what is multiplied to 7 bits has its very scale.
    """
    torch.manual_seed(0)
    with left_out("scalar-operands"):
        found = quantized(Scaled(), tmp_path, target).checked(TORCH)
    assert found.apart is not None
    first = found.first
    assert first is not None
    assert first.name == "last: conv2d"
    assert first.cause is not None
    assert first.cause.why == "kernel"
    assert first.cause.said.endswith("its inputs already differ; they come from layers without a separate step: add")


def test_graphs_of_other_integers_are_refused(net: Made, tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        """As of a bit less: each step is twice as large."""
        steps = {node.input[1] for node in model.graph.node if node.op_type == "QuantizeLinear"}
        for tensor in model.graph.initializer:
            if tensor.name in steps:
                tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), tensor.name))

    count = len(quantizers(net.packed))
    with pytest.raises(PipelineError, match=rf"the {count} quantizers of the graph do not match the {count} of its"):
        changed(net, tmp_path, change).checked(ORT)


def test_the_same_is_found_in_a_process_of_its_own(net: Made) -> None:
    with worker() as process:
        body = process.invoke(
            in_process,
            net.pixels,
            folder=str(net.graph),
            reference=str(net.reference),
            execution=ORT.to_json(),
            shape=list(net.pixels.shape),
        )
    assert Engine.from_json(body) == net.checked(ORT)


@pytest.mark.parametrize(
    ("outputs", "different", "steps", "holds"),
    [
        (100_000, 10, 1, True),
        (100_000, 11, 1, False),
        (100_000, 1, 2, False),
        (100, 0, 0, True),
        (100, 1, 1, False),
    ],
)
def test_a_layer_holds_where_next_to_all_are_equal_and_none_is_far_off(
    outputs: int, different: int, steps: int, *, holds: bool
) -> None:
    assert LayerParity(0, "layer", outputs, different, steps).holds is holds
