"""Building blocks of image classifiers as the literature and its code have them, small, for networks that are drawn.

Each keeps `WIDTH` channels, so that any two can follow one another; some change the size of the map. What differs
between implementations of one block (which function splits, adds, pools) is its ``how``: there lowering goes wrong.

Left out: a weight for each image (CondConv), which is refused in a line (see `test_lifting`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8


class Unit(Protocol):
    """Makes a convolution with the norm and the activation that a network has; knows the side of the maps there."""

    @property
    def side(self) -> int: ...

    def __call__(
        self, into: int = WIDTH, out: int = WIDTH, kernel: int = 3, *, stride: int = 1, groups: int = 1
    ) -> nn.Module: ...


class Called(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Weighted(nn.Module):
    """A convolution that is called as a function, of a weight that is computed."""

    def __init__(self, computed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.computed = computed
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH, 3, 3) / 8), nn.Parameter(torch.randn(WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.computed(self.weight), self.bias, padding=1)


class Net(nn.Module):
    """Layers and parameters by their names, and what is computed with them."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **named: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.compute = compute
        for name, thing in named.items():
            setattr(self, name, thing)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


@dataclass(frozen=True)
class Block:
    """What makes a block, and how it may be written."""

    make: Callable[[Unit, str], nn.Module]
    ways: tuple[str, ...]


#: By its name each block.
BLOCKS: dict[str, Block] = {}


def block(*ways: str) -> Callable[[Callable[[Unit, str], nn.Module]], None]:
    def register(make: Callable[[Unit, str], nn.Module]) -> None:
        BLOCKS[make.__name__] = Block(make, ways or ("",))

    return register


def pairs(first: Iterable[str], second: Iterable[str]) -> tuple[str, ...]:
    return tuple("; ".join(pair) for pair in itertools.product(first, second))


def places_as_channels(x: Tensor) -> Tensor:
    return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


def normed(into: int = WIDTH, kernel: int = 3, stride: int = 1) -> nn.Module:
    """A convolution with a norm and without an activation."""
    return nn.Sequential(nn.Conv2d(into, WIDTH, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(WIDTH))


#: What may lie between two convolutions: another kind, a pool, a border, or a smaller map and back.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "3x3": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
    "1x7": lambda: nn.Conv2d(WIDTH, WIDTH, (1, 7), padding="same"),
    "depthwise": lambda: nn.Conv2d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH),
    "dilated": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=2),
    "reflect": lambda: nn.Conv2d(WIDTH, WIDTH, 5, padding=2, padding_mode="reflect"),
    "circular": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, padding_mode="circular"),
    "replicate": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, padding_mode="replicate"),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(WIDTH, WIDTH, 3, padding=1)),
    "norm": lambda: nn.BatchNorm2d(WIDTH),
    "max": lambda: nn.MaxPool2d(2),
    "max, overlapping": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "max, padded": lambda: Called(lambda x: functional.max_pool2d(x, 3, 2, 1)),
    "average": lambda: nn.AvgPool2d(2),
    "average, padded": lambda: Called(lambda x: functional.avg_pool2d(x, 3, 2, 1)),
    "average, within": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(4),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d(4),
    "max and average": lambda: Called(lambda x: 0.5 * (functional.max_pool2d(x, 2) + functional.avg_pool2d(x, 2))),
    "blurred": lambda: Called(
        lambda x: functional.conv2d(
            functional.pad(x, (1, 1, 1, 1), "reflect"), torch.full((WIDTH, 1, 3, 3), 1 / 9), stride=2, groups=WIDTH
        )
    ),
    "places as channels": lambda: nn.Sequential(Called(places_as_channels), nn.Conv2d(4 * WIDTH, WIDTH, 1)),
    "unshuffled": lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * WIDTH, WIDTH, 1)),
    "zeros": lambda: nn.ZeroPad2d(1),
    "one side": lambda: Called(lambda x: functional.pad(x, [0, 2, 0, 2])),
    "a half": lambda: nn.ConstantPad2d(1, 0.5),
    "mirrored": lambda: Called(lambda x: functional.pad(x, (1, 1, 1, 1), "reflect")),
    "repeated": lambda: nn.ReplicationPad2d(1),
    "shifted": lambda: Called(
        lambda x: torch.cat([torch.roll(x[:, :4], 1, 3), functional.pad(x, (1, 1))[:, 4:, :, 2:]], 1)
    ),
    "nearest": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="nearest")),
    "bilinear": lambda: nn.Sequential(
        nn.AvgPool2d(2), Called(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"))
    ),
    "cubic": lambda: nn.Upsample(scale_factor=1.25, mode="bicubic"),
    "blurred and scaled": lambda: Called(lambda x: functional.interpolate(x, (7, 5), mode="bilinear", antialias=True)),
    "as a function": lambda: Weighted(lambda weight: weight),
    "standardised": lambda: Weighted(lambda weight: (weight - weight.mean((1, 2, 3), keepdim=True)) / 0.3),
    "signs": lambda: Weighted(lambda weight: torch.sign(weight) * weight.abs().mean((1, 2, 3), keepdim=True)),
    "transposed": lambda: nn.Sequential(nn.MaxPool2d(2), nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1)),
    "pixels": lambda: nn.Sequential(nn.Conv2d(WIDTH, 4 * WIDTH, 2, 2), nn.PixelShuffle(2)),
}


