"""A small network for each record of the tables: without the record, something else comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from optimize.quantization.targets import TargetName

#: What a network computes of its images, with its layers.
Told = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Layers and tensors by name, and what is computed with them."""

    def __init__(self, told: Told, **parts: Any) -> None:
        super().__init__()
        self.told = told
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is computed with them."""
        return self.told(self, x)


class SameConv(nn.Conv2d):
    """A convolution that pads by the size of its images, as timm's ``Conv2dSame``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In steps of two."""
        height, width = x.shape[-2:]
        down, right = (max((-(-side // 2) - 1) * 2 + 3 - side, 0) for side in (height, width))
        x = functional.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        return functional.conv2d(x, self.weight, self.bias, 2)


@dataclass(frozen=True)
class Shown:
    """A network, and how it is quantized.

    Attributes:
        build: makes it, of weights that the seed says.
        side: of its images, in pixels; they have three channels.
        target: for whose integers.
        bits: of activations.
        exact_sums: whether OpenVINO is kept from adding before it rounds.
        keep_float: layers that stay in float.
        grey: whether pixels are normalised by 0.5, and use the whole range.
        quantized: whether it is quantized at all, and not only exported.
        training: whether it is prepared for training.
        seen: whether its ranges are those of images as answers are compared on, or of images of one colour each.
    """

    build: Callable[[], nn.Module]
    side: int = 16
    target: TargetName = "auto"
    bits: int = 8
    exact_sums: bool = False
    keep_float: tuple[str, ...] = ()
    grey: bool = False
    quantized: bool = True
    training: bool = False
    seen: bool = True

    def network(self) -> nn.Module:
        """The network, in eval mode, the same each time."""
        torch.manual_seed(0)
        network = self.build().eval()
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
                layer.bias.data.normal_(0, 0.5)
        return network


def _between(told: Told, channels: int = 8, **parts: Any) -> Callable[[], Net]:
    """A convolution, what is told, a convolution of its channels, and a head over the mean of each channel."""

    def forward(net: Any, x: torch.Tensor) -> Any:
        return net.head(net.second(told(net, net.first(x))).flatten(2).mean(2))

    return lambda: Net(
        forward,
        first=_scaled(nn.Conv2d(3, 8, 3), 3),
        second=nn.Conv2d(channels, 8, 1),
        head=nn.Linear(8, 4),
        **{name: make() for name, make in parts.items()},
    )


def _tokens(told: Told, **parts: Any) -> Callable[[], Net]:
    """Patches as tokens ``(N, 16, 16)``, what is told, and a head over the largest of each channel."""

    def forward(net: Any, x: torch.Tensor) -> Any:
        return net.head(told(net, net.stem(x).flatten(2).transpose(1, 2)).amax(1))

    return lambda: Net(
        forward,
        stem=nn.Conv2d(3, 16, 4, 4),
        head=nn.Linear(16, 4),
        **{name: make() for name, make in parts.items()},
    )


def _linear() -> nn.Module:
    return nn.Linear(16, 16)


def _attention(net: Any, x: torch.Tensor) -> Any:
    shares = ((net.query(x) @ net.key(x).transpose(1, 2)) / 4).softmax(-1)
    return x + shares @ net.value(x)


def _residual(net: Any, x: torch.Tensor) -> Any:
    x = torch.relu(x)
    return torch.relu(x + net.inner(x))


def _blocks(net: Any, x: torch.Tensor) -> Any:
    x = x + net.one(net.norm1(x))
    return net.norm3(x + net.two(net.norm2(x)))


def _normalized(net: Any, x: torch.Tensor) -> Any:
    """Keys of tokens, divided by their lengths: of what lies beyond the image they are zeros."""
    keys = net.key(functional.pad(x, (0, 0, 0, 4))).reshape(-1, 20, 2, 8).transpose(1, 2)
    keys = keys / torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp_min(1e-12)
    return keys.transpose(1, 2).reshape(-1, 20, 16)


def _masked(net: Any, x: torch.Tensor) -> Any:
    """Attention of two heads within windows, by a bias of places that is learned."""
    windows = x.reshape(x.shape[0] * 24, 4, 8)
    query, key, value = net.projection(windows).view(-1, 4, 2, 12).transpose(1, 2).chunk(3, -1)
    found = functional.scaled_dot_product_attention(query, key, value, net.mask[None])
    found = found.transpose(1, 2).reshape(x.shape[0] * 24, 2, 2, -1)
    return net.head(found.reshape(x.shape[0], -1, 8).mean(1))


def _residuals() -> nn.Module:
    """Two blocks, the second of which has a layer in its shortcut, and a map of their answers."""

    def forward(net: Any, x: torch.Tensor) -> Any:
        x = torch.relu(net.stem(x))
        x = torch.relu(x + net.first(x))
        x = torch.relu(net.second(x) + net.shortcut(x))
        return net.head(functional.adaptive_avg_pool2d(x, 2).flatten(1))

    return Net(
        forward,
        stem=nn.Conv2d(3, 16, 3),
        first=nn.Conv2d(16, 16, 3, padding=1),
        second=nn.Conv2d(16, 24, 1),
        shortcut=nn.Conv2d(16, 24, 1),
        head=nn.Linear(96, 4),
    )


def _coordinates(net: Any, x: torch.Tensor) -> Any:
    """Where each place is, beside what is there: as CoordConv has it."""
    rows, columns = (torch.linspace(-1, 1, x.size(axis), device=x.device, dtype=x.dtype) for axis in (2, 3))
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
    return torch.cat([x, places[None].expand(x.size(0), -1, -1, -1)], 1)


def _read_again(net: Any, x: torch.Tensor) -> Any:
    y = functional.relu_(x)
    return x + y.sigmoid()


def _conv(*args: Any, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(*args, **settings)


def _scaled(layer: Any, factor: float) -> nn.Module:
    layer.weight.data *= factor
    found: nn.Module = layer
    return found


def _almost_empty() -> nn.Module:
    """A layer with a channel of tiny weights, whose bias is no integer of 32 bits in its products' scale."""
    layer = nn.Conv2d(8, 8, 1)
    layer.weight.data[0] *= 1e-9
    return layer


def _uneven() -> nn.Module:
    """A layer whose weights do not suit one scale."""
    layer = nn.Conv2d(8, 8, 1)
    layer.weight.data *= torch.logspace(-3, 1, 8)[:, None, None, None]
    return layer


def _normed(**settings: Any) -> Callable[[], Net]:
    return _between(
        lambda net, x: net.norm(net.inner(x)), inner=_conv(8, 8, 3), norm=lambda: nn.BatchNorm2d(8, **settings)
    )


def _tied() -> nn.Module:
    net: Any = _between(lambda net, x: net.one(x).relu() + net.two(x), one=_conv(8, 8, 1), two=_conv(8, 8, 1))()
    net.two.weight = net.one.weight
    tied: nn.Module = net
    return tied


def _of_a_layer() -> nn.Module:
    return _between(lambda net, x: net.inner(x) * net.inner.weight.abs().mean(), inner=_conv(8, 8, 1))()


#: By record. Where one network shows several records it stands several times.
SHOWN: Final[dict[str, Shown]] = {
    # Traced networks.
    "in-place-writes": Shown(_between(_read_again)),
    "computed-weights": Shown(
        _between(lambda net, x: net.inner(x), inner=lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1))),
        training=True,
    ),
    "norm-factors": Shown(_normed(affine=False), training=True),
    "attention": Shown(
        _tokens(
            lambda net, x: net.attention(x, x, x, need_weights=False)[0],
            attention=lambda: nn.MultiheadAttention(16, 2, batch_first=True),
        )
    ),
    "size-dependent-padding": Shown(_between(lambda net, x: net.inner(x), inner=lambda: SameConv(8, 8, 3, 2))),
    "functional-layers": Shown(
        _between(
            lambda net, x: functional.conv2d(x, net.weight, padding=1),
            weight=lambda: nn.Parameter(torch.randn(8, 8, 3, 3) / 8),
        )
    ),
    "border-modes": Shown(
        _between(lambda net, x: net.inner(x), inner=_conv(8, 8, 3, padding=1, padding_mode="reflect"))
    ),
    "unwatched-maxima": Shown(
        _between(lambda net, x: functional.max_pool2d(functional.pad(x, (0, 1, 0, 1), value=-math.inf), 2))
    ),
    "softmax-modules": Shown(_between(lambda net, x: net.softmax(x), softmax=lambda: nn.Softmax(1))),
    "shapes": Shown(_between(lambda net, x: 0.37 * x + 0.02)),
    "constant-tensors": Shown(_between(_coordinates, 10)),
    "types-of-others": Shown(
        _between(lambda net, x: x + torch.linspace(0, 1, 8, dtype=torch.float64)[:, None, None].type_as(x))
    ),
    "tensor-bounds": Shown(
        _between(
            lambda net, x: torch.clamp(x, net.low, net.high),
            low=lambda: torch.full((8, 1, 1), -0.5),
            high=lambda: torch.full((8, 1, 1), 0.5),
        )
    ),
    "empty-parts": Shown(
        _tokens(
            lambda net, x: net.layer(torch.cat((net.spare.expand(x.shape[0], -1, -1), x), 1)),
            layer=_linear,
            spare=lambda: nn.Parameter(torch.zeros(0, 16)),
        )
    ),
    "pieces": Shown(_between(lambda net, x: torch.cat(x.chunk(2, 1)[::-1], 1))),
    "boolean-masks": Shown(_between(lambda net, x: x * (1 + (x > 0.25).flatten(1).reshape(x.shape).float()))),
    "sizes": Shown(
        _tokens(
            lambda net, x: net.value(net.key(y := net.norm(x)).transpose(1, 2).reshape(y.shape[:-1] + net.rest)),
            key=_linear,
            value=_linear,
            norm=lambda: nn.LayerNorm(16),
            rest=lambda: (-1,),
        )
    ),
    "floor-quotients": Shown(_between(lambda net, x: x // 0.5)),
    "resizes": Shown(_between(lambda net, x: functional.interpolate(x, scale_factor=2, mode="bicubic"))),
    "means-of-one-place": Shown(
        lambda: Net(
            lambda net, x: net.head(net.second(net.first(x)).mean([2, 3])),
            first=nn.Conv2d(3, 8, 4, 4),
            second=nn.Conv2d(8, 8, 4),
            head=nn.Linear(8, 4),
        )
    ),
    "whole-slices": Shown(_between(lambda net, x: torch.cat([x, net.cheap(x)], 1)[:, :16], 16, cheap=_conv(8, 8, 1))),
    "scalar-operands": Shown(_between(lambda net, x: 0.37 * x + 0.02)),
    "own-calls": Shown(_between(lambda net, x: net.inner(0.1 * net.inner(x).relu()), inner=_conv(8, 8, 1))),
    "own-tensors": Shown(_of_a_layer),
    "own-parameters": Shown(_tied),
    "wide-patches": Shown(
        lambda: nn.Sequential(nn.Conv2d(3, 32, 1), nn.Conv2d(32, 8, 4, 4), nn.Flatten(), nn.Linear(128, 4))
    ),
    "zero-padding": Shown(
        _between(lambda net, x: net.inner(net.zeros(x)), inner=_conv(8, 8, 3), zeros=lambda: nn.ZeroPad2d(1))
    ),
    "pad-layers": Shown(_between(lambda net, x: net.inner(functional.pad(x, (0, 1, 0, 1))), inner=_conv(8, 8, 3, 2))),
    # Networks before observers are inserted, and with them.
    "dropouts": Shown(_between(lambda net, x: net.drop(functional.gelu(x - 6)), drop=lambda: nn.Dropout(0.2))),
    "last-pool": Shown(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 4), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(8, 4)),
        )
    ),
    "inexact-layers": Shown(_between(lambda net, x: net.act(x), act=nn.PReLU)),
    "known-ranges": Shown(_between(lambda net, x: torch.cat([x, x.tanh()], 1), 16)),
    "bounded-relus": Shown(
        _between(lambda net, x: net.act(net.inner(x)), inner=lambda: _scaled(nn.Conv2d(8, 8, 1), 20), act=nn.ReLU6)
    ),
    "shared-observers": Shown(
        _tokens(
            lambda net, x: net.one(y := net.norm(net.key(x))) + net.two(net.again(y)),
            key=_linear,
            one=_linear,
            two=_linear,
            norm=lambda: nn.LayerNorm(16),
            again=lambda: nn.LayerNorm(16),
        )
    ),
    "observer-bounds": Shown(_between(lambda net, x: net.act(net.inner(x)), inner=_conv(8, 8, 1), act=nn.ReLU6)),
    "given-ranges": Shown(_between(lambda net, x: x * torch.sigmoid(1.702 * x))),
    "attention-scores": Shown(_tokens(_attention, query=_linear, key=_linear, value=_linear)),
    "means-in-float": Shown(_between(lambda net, x: x / ((x * x).mean(1, keepdim=True) + 0.1).sqrt())),
    "residual-stream": Shown(
        _tokens(
            _blocks,
            **{f"norm{number}": lambda: nn.LayerNorm(16) for number in (1, 2, 3)},
            one=_linear,
            two=_linear,
        )
    ),
    "network-answer": Shown(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.Flatten(), nn.Linear(392, 4), nn.Sigmoid())
    ),
    "layer-outputs": Shown(_between(_residual, inner=_conv(8, 8, 3, padding=1)), target="tensorrt"),
    "between-float-layers": Shown(
        _between(
            lambda net, x: functional.max_pool2d(torch.cat([x, net.loud(x)], 1), 2),
            16,
            loud=lambda: _scaled(nn.Conv2d(8, 8, 1), 1e4),
        ),
        keep_float=("first", "loud", "second"),
    ),
    "image-operators": Shown(
        lambda: Net(
            lambda net, x: net.head(net.first(functional.avg_pool2d(x, 2)).flatten(1)),
            first=nn.Conv2d(3, 8, 4, 4),
            head=nn.Linear(32, 4),
        )
    ),
    # Reference forms and packed programs.
    "in-place-operators": Shown(
        _between(lambda net, x: net.act(x + net.inner(x)), inner=_conv(8, 8, 1), act=lambda: nn.SiLU(inplace=True))
    ),
    "integer-weights": Shown(_between(lambda net, x: x)),
    "repeated-pairs": Shown(_between(lambda net, x: net.inner(x).clone(), inner=_conv(8, 8, 1))),
    "equal-nodes": Shown(
        _between(
            lambda net, x: net.one(functional.max_pool2d(x, 2)) + net.two(functional.max_pool2d(x, 2)),
            one=_conv(8, 8, 1),
            two=_conv(8, 8, 1),
        )
    ),
    "whole-biases": Shown(_between(lambda net, x: net.inner(x), inner=_almost_empty)),
    "padded-integers": Shown(
        _between(lambda net, x: net.inner(functional.pad(x, (0, 1, 0, 1))), inner=_conv(8, 8, 3, 2))
    ),
    "embedded-padding": Shown(
        _between(lambda net, x: net.inner(functional.pad(x, (0, 1, 0, 1))), inner=_conv(8, 8, 3, 2))
    ),
    "packed-groups": Shown(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 48, 3), nn.Conv2d(48, 96, 3, groups=2), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(96, 4)),
        )
    ),
    "packed-views": Shown(
        lambda: Net(
            lambda net, x: net.head(net.first(x).view(x.shape[0], -1)),
            first=nn.Conv2d(3, 8, 4, 4),
            head=nn.Linear(128, 4),
        )
    ),
    "packed-clamps": Shown(_between(lambda net, x: x.relu()), bits=7),
    # Programs that become graphs.
    "concatenations-read-directly": Shown(
        lambda: Net(
            lambda net, x: net.head(net.behind(torch.cat([net.first(x), net.second(x)], 1) * 0.7).mean((2, 3))),
            first=nn.Conv2d(3, 8, 3),
            second=nn.Conv2d(3, 8, 3),
            behind=nn.Conv2d(16, 8, 3),
            head=nn.Linear(8, 4),
        )
    ),
    "padding-behind-quantizers": Shown(
        _between(lambda net, x: net.inner(functional.pad(x, (0, 1, 0, 1))), inner=_conv(8, 8, 3, 2))
    ),
    "clamp-ends": Shown(_between(lambda net, x: (3 * x).clamp(-1, 1)), bits=7),
    "range-clamps": Shown(_between(lambda net, x: x.relu()), bits=7),
    "norm-floors": Shown(
        lambda: Net(
            lambda net, x: _normalized(net, net.stem(x).flatten(2).transpose(1, 2)).flatten(1),
            stem=nn.Conv2d(3, 16, 4, 4),
            key=nn.Linear(16, 16, bias=False),
        )
    ),
    "resize-products": Shown(_between(lambda net, x: functional.interpolate(x, size=(7, 9), mode="bicubic"))),
    "integer-reductions": Shown(
        lambda: Net(
            lambda net, x: net.key(net.stem(x).flatten(2).transpose(1, 2)).sum(1),
            stem=nn.Conv2d(3, 16, 4, 4),
            key=nn.Linear(16, 6),
        )
    ),
    "integer-extremes": Shown(_between(lambda net, x: functional.gelu(x).amax((2, 3), keepdim=True))),
    "integer-borders": Shown(_between(lambda net, x: functional.pad(x, (0, 0, 0, 0, 2, 2)), 12)),
    "softmax-shares": Shown(
        _tokens(lambda net, x: x * net.key(x).softmax(1), key=_linear),
        seen=False,
    ),
    "concatenations-parted": Shown(
        _tokens(
            lambda net, x: net.value(torch.cat([net.key(x), net.query(x)], 1)),
            key=_linear,
            query=_linear,
            value=_linear,
        )
    ),
    "group-borders": Shown(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 144, 3, 2), nn.Conv2d(144, 144, 1, groups=2), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(144, 4)),
        )
    ),
    "joined-groups": Shown(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 48, 3), nn.Conv2d(48, 96, 3, groups=2), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(96, 4)),
        )
    ),
    "residual-sums": Shown(_residuals, exact_sums=True),
    "overlapping-patches": Shown(
        _between(lambda net, x: functional.fold(functional.unfold(x, 3, stride=2), (14, 14), 3, stride=2)),
        target="tensorrt",
    ),
    "one-row-pools": Shown(
        _tokens(lambda net, x: functional.max_pool1d(net.key(x), 2).repeat(1, 1, 2), key=_linear), target="tensorrt"
    ),
    "layer-padding": Shown(
        _between(lambda net, x: net.inner(functional.pad(x, (0, 1, 0, 1))), inner=_conv(8, 8, 3, 2))
    ),
    # Exported programs.
    "pool-of-all-places": Shown(
        lambda: Net(
            lambda net, x: net.head(
                functional.adaptive_avg_pool2d(
                    net.norm(net.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2), 1
                ).flatten(1)
            ),
            stem=nn.Conv2d(3, 16, 4, 4),
            norm=nn.LayerNorm(16),
            head=nn.Linear(16, 4),
        )
    ),
    "pool-divisors": Shown(_between(lambda net, x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=7))),
    "adaptive-maxima": Shown(_between(lambda net, x: functional.adaptive_max_pool2d(x, 5)), quantized=False),
    "padded-pools": Shown(
        _between(lambda net, x: functional.max_pool2d(functional.pad(x - 3, (1, 1, 1, 1)), 3)), quantized=False
    ),
    "circular-borders": Shown(
        _between(lambda net, x: functional.pad(x, (1, 1, 1, 1), mode="circular")), quantized=False
    ),
    "attention-rank": Shown(
        _tokens(
            lambda net, x: functional.scaled_dot_product_attention(
                *[part(x).reshape(-1, 2, 2, 4, 16) for part in (net.query, net.key, net.value)]
            ).reshape(-1, 16, 16),
            query=_linear,
            key=_linear,
            value=_linear,
        ),
        quantized=False,
    ),
    "instance-norms": Shown(
        _between(lambda net, x: net.norm(x), norm=lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
    ),
    "random-slopes": Shown(_between(lambda net, x: net.act(x), act=nn.RReLU), quantized=False),
    "clamp-types": Shown(_between(lambda net, x: x.clamp(0, 0.5)), quantized=False),
    "variances": Shown(
        _between(lambda net, x: (x - (found := torch.var_mean(x, 1, keepdim=True))[1]) / (found[0] + 0.1).sqrt())
    ),
    "untranslated-operators": Shown(_between(lambda net, x: x.tanh().cumprod(1)), quantized=False),
    "copies-for-each-image": Shown(
        _tokens(
            lambda net, x: net.norm(torch.cat([net.token.expand(x.shape[0], -1, -1), x], 1)),
            token=lambda: nn.Parameter(torch.randn(1, 1, 16)),
            norm=lambda: nn.LayerNorm(16),
        )
    ),
    # Exports and graphs.
    "nothing-learned": Shown(
        lambda: Net(
            _masked, projection=nn.Linear(8, 24), head=nn.Linear(8, 4), mask=nn.Parameter(torch.randn(2, 4, 4))
        ),
        quantized=False,
    ),
    **dict.fromkeys(
        (
            *("no-source-lines", "read-translations-once", "decompose-where-needed", "promote-by-notes"),
            "release-weights",
        ),
        Shown(_between(lambda net, x: x), quantized=False),
    ),
    "cast-pixels-first": Shown(
        lambda: Net(
            lambda net, x: net.head(x.reshape(x.shape[0] * 2, -1) + net.token.repeat(x.shape[0] * 2, 1)).reshape(-1, 8),
            head=nn.Linear(384, 4),
            token=nn.Parameter(torch.randn(1, 384)),
        ),
        quantized=False,
    ),
    "float-layers": Shown(_between(lambda net, x: net.inner(x), inner=_uneven), keep_float=("inner",)),
    "image-quantizer": Shown(_between(lambda net, x: x), grey=True),
}
