"""Layers that are called as functions, and borders that integer kernels do not know, reach int8 as they are meant."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.errors import NotApplicableError
from optimize.quantization.convert import trace_calls
from optimize.quantization.rewrites.functional_layers import lift_functions, write_out_padding
from optimize.tracing.trace import trace
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from tests.optimize.workbench import Between, is_meant, with_running_statistics


class Bordered(nn.Module):
    """A wide convolution, most of whose answers depend on how it fills the border."""

    def __init__(self, kernel: int = 7, **settings: object) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, kernel, **settings)  # type: ignore[arg-type]
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(torch.relu(self.first(x))).mean((2, 3)))


class Called(nn.Module):
    """Layers as functions of parameters, with their arguments by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 1, 3, 3) / 3), nn.Parameter(torch.randn(8, 4, 3, 3) / 6)
        self.head, self.bias = nn.Parameter(torch.randn(4, 8) / 3), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(functional.conv2d(x, self.first, stride=2, padding=1))
        x = torch.relu(functional.conv2d(x, self.second - self.second.mean(), None, 1, 1, 1, 2))
        return functional.linear(x.mean((2, 3)), weight=self.head, bias=self.bias)


class Normed(nn.Module):
    """Norms behind layers that are called as functions: of parts of one weight, as an octave convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Conv2d(1, 8, 3, 2, 1), nn.Parameter(torch.randn(8, 8, 3, 3) / 8)
        self.high, self.low, self.head = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(8, 4)
        with_running_statistics(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        high = torch.relu(self.high(functional.conv2d(x, self.weight[:4], padding=1)))
        low = self.low(functional.conv2d(functional.avg_pool2d(x, 2), self.weight[4:], padding=1))
        return self.head(torch.cat([high.mean((2, 3)), low.mean((2, 3))], 1))


class Dynamic(nn.Module):
    """A convolution whose weight depends on the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Conv2d(1, 8, 3, 2, 1), nn.Parameter(torch.randn(8, 8, 3, 3) / 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return self.head(functional.conv2d(x, self.weight * x.mean(), padding=1).mean((2, 3)))


class ForEachImage(nn.Module):
    """A convolution with a weight for each image, as many groups as there are images (CondConv)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.head = nn.Conv2d(1, 8, 3, 2, 1), nn.Linear(8, 8 * 8 * 9), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        images, channels, *size = x.shape
        weights = self.experts(x.mean((2, 3))).view(images * 8, 8, 3, 3)
        x = functional.conv2d(x.reshape(1, images * channels, *size), weights, padding=1, groups=images)
        return self.head(x.view(images, 8, *size).mean((2, 3)))


class Indexed(nn.Module):
    """A pool that says where it found its maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2, return_indices=True)
        self.second, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maxima, _ = self.pool(torch.relu(self.first(x)))
        return self.head(self.second(maxima).mean((2, 3)))


class Masked(nn.Module):
    """Masks that are put together, and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(16, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        masks = torch.cat([x > 0, x > 0.5], 1)
        return self.head(self.second(torch.cat([x, x], 1) * masks).mean((2, 3)))


class Beside(nn.Module):
    """Reads the weights of layers that it calls: as numbers, for their type, and to go the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).to(self.second.weight)
        y = self.second(x) * self.second.weight.mean((1, 2, 3))[:, None, None] * 8
        return self.head((nn.functional.conv_transpose2d(y, self.second.weight) + x).mean((2, 3)))


def reshaped(x: torch.Tensor) -> torch.Tensor:
    """Shapes that are put together from parts of others (timm's MaxViT)."""
    sizes = x.shape
    x = x.reshape(sizes[:2] + (sizes[2] * sizes[3],)) + x.mean((2, 3)).unsqueeze(-1).expand(sizes[:2] + (1,))  # noqa: RUF005
    return x.reshape(sizes)


BORDERS = [
    pytest.param({"padding": 3, "padding_mode": "reflect"}, id="reflect"),
    pytest.param({"padding": 3, "padding_mode": "circular"}, id="circular"),
    pytest.param({"padding": (3, 1), "padding_mode": "replicate"}, id="replicate"),
    pytest.param({"padding": "same"}, id="same"),
    pytest.param(
        {"padding": "same", "kernel": 4},
        id="same, of an even kernel",
        marks=pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    ),
    pytest.param({"padding": "valid"}, id="valid"),
]


@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
@pytest.mark.parametrize("settings", BORDERS)
def test_a_border_is_filled_in_int8_as_in_float(settings, target, tmp_path):
    torch.manual_seed(0)
    is_meant(Bordered(**settings), tmp_path, target, above=18)


@pytest.mark.parametrize("settings", BORDERS)
def test_what_fills_a_border_gives_the_layers_own_numbers(settings):
    torch.manual_seed(0)
    module = Bordered(**settings).eval()
    batch = torch.randn(2, 1, 16, 16)
    traced = trace(module, batch)
    assert write_out_padding(traced) == 1
    assert torch.equal(traced(batch), module(batch))


def shuffled(x: torch.Tensor) -> torch.Tensor:
    """Pieces that are read all at once, in part, and one by one."""
    x = torch.cat(x.chunk(2, 1)[::-1], 1) + torch.cat(torch.split(x, 2, 1), dim=1)
    first, *others = x.split([1, 3, 4], 1)
    return torch.stack(torch.cat([first, *others], 1).unbind(-1)[1:], -1)


@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
@pytest.mark.parametrize(
    "kind",
    [
        *(Called, Normed, Dynamic, Indexed, Masked, Beside),
        *(functools.partial(Between, way) for way in (reshaped, shuffled)),
    ],
)
def test_what_torch_ao_cannot_watch_as_it_stands_is_lowered(kind, target, tmp_path):
    torch.manual_seed(0)
    is_meant(kind(), tmp_path, target, above=18)


def test_a_weight_for_each_image_is_refused_in_a_line():
    torch.manual_seed(0)
    with pytest.raises(NotApplicableError, match="a weight for each image") as caught:
        trace_calls(ForEachImage().eval(), torch.randn(2, 1, 16, 16))
    assert len(str(caught.value).splitlines()) == 1


def test_a_function_of_constants_becomes_a_layer_and_one_of_the_image_does_not():
    torch.manual_seed(0)
    batch = torch.randn(2, 1, 16, 16)
    for module, layers in ((Called().eval(), 3), (Dynamic().eval(), 0)):
        traced = trace(module, batch)
        assert lift_functions(traced) == layers
        torch.testing.assert_close(traced(batch), module(batch), rtol=1e-6, atol=1e-6)


def test_a_layer_of_the_networks_own_is_not_lost_to_one_that_is_lifted():
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear_layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear_layer(torch.relu(functional.linear(x, self.weight)))

    torch.manual_seed(0)
    module, batch = Alike(), torch.randn(2, 8)
    traced = trace(module)
    assert lift_functions(traced) == 1
    torch.testing.assert_close(traced(batch), module(batch))


def test_what_is_lifted_can_be_trained():
    torch.manual_seed(0)
    traced = trace_calls(Called().eval(), torch.randn(2, 1, 16, 16))
    weights = [weight for weight in traced.parameters() if weight.requires_grad]
    assert sorted(tuple(weight.shape) for weight in weights) == [(4,), (4, 8), (8, 1, 3, 3), (8, 4, 3, 3)], "no other"