@block(*LAYERS)
def between(unit: Unit, how: str) -> nn.Module:
    return nn.Sequential(unit(), LAYERS[how](), unit())


def _zeros_written(x: Tensor, y: Tensor) -> Tensor:
    y[:, :1] = 0
    return x + y


def _rows_written(x: Tensor, y: Tensor) -> Tensor:
    y = y.clone()
    y[:, :, 1:] += x[:, :, :-1]
    return y


#: Residual sums, gates, and what else is computed of two tensors.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + y": lambda x, y: x + y,
    "y += x": lambda x, y: y.add_(x),
    "relu(x + y)": lambda x, y: functional.relu(x + y),
    "y += x; relu_": lambda x, y: y.add_(x).relu_(),
    "add(alpha=0.5)": lambda x, y: torch.add(x, y, alpha=0.5),
    "x - y": lambda x, y: x - y,
    "stack and sum": lambda x, y: torch.stack([x, y]).sum(0),
    "sum of three": lambda x, y: x + y + functional.max_pool2d(x, 3, 1, 1),
    "0.7 x + 0.3 y": lambda x, y: 0.7 * x + 0.3 * y,
    "x y": lambda x, y: x * y,
    "silu(x) y": lambda x, y: functional.silu(x) * y,
    "relu6(x) y": lambda x, y: functional.relu6(x) * y,
    "glu": lambda x, y: functional.glu(torch.cat([x, y], 1), 1),
    "mixed by a gate": lambda x, y: torch.sigmoid(x) * y + (1 - torch.sigmoid(x)) * x,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0.1, y, x),
    "flip": lambda x, y: x + y.flip(-1),
    "transpose": lambda x, y: x + y.transpose(2, 3),
    "softmax": lambda x, y: x * functional.softmax(y, 1),
    "logarithm": lambda x, y: x + torch.log1p(y.abs()),
    "root": lambda x, y: x + (y.relu() + 1e-2).sqrt(),
    "zeros written": _zeros_written,
    "rows written": _rows_written,
    "cat of parts": lambda x, y: torch.cat([x[:, 1:], y[:, :1]], 1),
    "cat of a gate": lambda x, y: torch.cat([x[:, :4], y[:, :4].sigmoid()], 1),
}


@block(*OPERATIONS)
def combined(unit: Unit, how: str) -> nn.Module:
    """A tensor and what convolutions make of it."""

    def compute(net: Any, x: Tensor) -> Tensor:
        return net.after(OPERATIONS[how](x, net.beside(x)))

    return Net(compute, beside=nn.Sequential(unit(), normed()), after=unit(kernel=1))


