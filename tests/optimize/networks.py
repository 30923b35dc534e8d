"""Networks that are drawn: a stem, one or two building blocks and a head, of random weights that see like trained ones.

A drawn `Spec` says which network it is, and hypothesis makes it smaller where a test fails: the first of each kind is
the plainest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.optimize.network_blocks import BLOCKS, WIDTH, Called, places_as_channels

CLASSES, SIDE = 4, 32

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU, in place": lambda: nn.ReLU(inplace=True),
    "ReLU6": nn.ReLU6,
    "Hardswish": lambda: nn.Hardswish(inplace=True),
    "SiLU": nn.SiLU,
    "GELU": nn.GELU,
    "LeakyReLU": lambda: nn.LeakyReLU(0.1),
    "PReLU": nn.PReLU,
    "ELU": nn.ELU,
    "Mish": nn.Mish,
    "Hardsigmoid": nn.Hardsigmoid,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "relu_": lambda: Called(functional.relu_),
    "x.relu()": lambda: Called(lambda x: x.relu()),
    "gelu(tanh)": lambda: Called(lambda x: functional.gelu(x, approximate="tanh")),
    "hardswish": lambda: Called(functional.hardswish),
    "clamp(0, 6)": lambda: Called(lambda x: x.clamp(0, 6)),
    "clamp(min=0)": lambda: Called(lambda x: torch.clamp(x, min=0.0)),
    "x sigmoid(x)": lambda: Called(lambda x: x * torch.sigmoid(x)),
    "x sigmoid(1.702 x)": lambda: Called(lambda x: x * torch.sigmoid(1.702 * x)),
    "x relu6(x + 3) / 6": lambda: Called(lambda x: x * functional.relu6(x + 3) / 6),
    "maximum(x, x / 10)": lambda: Called(lambda x: torch.maximum(x, 0.1 * x)),
    "where(x > 0)": lambda: Called(lambda x: torch.where(x > 0, x, 0.2 * x)),
    "relu(x) ** 2": lambda: Called(lambda x: functional.relu(x) ** 2),
    "none": nn.Identity,
}


class FrozenNorm(nn.Module):
    """A batch norm that is written out, of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(WIDTH) / 10)
        self.register_buffer("variance", torch.rand(WIDTH) + 0.5)
        self.mean: Tensor
        self.variance: Tensor

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.variance + 1e-5).rsqrt().reshape(1, -1, 1, 1)
        return x * scale + (0.1 - self.mean.reshape(1, -1, 1, 1) * scale)


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of a map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _responding(x: Tensor) -> Tensor:
    response = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
    return 0.7 * x * (response / (response.mean(dim=1, keepdim=True) + 1e-6)) + x


def _standardised(x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + 1e-3)


#: Of `WIDTH` channels; other widths have batch norms.
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(WIDTH),
    "batch, without weights": lambda: nn.BatchNorm2d(WIDTH, affine=False),
    "batch, written out": FrozenNorm,
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "instance": lambda: nn.InstanceNorm2d(WIDTH, affine=True),
    "layer": lambda: ChannelNorm(WIDTH),
    "layer, written out": lambda: Called(_standardised),
    "root mean square": lambda: Called(lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-3)),
    "length": lambda: Called(lambda x: functional.normalize(x, dim=1) * 3),
    "response": lambda: Called(_responding),
    "none": nn.Identity,
}


@dataclass(frozen=True)
class Unit:
    """Makes convolutions with a norm and an activation."""

    norm: str
    activation: str
    side: int

    def __call__(
        self, into: int = WIDTH, out: int = WIDTH, kernel: int = 3, *, stride: int = 1, groups: int = 1
    ) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups),
            NORMS[self.norm]() if out == WIDTH else nn.BatchNorm2d(out),
            ACTIVATIONS[self.activation](),
        )


#: From an image to maps of 8x8 places.
STEMS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Sequential(
        *(nn.Conv2d(3, WIDTH, 7, 4, 3, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()),
    ),
    "convolution and pool": lambda: nn.Sequential(
        *(nn.Conv2d(3, WIDTH, 3, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)),
    ),
    "patches": lambda: nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), ChannelNorm(WIDTH)),
    "places as channels": lambda: nn.Sequential(
        *(Called(places_as_channels), nn.Conv2d(12, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH), nn.SiLU()),
    ),
    "scaled anew": lambda: nn.Sequential(
        Called(lambda x: torch.cat([x[:, 0:1] * 0.9 + 0.1, x[:, 1:2] * 1.1 - 0.2, x[:, 2:]], 1)),
        *(nn.Conv2d(3, WIDTH, 5, 4, 2), nn.ReLU()),
    ),
}


