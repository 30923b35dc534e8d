"""What exported programs are written as for engines: the same numbers, in operators that all of them get right."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import onnx
import openvino
import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.context import Context
from optimize.export.onnx_graph.write import export_onnx, run_onnx
from optimize.lint.base import lint
from optimize.lint.untrusted_files import read_graph
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.quantization.gate import sqnr
from optimize.store.artifact import REFERENCE_FILE
from serve.runtime.card.card import Preprocessing
from serve.runtime.model_files.program_file import load_program
from tests.optimize.network_blocks import Called
from tests.optimize.workbench import noise_context, through_int8
from tests.processor import WIDEST

#: Where engines round ties to different sides, they differ by a step. As many averages of integers are ties whatever
#: the step is; with integers up to 127 it is twice that of those up to 255, and so is the difference: 6.05 dB. (A pool
#: that counts the integer 0 around the image is at -8 dB.)
COARSER_DB = 20 * math.log10(127 / WIDEST)


class ChannelsLast(nn.Module):
    """As ConvNeXt ends: what is pooled lies channels-last, behind a permute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(1, 8, 4, 4), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(nn.functional.adaptive_avg_pool2d(x.relu(), 1).flatten(1))


def test_a_pool_of_what_lies_channels_last_is_a_mean_and_nothing_else(tmp_path):
    torch.manual_seed(0)
    module, batch = ChannelsLast().eval(), noise_context().example(3)
    model = export_onnx(module, batch, tmp_path / "model.onnx")
    assert "Gather" not in {node.op_type for node in model.graph.node}
    assert [node.op_type for node in model.graph.node].count("ReduceMean") == 1
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", batch), module(batch), rtol=1e-4, atol=1e-5)


class Tokens(nn.Module):
    """As a ViT begins: patches behind a token that all images share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.stem(x).reshape(-1, 16, 16).permute(0, 2, 1)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1)
        return self.head(self.norm(tokens + self.places)).amax(1)


def tokens() -> Tokens:
    torch.manual_seed(0)
    module = Tokens().eval()
    assert module.stem.bias is not None
    module.stem.bias.data.normal_(0, 1)
    return module


def in_openvino(path: Path, images: torch.Tensor) -> torch.Tensor:
    opened = openvino.compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(opened(images.numpy())[0])


def int8_graph(module: nn.Module, folder: Path) -> tuple[Path, Context]:
    """The graph for CPUs of a network of 32x32 images."""
    context = dataclasses.replace(noise_context(), preprocessing=Preprocessing(32, (32, 32)))
    return through_int8(module, folder, Ptq(images=32, observer="minmax"), OnnxInt8(), context)[1], context


def assert_openvino_gives_what_is_meant(module: nn.Module, folder: Path) -> None:
    path, context = int8_graph(module, folder)
    pixels = context.pixels(8)
    meant = run_onnx(path, pixels, literal=True)
    with torch.no_grad():
        assert sqnr(module(context.example(8)), meant) > 20
    assert sqnr(meant, in_openvino(path, pixels)) > 30


class Shortcut(nn.Module):
    """As MaxViT's blocks begin: an average that counts zeros around what no ReLU ends: 0 is not the integer 0."""

    def __init__(self, ceil: bool) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 4, 4), nn.AvgPool2d(3, 2, 1, ceil_mode=ceil)
        self.next, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.next(self.pool(self.stem(x))).amax((2, 3)))


@pytest.mark.parametrize("ceil", [False, True])
def test_openvino_counts_zeros_around_a_quantized_image_as_zeros(ceil, tmp_path):
    """Its own averages of integers count them as the integer 0."""
    torch.manual_seed(0)
    module = Shortcut(ceil).eval()
    assert module.stem.bias is not None
    module.stem.bias.data.normal_(0, 1)
    path, context = int8_graph(module, tmp_path)
    pixels = context.pixels(8)
    meant = run_onnx(path, pixels, literal=True)
    with torch.no_grad():
        program = load_program(tmp_path / "ptq" / REFERENCE_FILE).module()
        assert sqnr(program(context.example(8)), meant) > 40 - COARSER_DB
    assert sqnr(meant, in_openvino(path, pixels)) > 30 - COARSER_DB