SHORTCUTS: dict[str, Callable[[], nn.Module]] = {
    "1x1": lambda: nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1, 2, bias=False), nn.BatchNorm2d(WIDTH)),
    "average": lambda: nn.Sequential(
        nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False), nn.Conv2d(WIDTH, WIDTH, 1)
    ),
    "average and norm": lambda: nn.Sequential(nn.AvgPool2d(2), nn.BatchNorm2d(WIDTH)),
    "max": lambda: nn.MaxPool2d(2),
    "slices": lambda: Called(lambda x: functional.pad(x[:, 2:6, ::2, ::2], (0, 0, 0, 0, 2, 2))),
}


@block(*SHORTCUTS)
def halved(unit: Unit, how: str) -> nn.Module:
    """A residual block of stride 2."""

    def compute(net: Any, x: Tensor) -> Tensor:
        return torch.relu(net.main(x) + net.shortcut(x))

    return Net(compute, main=nn.Sequential(unit(stride=2), normed()), shortcut=SHORTCUTS[how]())


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "pool": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "max": lambda x: x.amax((2, 3), keepdim=True),
    "view": lambda x: functional.adaptive_avg_pool2d(x, 1).view(x.size(0), -1, 1, 1),
}
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda x, y: x * torch.sigmoid(y),
    "hardsigmoid": lambda x, y: functional.hardsigmoid(y, inplace=True) * x,
    "sigmoid, expanded": lambda x, y: x * y.sigmoid().expand_as(x),
    "sigmoid, mul_": lambda x, y: x.mul_(y.sigmoid()),
    "1 + tanh": lambda x, y: x * (torch.tanh(y) + 1),
    "clamp": lambda x, y: x * (y + 0.5).clamp(0, 1),
}


@block(*pairs(MEANS, GATES))
def inverted(unit: Unit, how: str) -> nn.Module:
    """An inverted residual with a gate for each channel (Howard et al. 2019, Hu et al. 2018)."""
    mean, gate = how.split("; ")

    def compute(net: Any, x: Tensor) -> Tensor:
        y = net.deep(net.expand(x))
        return x + net.project(GATES[gate](y, net.up(torch.relu(net.down(MEANS[mean](y))))))

    wide = 2 * WIDTH
    expand, deep = unit(WIDTH, wide, 1), unit(wide, wide, groups=wide)
    down, up = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)
    return Net(compute, expand=expand, deep=deep, down=down, up=up, project=normed(wide, 1))


@block("view", "transpose", "unsqueeze")
def channel_convolved(unit: Unit, how: str) -> nn.Module:
    """Wang et al. 2020 (ECA): a convolution over the channels' means."""

    def compute(net: Any, x: Tensor) -> Tensor:
        if how == "view":
            y = net.over(x.mean((2, 3)).view(x.shape[0], 1, -1)).view(x.shape[0], -1, 1, 1)
        elif how == "transpose":
            y = functional.adaptive_avg_pool2d(x, 1).squeeze(-1).transpose(-1, -2)
            y = net.over(y).transpose(-1, -2).unsqueeze(-1)
        else:
            y = net.over(x.mean((2, 3)).unsqueeze(1)).squeeze(1)[..., None, None]
        return x * torch.sigmoid(y)

    return Net(compute, over=nn.Conv1d(1, 1, 3, padding=1, bias=False))


@block("amax", "max")
def spatially_gated(unit: Unit, how: str) -> nn.Module:
    """Woo et al. 2018 (CBAM): a gate for each place, of the channels' mean and maximum."""

    def compute(net: Any, x: Tensor) -> Tensor:
        highest = x.amax(1, keepdim=True) if how == "amax" else torch.max(x, dim=1, keepdim=True)[0]
        return x * torch.sigmoid(net.over(torch.cat([x.mean(1, keepdim=True), highest], 1)))

    return Net(compute, over=nn.Sequential(nn.Conv2d(2, 1, 7, padding=3, bias=False), nn.BatchNorm2d(1)))