class Head(nn.Module):
    """From maps to logits: what is made of the places, and of that."""

    POOLS: dict[str, Callable[[Tensor], Tensor]] = {  # noqa: RUF012  # one for all
        "pool": lambda x: torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1),
        "mean": lambda x: x.mean((2, 3)),
        "generalised mean": lambda x: x.clamp(min=1e-2).pow(3).mean((2, 3)).pow(1 / 3),
        "cat": lambda x: torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1),
        "half of both": lambda x: 0.5 * (x.amax((2, 3)) + x.mean((2, 3))),
        "tokens": lambda x: x.flatten(2).transpose(1, 2).mean(1),
        "quarters": lambda x: functional.adaptive_avg_pool2d(x, 2).flatten(1),
    }
    KINDS = ("linear", "norm", "batch norm", "hidden", "cosine", "log-softmax", "two, averaged", "1x1")

    def __init__(self, pool: str, kind: str) -> None:
        super().__init__()
        self.pool, self.kind = pool, kind
        width = self.POOLS[pool](torch.ones(1, WIDTH, 2, 2)).shape[1]
        self.norm, self.batch_norm = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.2))
        self.linear, self.other, self.point = (
            nn.Linear(width, CLASSES),
            nn.Linear(width, CLASSES),
            nn.Conv2d(width, CLASSES, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.POOLS[self.pool](x)
        if self.kind == "cosine":
            weight = functional.normalize(self.linear.weight, dim=1)
            return 10 * functional.linear(functional.normalize(x, dim=1), weight)
        if self.kind == "1x1":
            return self.point(x[:, :, None, None]).flatten(1)
        if self.kind == "two, averaged":
            return (self.linear(x) + self.other(x)) / 2
        before = {"norm": self.norm, "batch norm": self.batch_norm, "hidden": self.hidden}
        x = self.linear(before[self.kind](x) if self.kind in before else x)
        return functional.log_softmax(x, 1) if self.kind == "log-softmax" else x


@dataclass(frozen=True)
class Part:
    """A block, how it is written, and the norm and the activation that its convolutions have."""

    block: str
    how: str
    norm: str
    activation: str

    def build(self, side: int) -> nn.Module:
        return BLOCKS[self.block].make(Unit(self.norm, self.activation, side), self.how)


@dataclass(frozen=True)
class Spec:
    """Which network it is."""

    stem: str
    parts: tuple[Part, ...]
    pool: str
    head: str
    seed: int

    def build(self, images: Tensor) -> nn.Module:
        """The network, in eval mode.

        Its batch norms have the statistics of ``images``, ``float32 (N, 3, SIDE, SIDE)``, and weights that are not 1:
        with those of an untrained network the signal fades out or grows from layer to layer.
        """
        torch.manual_seed(self.seed)
        network = nn.Sequential(STEMS[self.stem]())
        for part in self.parts:
            with torch.no_grad():
                side = network(torch.zeros(2, 3, SIDE, SIDE)).shape[-1]
            network.append(part.build(side))
        network.append(Head(self.pool, self.head))
        norms = [layer for layer in network.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.momentum = None  # the mean of all batches that it has seen
            norm.reset_running_stats()
            if norm.affine:
                nn.init.uniform_(norm.weight, 0.6, 1.4)
                nn.init.uniform_(norm.bias, -0.4, 0.4)
        with torch.no_grad():
            network.train()(images.clone())
        return network.eval()


@st.composite
def parts(draw: st.DrawFn) -> Part:
    block = draw(st.sampled_from(list(BLOCKS)))
    how = draw(st.sampled_from(BLOCKS[block].ways))
    return Part(block, how, draw(st.sampled_from(list(NORMS))), draw(st.sampled_from(list(ACTIVATIONS))))


def networks() -> st.SearchStrategy[Spec]:
    """Any network of the vocabulary."""
    return st.builds(
        Spec,
        stem=st.sampled_from(list(STEMS)),
        parts=st.lists(parts(), min_size=1, max_size=2).map(tuple),
        pool=st.sampled_from(list(Head.POOLS)),
        head=st.sampled_from(Head.KINDS),
        seed=st.integers(0, 999),
    )