@pytest.mark.parametrize("settings", [{"ceil_mode": True}, {"divisor_override": 7}])
def test_an_average_that_is_written_out_stays_half(settings, tmp_path):
    torch.manual_seed(0)
    pool = nn.AvgPool2d(3, 2, 1, **settings)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), pool, nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    batch = torch.randn(3, 3, 16, 16)
    export_onnx(copy.deepcopy(module).half(), batch.half(), tmp_path / "half.onnx")
    found = run_onnx(tmp_path / "half.onnx", batch, half=True)
    with torch.no_grad():
        torch.testing.assert_close(found, module(batch), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("border", "places"), [(0, 8), (1, 9)])
@pytest.mark.parametrize("rectified", [False, True])
def test_engines_average_what_is_there_where_a_kernel_reaches_over_the_end(rectified, border, places, tmp_path):
    """ONNX Runtime's average of integers counted more; of 16 places a kernel of 3 in steps of 2 reaches over one."""
    torch.manual_seed(0)
    pool, head = nn.AvgPool2d(3, 2, border, ceil_mode=True), nn.Linear(4 * places**2, 4)
    layers = [nn.Conv2d(3, 8, 2, 2), nn.ReLU() if rectified else nn.Identity(), pool, nn.Conv2d(8, 4, 1), nn.Flatten()]
    path, context = int8_graph(nn.Sequential(*layers, head), tmp_path)
    pixels = context.pixels(8)
    meant = run_onnx(path, pixels, literal=True)
    assert sqnr(meant, run_onnx(path, pixels)) > 34 - COARSER_DB
    assert sqnr(meant, in_openvino(path, pixels)) > 30 - COARSER_DB


class Divided(nn.Module):
    """An average that is divided by a number of its own, over a border, of what no ReLU ends."""

    def __init__(self, ceil: bool, counted: bool) -> None:
        super().__init__()
        self.stem, self.next, self.head = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.pool = nn.AvgPool2d(3, 2, 1, ceil_mode=ceil, count_include_pad=counted, divisor_override=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.next(self.pool(self.stem(x))).amax((2, 3)))


#: Pools behind zeros around an image, by whether ONNX Runtime may make the zeros the pool's own border.
BORDERED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "the largest": (lambda x: functional.max_pool2d(functional.pad(x, (1, 1, 1, 1)), 3), False),
    "the largest in a line": (lambda x: functional.max_pool1d(functional.pad(x[:, :, 0], (2, 1)), 3), False),
    "the largest of a narrow border": (lambda x: functional.max_pool2d(functional.pad(x, (2, 0)), 2), False),
    "the largest of what is not below zero": (
        lambda x: functional.max_pool2d(functional.pad(x.relu(), (1, 1, 1, 1)), 3),
        True,
    ),
    "the largest behind numbers": (lambda x: functional.max_pool2d(functional.pad(x, (1, 1), value=-1.0), 3), True),
    "an average": (lambda x: functional.avg_pool2d(functional.pad(x, (1, 1, 1, 1)), 3), True),
    "an average of single places": (lambda x: functional.avg_pool2d(functional.pad(x, (1, 0, 1, 0)), 1, 2), False),
    "an average with a wide border": (lambda x: functional.avg_pool2d(functional.pad(x, (0, 0, 2, 0)), 2), False),
    "an average with two borders": (
        lambda x: functional.avg_pool2d(functional.pad(x, (2, 2, 2, 2)), 3, padding=1),
        False,
    ),
}


@pytest.mark.parametrize("way", BORDERED)
def test_a_pool_takes_zeros_around_an_image_as_numbers(way, tmp_path):
    """ONNX Runtime makes them a border of the pool, and left them out of a maximum."""
    pool, mergeable = BORDERED[way]
    generator = torch.Generator().manual_seed(0)
    module, batch = Told(pool).eval(), -torch.rand(3, 2, 8, 8, generator=generator)
    graph = export_onnx(module, batch, tmp_path / "graph.onnx").graph
    torch.testing.assert_close(run_onnx(tmp_path / "graph.onnx", batch), module(batch))
    torch.testing.assert_close(in_openvino(tmp_path / "graph.onnx", batch), module(batch))
    (border,) = (node for node in graph.node if node.op_type == "Pad")
    reader = next(node for node in graph.node if border.output[0] in node.input)
    assert ("Pool" in reader.op_type) == mergeable