@block("cat", "sum")
def coordinate_gated(unit: Unit, how: str) -> nn.Module:
    """Hou et al. 2021: gates of each row and each column, of a layer that sees both means; or of one that sees each."""

    def compute(net: Any, x: Tensor) -> Tensor:
        rows, columns = x.mean(3, keepdim=True), x.mean(2, keepdim=True)
        if how == "sum":
            return x * torch.sigmoid(net.rows(net.joint(rows)) + net.columns(net.joint(columns)))
        both = net.joint(torch.cat([rows, columns.permute(0, 1, 3, 2)], 2))
        rows, columns = torch.split(both, list(x.shape[2:]), 2)
        return x * net.rows(rows).sigmoid() * net.columns(columns.permute(0, 1, 3, 2)).sigmoid()

    joint = nn.Sequential(normed(kernel=1), nn.Hardswish())
    return Net(compute, joint=joint, rows=nn.Conv2d(WIDTH, WIDTH, 1), columns=nn.Conv2d(WIDTH, WIDTH, 1))


@block()
def global_context(unit: Unit, how: str) -> nn.Module:
    """Cao et al. 2019: what attention to all places finds, added to each."""

    def compute(net: Any, x: Tensor) -> Tensor:
        attention = net.scores(x).flatten(2).softmax(-1)
        return x + net.change(torch.matmul(x.flatten(2), attention.transpose(1, 2)).unsqueeze(-1))

    change = nn.Sequential(nn.Conv2d(WIDTH, 4, 1), nn.LayerNorm([4, 1, 1]), nn.ReLU(), nn.Conv2d(4, WIDTH, 1))
    return Net(compute, scores=nn.Conv2d(WIDTH, 1, 1), change=change)


@block("sum", "unbind")
def selective_kernel(unit: Unit, how: str) -> nn.Module:
    """Li et al. 2019: a mixture of two branches for each channel."""

    def compute(net: Any, x: Tensor) -> Tensor:
        both = torch.stack([net.small(x), net.large(x)], 1)
        shares = net.shares(both.sum(1).mean((2, 3), keepdim=True)).view(x.shape[0], 2, WIDTH, 1, 1).softmax(1)
        if how == "sum":
            return (both * shares).sum(1)
        (small, large), (one, other) = both.unbind(1), shares.unbind(1)
        return one * small + other * large

    shares = nn.Sequential(nn.Conv2d(WIDTH, 4, 1), nn.ReLU(), nn.Conv2d(4, 2 * WIDTH, 1))
    return Net(compute, small=unit(), large=unit(kernel=5), shares=shares)


@block()
def dense(unit: Unit, how: str) -> nn.Module:
    """Huang et al. 2017: each layer sees all before it, behind a norm and an activation of its own."""

    def compute(net: Any, x: Tensor) -> Tensor:
        y = torch.cat([x, net.first(x)], 1)
        return net.last(torch.cat([y, net.second(y)], 1))

    first, second = (
        nn.Sequential(nn.BatchNorm2d(into), nn.ReLU(inplace=True), nn.Conv2d(into, 4, 3, padding=1))
        for into in (WIDTH, WIDTH + 4)
    )
    return Net(compute, first=first, second=second, last=unit(WIDTH + 8, WIDTH, 1))


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: functional.max_pool2d(x, 3, 1, 1),
    "average": lambda x: functional.avg_pool2d(x, 3, stride=1, padding=1),
    "average within": lambda x: functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "pyramid": lambda x: functional.max_pool2d(functional.max_pool2d(x, 5, 1, 2), 5, 1, 2),
}


@block(*POOLS)
def inception(unit: Unit, how: str) -> nn.Module:
    """Szegedy et al. 2015: branches of several sizes, one of them a pool."""

    def compute(net: Any, x: Tensor) -> Tensor:
        pooled = POOLS[how](x)
        return net.out(torch.cat([net.point(x), net.wide(x), net.pooled(pooled), pooled], 1))

    return Net(compute, point=unit(WIDTH, 2, 1), wide=unit(WIDTH, 4), pooled=unit(WIDTH, 2, 1), out=unit(2 * WIDTH))


HALVES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": lambda x: x.chunk(2, 1),
    "split": lambda x: torch.split(x, [WIDTH // 2, WIDTH // 2], dim=1),
    "slices": lambda x: (x[:, : WIDTH // 2], x[:, WIDTH // 2 :]),
    "every other": lambda x: (x[:, ::2], x[:, 1::2]),
    "tensor_split": lambda x: torch.tensor_split(x, 2, 1),
    "unbind": lambda x: x.unflatten(1, (WIDTH // 2, 2)).unbind(2),
}


@block(*pairs(HALVES, ("layer", "view")))
def shuffled(unit: Unit, how: str) -> nn.Module:
    """Ma et al. 2018 (ShuffleNetV2): half of the channels pass a layer, then they are mixed."""
    half, mixed = how.split("; ")

    def compute(net: Any, x: Tensor) -> Tensor:
        kept, passed = HALVES[half](x)
        x = torch.cat((kept, net.layer(passed)), 1)
        if mixed == "layer":
            return net.mix(x)
        images, channels, height, width = x.size()
        x = x.view(images, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return x.view(images, channels, height, width)

    return Net(compute, layer=unit(WIDTH // 2, WIDTH // 2), mix=nn.ChannelShuffle(2))


@block()
def hierarchical(unit: Unit, how: str) -> nn.Module:
    """Gao et al. 2019 (Res2Net): a quarter of the channels is added to what the next layer sees."""

    def compute(net: Any, x: Tensor) -> Tensor:
        one, two, three, four = torch.split(x, WIDTH // 4, 1)
        two = net.first(one + two)
        return x + net.out(torch.cat([one, two, net.second(two + three), four], 1))

    return Net(compute, first=unit(2, 2), second=unit(2, 2), out=unit(kernel=1))


@block("in turn", "side by side")
def shared(unit: Unit, how: str) -> nn.Module:
    """One layer in two places."""

    def compute(net: Any, x: Tensor) -> Tensor:
        if how == "in turn":
            return net.layer(torch.relu(net.layer(x)))
        return net.layer(x) + net.layer(torch.relu(x))

    return Net(compute, layer=nn.Conv2d(WIDTH, WIDTH, 3, padding=1))


@block("convolution", "pool")
def channels_last(unit: Unit, how: str) -> nn.Module:
    """Liu et al. 2022 (ConvNeXt), or Yu et al. 2022 (PoolFormer) where a pool takes the convolution's place."""

    def compute(net: Any, x: Tensor) -> Tensor:
        y = net.deep(x) if how == "convolution" else net.pool(x) - x
        return x + (net.scale * net.mlp(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

    deep, pool = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH), nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    return Net(compute, deep=deep, pool=pool, mlp=mlp(), scale=nn.Parameter(torch.rand(WIDTH)))


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))
    )


def tokens(mixed: Callable[[Any, Tensor], Tensor], **named: nn.Module | nn.Parameter) -> nn.Module:
    """A transformer's block on the places of a map, of what mixes its tokens ``(N, places, WIDTH)``."""

    def compute(net: Any, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        y = y + mixed(net, net.norm(y))
        y = y + net.mlp(y)
        return y.transpose(1, 2).reshape(x.shape)

    return Net(compute, norm=nn.LayerNorm(WIDTH), mlp=mlp(), **named)


def projections() -> dict[str, nn.Module]:
    return {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)}


SPLITS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "unbind": lambda qkv: qkv.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0),
    "each": lambda qkv: tuple(qkv.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)[part] for part in range(3)),
    "chunk": lambda qkv: tuple(part.unflatten(-1, (2, 4)).transpose(1, 2) for part in qkv.chunk(3, -1)),
    "split": lambda qkv: torch.split(qkv.unflatten(-1, (2, 12)).transpose(1, 2), 4, dim=-1),
}
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scaled after": lambda q, k, bias: q @ k.transpose(-2, -1) * 0.5,
    "scaled before": lambda q, k, bias: (q * 0.5) @ k.transpose(-2, -1) + bias,
    "masked": lambda q, k, bias: (q @ k.transpose(-2, -1) / 2).masked_fill(bias < -1.5, -1e9),
    "cosine": lambda q, k, bias: 5 * functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT + bias,
    "einsum": lambda q, k, bias: torch.einsum("nhid,nhjd->nhij", q, k) * 0.5 + 100 * (bias < -1.5) * -1.0,
}


@block(*pairs(SPLITS, (*SCORES, "function")))
def attention(unit: Unit, how: str) -> nn.Module:
    """Of two heads, written out or with torch's function."""
    split, scores = how.split("; ")

    def mixed(net: Any, x: Tensor) -> Tensor:
        q, k, v = SPLITS[split](net.qkv(x))
        if scores == "function":
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=net.bias)
        else:
            y = SCORES[scores](q, k, net.bias).softmax(dim=-1) @ v
        return net.out(y.transpose(1, 2).reshape(x.shape))

    return tokens(mixed, bias=nn.Parameter(torch.randn(2, unit.side**2, unit.side**2) / 2), **projections())


@block()
def attention_layer(unit: Unit, how: str) -> nn.Module:
    """Torch's own."""

    def mixed(net: Any, x: Tensor) -> Tensor:
        return net.layer(x, x, x, need_weights=False)[0]

    return tokens(mixed, layer=nn.MultiheadAttention(WIDTH, 2, batch_first=True))


@block("shifted", "plain")
def window(unit: Unit, how: str) -> nn.Module:
    """Liu et al. 2021 (Swin): attention within windows of 4x4, of a map that is shifted by two places or not."""
    across, side = max(unit.side // 4, 1), unit.side
    inside = side // across
    index = torch.randint(0, inside**2, (inside**4,))

    def mixed(net: Any, x: Tensor) -> Tensor:
        x = x.reshape(-1, side, side, WIDTH)
        if how == "shifted":
            x = torch.roll(x, shifts=(-2, -2), dims=(1, 2))
        x = x[:, : across * inside, : across * inside].reshape(-1, across, inside, across, inside, WIDTH)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, inside**2, WIDTH)
        q, k, v = net.qkv(x).reshape(-1, inside**2, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = net.table[index].view(inside**2, inside**2, 2).permute(2, 0, 1).contiguous()
        scores = (q * 0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
        x = net.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, inside**2, WIDTH))
        x = x.view(-1, across, across, inside, inside, WIDTH).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, across * inside, across * inside, WIDTH)
        rest = side - across * inside
        x = functional.pad(x, (0, 0, 0, rest, 0, rest)) if rest else x
        if how == "shifted":
            x = torch.roll(x, shifts=(2, 2), dims=(1, 2))
        return x.reshape(-1, side**2, WIDTH)

    return tokens(mixed, table=nn.Parameter(torch.randn(inside**2, 2) / 2), **projections())


@block("relu", "channels", "context")
def linear_attention(unit: Unit, how: str) -> nn.Module:
    """Katharopoulos et al. 2020; over channels (XCiT, Ali et al. 2021); or with a context (MobileViTv2)."""

    def mixed(net: Any, x: Tensor) -> Tensor:
        q, k, v = net.qkv(x).chunk(3, -1)
        if how == "relu":
            q, k = torch.relu(q), torch.relu(k)
            y = q @ (k.transpose(1, 2) @ v) / (q @ k.sum(1, keepdim=True).transpose(1, 2) + 1e-2)
        elif how == "channels":
            scores = functional.normalize(q, dim=1).transpose(1, 2) @ functional.normalize(k, dim=1)
            y = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
        else:
            y = torch.relu(v) * (k * q[..., :1].softmax(1)).sum(1, keepdim=True).expand_as(v)
        return net.out(y)

    return tokens(mixed, **projections())


@block("mlp", "gate")
def mixer(unit: Unit, how: str) -> nn.Module:
    """Tolstikhin et al. 2021, or gMLP (Liu et al. 2021)."""

    def mixed(net: Any, x: Tensor) -> Tensor:
        if how == "mlp":
            return net.over(x.transpose(1, 2)).transpose(1, 2)
        return x * net.gate(x.transpose(1, 2)).transpose(1, 2)

    places = unit.side**2
    over = nn.Sequential(nn.Linear(places, 16), nn.GELU(), nn.Linear(16, places))
    return tokens(mixed, over=over, gate=nn.Linear(places, places))