class Told(nn.Module):
    """What it is told to compute, in one row for each image."""

    def __init__(self, told: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.told = told

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.told(x).flatten(1)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_openvino_divides_a_sum_of_integers_by_what_it_is_told_to(ceil, counted, tmp_path):
    torch.manual_seed(0)
    module = Divided(ceil, counted).eval()
    assert module.stem.bias is not None
    module.stem.bias.data.normal_(0, 1)
    batch = torch.randn(3, 3, 30, 30)
    export_onnx(module, batch, tmp_path / "float.onnx")
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(tmp_path / "float.onnx", batch), module(batch), rtol=1e-4, atol=1e-5)
    assert_openvino_gives_what_is_meant(module, tmp_path)


@pytest.mark.parametrize("counts", [(3, 2), 4, (None, 3), (7, 1), (1, 1), 9])
def test_maxima_of_any_number_of_places_are_exported(counts, tmp_path):
    module, batch = nn.Sequential(nn.AdaptiveMaxPool2d(counts), nn.Flatten()).eval(), torch.randn(5, 3, 7, 8)
    export_onnx(module, batch[:2], tmp_path / "model.onnx")
    assert torch.equal(run_onnx(tmp_path / "model.onnx", batch), module(batch))


def test_a_slope_that_was_drawn_in_training_is_its_mean(tmp_path):
    module, batch = nn.Sequential(nn.RReLU(0.1, 0.5), nn.Conv2d(3, 2, 1), nn.RReLU()).eval(), torch.randn(5, 3, 7, 8)
    export_onnx(module, batch[:2], tmp_path / "model.onnx")
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", batch), module(batch), rtol=1e-5, atol=1e-6)


CUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an integer and a float": lambda x: x.clamp(0, 0.5),
    "a float and an integer": lambda x: torch.clip(x, -0.5, 1),
    "in place": lambda x: (3 * x).clamp_(0, 0.5),
    "without an end": lambda x: x.clamp(0, math.inf),
    "integers": lambda x: (9 * x).int().clamp(-1, 6.5),
    "below alone": lambda x: x.clamp(max=0.5),
}


@pytest.mark.parametrize("way", CUT)
def test_what_is_cut_off_may_be_so_at_an_integer_and_a_float(way, tmp_path):
    module, batch = Called(CUT[way]).eval(), torch.randn(5, 3, 7, 8)
    export_onnx(module, batch[:2], tmp_path / "model.onnx")
    assert torch.equal(run_onnx(tmp_path / "model.onnx", batch), module(batch))


DEVIATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "variance": lambda x: x.var(1, keepdim=True),
    "of all": lambda x: torch.var(x, dim=(1, -1), unbiased=False),
    "deviation": lambda x: x.std((2, 3), correction=2),
    "beside its mean": lambda x: sum(torch.var_mean(x, 1), torch.zeros(())),
    "both kept": lambda x: torch.stack(torch.std_mean(x, dim=(2, 3), keepdim=True, correction=0), 1),
    "the mean alone": lambda x: torch.var_mean(x, 2)[1],
}


@pytest.mark.parametrize("way", DEVIATIONS)
def test_a_variance_is_written_without_asking_how_many_images_there_are(way, tmp_path):
    class Spread(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DEVIATIONS[way](x).flatten(1)

    batch = torch.randn(5, 3, 7, 8)
    model = export_onnx(Spread(), batch[:2], tmp_path / "model.onnx")
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", batch), Spread()(batch), rtol=1e-4, atol=1e-5)
    assert "Expand" not in {node.op_type for node in model.graph.node}


class Spreading(nn.Module):
    """As networks without a norm of torch's norm their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.next, self.head = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        variance, mean = torch.var_mean(x, 1, keepdim=True)
        return self.head(self.next((x - mean) / (variance + 0.1).sqrt()).amax((2, 3)))


def test_openvino_answers_as_the_integers_of_a_network_that_norms_by_a_variance(tmp_path):
    torch.manual_seed(0)
    assert_openvino_gives_what_is_meant(Spreading().eval(), tmp_path)


class Panorama(nn.Module):
    """What lies beyond one side of the image is what lies at the other."""

    def __init__(self, padding: tuple[int, int]) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 5, padding=padding, padding_mode="circular")
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.stem(x).relu()).amax((2, 3)))


@pytest.mark.parametrize("padding", [(2, 1), (0, 2)])
def test_openvino_takes_borders_of_what_lies_on_the_other_side(padding, tmp_path):
    torch.manual_seed(0)
    module = Panorama(padding).eval()
    batch = torch.randn(3, 3, 32, 32)
    export_onnx(module, batch, tmp_path / "float.onnx")
    with torch.no_grad():
        torch.testing.assert_close(in_openvino(tmp_path / "float.onnx", batch), module(batch), rtol=1e-4, atol=1e-5)
    assert_openvino_gives_what_is_meant(module, tmp_path)


@pytest.mark.parametrize("borders", [(-1, 1, 0, 0), (2, -1, 0, -3), (-1, -2, -1, 2), (0, 0, 3, -4)])
def test_a_border_below_zero_cuts_off_what_the_other_side_is_of(borders, tmp_path):
    class Cut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.pad(x, borders, mode="circular").flatten(1)

    module, batch = Cut().eval(), torch.randn(3, 2, 8, 8)
    export_onnx(module, batch, tmp_path / "float.onnx")
    for found in (run_onnx(tmp_path / "float.onnx", batch), in_openvino(tmp_path / "float.onnx", batch)):
        torch.testing.assert_close(found, module(batch), rtol=0, atol=0)


def test_openvino_answers_as_the_integers_of_a_network_with_a_token_that_all_images_share(tmp_path):
    """Its Expand let OpenVINO 2026.4.1 lose the bias of the convolution beside it."""
    assert_openvino_gives_what_is_meant(tokens(), tmp_path)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_a_token_is_copied_for_each_image_without_asking_how_many_there_are(kind, tmp_path):
    module, path, images = tokens(), tmp_path / "model.onnx", torch.rand(5, 3, 32, 32)
    with torch.no_grad():
        expected = module(images)
    export_onnx(copy.deepcopy(module).to(kind), images[:2].to(kind), path)
    assert not {"Expand", "Shape"} & {node.op_type for node in onnx.load(path).graph.node}
    for count in (1, 5):
        found = run_onnx(path, images[:count], half=kind == torch.float16).float()
        limit = 2e-5 if kind == torch.float32 else 1e-2
        torch.testing.assert_close(found, expected[:count], rtol=limit, atol=limit)


class Counted(nn.Module):
    """As EdgeNeXt's blocks begin: places are counted in zeros of each image, and convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.places = nn.Conv2d(3, 16, 8, 8), nn.Conv2d(2, 16, 1)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        ones = ~torch.zeros((x.shape[0], *x.shape[2:])).to(torch.bool)
        counts = torch.stack([ones.cumsum(1, dtype=torch.float32), ones.cumsum(2, dtype=torch.float32)], 1)
        places = self.places(torch.sin(counts)).reshape(x.shape[0], 16, -1).permute(0, 2, 1)
        return self.head(self.norm(x.reshape(x.shape[0], 16, -1).permute(0, 2, 1) + places)).amax(1)


class Normalized(nn.Module):
    """As XCiT attends: what is asked is divided by its norm, which is copied for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 16, 8, 8), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).reshape(x.shape[0], 16, -1).permute(0, 2, 1)
        asked = nn.functional.normalize(x, dim=-1)
        return self.head(self.norm(x + asked @ (asked.transpose(1, 2) @ x))).amax(1)


class Copying(nn.Module):
    """Tokens, and what is the same for each image."""

    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.way, self.token = way, nn.Parameter(torch.randn(1, 1, 16))
        self.stem, self.norm, self.head = nn.Conv2d(3, 16, 8, 8), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).reshape(x.shape[0], 16, -1).permute(0, 2, 1)
        return self.head(self.norm(self.way(x, self.token))).amax(1)


@pytest.mark.parametrize("kind", [Counted, Normalized])
def test_openvino_answers_as_the_integers_of_a_network_that_copies_for_each_image(kind, tmp_path):
    torch.manual_seed(0)
    module = kind().eval()
    assert module.stem.bias is not None
    module.stem.bias.data.normal_(0, 1)
    assert_openvino_gives_what_is_meant(module, tmp_path)
    assert "Shape" not in {node.op_type for node in onnx.load(tmp_path / "onnx" / "model.onnx").graph.node}


@pytest.mark.parametrize(
    "way",
    [
        lambda x, token: torch.cat([token.repeat(x.shape[0], 2, 1), x], 1),
        lambda x, token: torch.cat([token.repeat_interleave(x.shape[0], 0), x], 1),
        lambda x, token: x + token[0].expand_as(x),
        lambda x, token: x * x.new_ones(x.shape[0], 16, 1),
        lambda x, token: x * x.new_ones(x.shape[0], 16, 1, dtype=torch.bool),
        lambda x, token: x + torch.full((x.shape[0], 1, 16), 2, dtype=torch.int64),
        lambda x, token: x + token.expand(x.shape[0], -1, -1).repeat(1, 16, 1),
        lambda x, token: x + x.amax(1, True).expand(-1, 2, -1).repeat(1, 8, 1),
        lambda x, token: x * x.new_full((16, x.shape[0], 1), 2.0).transpose(0, 1),
        lambda x, token: x + token[0, 0].expand(x.shape[0], -1).unsqueeze(1),
    ],
    ids=[
        *("repeated", "one after the other", "as another", "new ones", "a mask", "whole numbers"),
        *("a copy of a copy", "a copy of what is of each image, copied", "images on the second axis"),
        "of one axis",
    ],
)
def test_what_is_made_for_each_image_does_not_ask_how_many_there_are(way, tmp_path):
    torch.manual_seed(0)
    module, path, images = Copying(way).eval(), tmp_path / "model.onnx", torch.rand(5, 3, 32, 32)
    export_onnx(module, images[:2], path)
    assert "Shape" not in {node.op_type for node in onnx.load(path).graph.node}
    for count in (1, 5):
        with torch.no_grad():
            torch.testing.assert_close(run_onnx(path, images[:count]), module(images[:count]), rtol=2e-5, atol=2e-5)


def test_what_is_made_for_several_of_each_image_is_exported(tmp_path):
    """As where the heads of all images lie on one axis."""
    torch.manual_seed(0)
    module = Copying(lambda x, token: x * x.new_full((x.shape[0] * 16, 1), 2.0).reshape(-1, 16, 1)).eval()
    images = torch.rand(5, 3, 32, 32)
    export_onnx(module, images[:2], tmp_path / "model.onnx")
    for count in (1, 5):
        with torch.no_grad():
            found = run_onnx(tmp_path / "model.onnx", images[:count])
            torch.testing.assert_close(found, module(images[:count]), rtol=2e-5, atol=2e-5)


class Behind(nn.Module):
    """A convolution with a bias, and a layer behind it that keeps the number of channels."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Conv2d(3, 16, 8, 8), layer, nn.Linear(16, 4)
        assert self.stem.bias is not None
        self.stem.bias.data.normal_(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if isinstance(self.layer, nn.InstanceNorm2d):
            return self.head(torch.relu(self.layer(x)).mean((2, 3)))
        found: torch.Tensor = self.layer(x.flatten(2).transpose(1, 2))[0]
        return self.head(found[:, -1])


def instance_norm(*, affine: bool) -> nn.Module:
    norm = nn.InstanceNorm2d(16, affine=affine, track_running_stats=True)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    if affine:
        norm.weight.data.uniform_(0.5, 2)
        norm.bias.data.uniform_(-1, 1)
    return norm


@pytest.mark.parametrize(
    "layer",
    [
        lambda: instance_norm(affine=False),
        lambda: instance_norm(affine=True),
        lambda: nn.GRU(16, 16, batch_first=True),
        lambda: nn.LSTM(16, 8, batch_first=True, bidirectional=True),
    ],
    ids=["a norm with statistics", "with factors", "gru", "lstm"],
)
def test_openvino_answers_as_the_integers_of_a_network_with_what_the_exporter_copies_for_each_image(layer, tmp_path):
    torch.manual_seed(0)
    assert_openvino_gives_what_is_meant(Behind(layer()).eval(), tmp_path)
    found = lint(read_graph(tmp_path / "onnx" / "model.onnx"), "cpu")
    assert "counted-images" not in {finding.rule for finding in found}


class Attending(nn.Module):
    """Attention within the blocks of a map, or of one head that is no axis."""

    def __init__(self, *sizes: int, masked: bool = False) -> None:
        super().__init__()
        self.sizes, self.masked = sizes, masked
        self.projection, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.projection(x.reshape(x.shape[0], *self.sizes, 8)).chunk(3, -1)
        mask = torch.ones(self.sizes[-1], self.sizes[-1], dtype=torch.bool).tril() if self.masked else None
        found = nn.functional.scaled_dot_product_attention(queries, keys, values, mask, scale=0.9)
        return self.head(found.flatten(1, -2).mean(1))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [(32,), (2, 16), (2, 2, 8), (2, 2, 4, 2)])
def test_attention_over_any_axes_is_exported(sizes, masked, tmp_path):
    torch.manual_seed(0)
    module, batch = Attending(*sizes, masked=masked).eval(), noise_context().example(5)
    export_onnx(module, batch[:2], tmp_path / "model.onnx")
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", batch), module(batch), rtol=1e-4, atol=1e-5)


def circled(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(x, (1, 1), mode="circular")


def attended(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


def copied(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, :1].expand(-1, -1, 4)


@pytest.mark.parametrize("second", [circled, attended, copied])
@pytest.mark.parametrize("first", [circled, attended, copied])
def test_what_is_written_out_is_written_out_of_what_was(first, second, tmp_path):
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return second(first(x.flatten(2))).mean(1)

    module, batch = Twice().eval(), torch.randn(5, 3, 4, 2)
    export_onnx(module, batch[:2], tmp_path / "model.onnx")
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", batch), module(batch), rtol=1e-4, atol=1e-5)


class Placed(nn.Module):
    """As Swin and MaxViT: within the windows of an image two heads attend by a bias of places, which is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.head = nn.Linear(8, 24), nn.Linear(8, 4)
        self.places = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = (pixels.to(torch.float32) / 255).reshape(pixels.shape[0] * 8, 4, 8)
        queries, keys, values = self.projection(x).view(-1, 4, 2, 12).transpose(1, 2).chunk(3, -1)
        found = nn.functional.scaled_dot_product_attention(queries, keys, values, self.places[None])
        windows = found.transpose(1, 2).reshape(pixels.shape[0] * 8, 2, 2, -1)
        return self.head(windows.reshape(pixels.shape[0], -1, 8).mean(1))


def test_attention_by_a_mask_that_is_learned_is_exported_and_stays_learned(tmp_path):
    torch.manual_seed(0)
    module, path = Placed().eval(), tmp_path / "model.onnx"
    pixels = torch.randint(0, 256, (5, 1, 16, 16), dtype=torch.uint8)
    export_onnx(module, pixels[:2], path)
    assert all(parameter.requires_grad for parameter in module.parameters())
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(path, pixels), module(pixels), rtol=1e-4, atol=1e-5)


#: What networks end with that is written another way, by the operator that they are exported as.
ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum that is divided": lambda x: functional.avg_pool2d(x, 4, divisor_override=5),
    "maxima of any number of places": lambda x: functional.adaptive_max_pool2d(x, 3),
    "the other side": lambda x: functional.pad(x, (1, 1, 0, 0), mode="circular"),
    "attention over many axes": lambda x: attended(x[:, None]),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_network_may_end_with_what_is_written_another_way(end, tmp_path):
    class Ending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ENDS[end](x)

    module, batch = Ending().eval(), torch.randn(5, 3, 4, 4)
    export_onnx(module, batch[:2], tmp_path / "model.onnx")
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", batch), module(batch), rtol=1e-4, atol=1e-5)
