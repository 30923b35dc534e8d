"""Which channels belong together: structures that take channels apart and join them, and torchvision's families.

The oracle is the network as it was, in which the removed channels are zero: a smaller network answers as that one.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from examples.cifar_resnet import CifarResNet
from optimize.errors import PassError
from optimize.pruning.groups import Grouping, group
from optimize.pruning.propagation import channels_of
from optimize.pruning.surgery import joined, remove, resized
from optimize.pruning.width_budget import Costs
from optimize.tracing.trace import trace
from tests.optimize.families import FAMILIES, build, side
from tests.optimize.workbench import with_running_statistics


def grouped(module: nn.Module, batch: torch.Tensor) -> tuple[torch.fx.GraphModule, Grouping]:
    traced = trace(copy.deepcopy(module))
    return traced, group(channels_of(traced, batch), {})


def some(grouping: Grouping, seed: int = 0) -> set[int]:
    """About half of the units of each group, and never all."""
    generator = torch.Generator().manual_seed(seed)
    gone: set[int] = set()
    for each in grouping.groups:
        order = torch.randperm(len(each.units), generator=generator).tolist()
        gone.update(each.units[place] for place in order[: len(order) // 2])
    return gone


def silenced(module: nn.Module, grouping: Grouping, units: set[int]) -> nn.Module:
    """The whole network, in which the layers that give these channels, and their norms, give zeros."""
    silent, channels = copy.deepcopy(module), grouping.channels
    gone = torch.tensor(sorted(units), dtype=torch.int64)
    labels = {name: layer.out for name, layer in channels.layers.items()} | channels.norms
    with torch.no_grad():
        for name, own in labels.items():
            for parameter in silent.get_submodule(name).parameters(recurse=False):
                parameter[torch.isin(channels.labels.sets(own), gone)] = 0
    return silent


def pruned(module: nn.Module, batch: torch.Tensor, seed: int = 0) -> tuple[nn.Module, Grouping]:
    """Half of the channels gone; answers are compared with the oracle's, and the structure with what it rebuilds."""
    smaller, grouping = grouped(module, batch)
    units = some(grouping, seed)
    structure = remove(smaller, grouping, units)
    rebuilt = resized(copy.deepcopy(module), structure)
    rebuilt.load_state_dict(smaller.state_dict())
    with torch.no_grad():
        expected, found, again = silenced(module, grouping, units)(batch), smaller(batch), rebuilt(batch)
    scale = expected.abs().max().item()
    assert scale > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale)
    assert torch.equal(found, again)
    return smaller, grouping


def widths(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        name: (layer.weight.shape[0], layer.weight.shape[1])
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }


class Net(nn.Module):
    """A convolution, what a test puts behind it, and a head; ``(N, 3, 8, 8)`` to 5 logits."""

    def __init__(self, body: nn.Module, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = body
        self.flat = isinstance(body, Flattened | Written)
        self.head = nn.Linear(channels, 5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.body(functional.relu(self.norm(self.stem(batch))))
        return self.head(found if self.flat else found.mean((2, 3)))


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return functional.relu(x + self.conv(x))


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 10, 1), nn.Conv2d(16, 8, 1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return self.last(functional.relu(self.norm(torch.cat([self.left(x), self.right(x)], dim=1))))


class Separable(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.Hardswish()),
            *(nn.Conv2d(8, 12, 1), nn.PReLU(12)),
        )


class Grouped(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(8, 16, 3, groups=4), nn.ReLU(), nn.Conv2d(16, 8, 1))


class Gate(nn.Module):
    """Squeeze-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.down, self.up = nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(functional.relu(self.down(self.pool(x)))))


class Flattened(nn.Sequential):
    """Each channel is 16 inputs of the linear layer."""

    def __init__(self) -> None:
        super().__init__(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 12), nn.ReLU())


class Halves(nn.Module):
    """The first three channels and the other five go different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(5, 8, 1)

    def forward(self, x):
        return functional.relu(self.left(x[:, :3]) + self.right(x[:, 3:, :, :]))


class Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x):
        one, two = x.chunk(2, dim=1)
        first, second = torch.split(self.left(one), [2, 6], 1)
        return torch.cat([functional.relu(second), first, self.right(two)], 1)


class Written(nn.Module):
    """A reshape with the number of channels as a literal."""

    def forward(self, x):
        return functional.adaptive_avg_pool2d(x, 2).reshape(-1, 8 * 4)


class Twice(nn.Module):
    """One layer, called on two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.shared = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 6, 1)

    def forward(self, x):
        return functional.relu(self.shared(self.one(x))) * self.shared(functional.relu(self.two(x)))


#: Outputs and inputs of each layer when about half of every group is gone, worked out by hand.
EXPECTED = {
    Add: {"stem": (4, 3), "body.conv": (4, 4), "head": (5, 4)},
    Concat: {"stem": (4, 3), "body.left": (3, 4), "body.right": (5, 4), "body.last": (4, 8), "head": (5, 4)},
    Separable: {"stem": (4, 3), "body.0": (4, 1), "body.3": (6, 4), "head": (5, 6)},
    Grouped: {"stem": (4, 3), "body.0": (8, 2), "body.2": (4, 8), "head": (5, 4)},
    Gate: {"stem": (4, 3), "body.down": (2, 4), "body.up": (4, 2), "head": (5, 4)},
    Flattened: {"stem": (4, 3), "body.2": (6, 64), "head": (5, 6)},
    # 1 of 3 and 2 of 5 go.
    Halves: {"stem": (5, 3), "body.left": (4, 2), "body.right": (4, 3), "head": (5, 4)},
    # 1 of 2 and 3 of 6 on the left.
    Chunks: {"stem": (4, 3), "body.left": (4, 2), "body.right": (4, 2), "head": (5, 8)},
    Written: {"stem": (4, 3), "head": (5, 16)},
    Twice: {"stem": (4, 3), "body.one": (4, 4), "body.two": (4, 4), "body.shared": (3, 4), "head": (5, 3)},
}
HEADS = {Add: 8, Concat: 8, Separable: 12, Grouped: 8, Gate: 8, Flattened: 12, Halves: 8, Chunks: 16, Written: 32,
         Twice: 6}  # fmt: skip


def net(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return with_running_statistics(Net(kind(), HEADS[kind]))


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_a_smaller_network_answers_as_the_whole_one_with_the_channels_silent(kind: type[nn.Module]) -> None:
    batch = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    smaller, grouping = pruned(net(kind), batch)
    assert widths(smaller) == EXPECTED[kind]
    assert grouping.kept == {"head": "they are the network's outputs"}


def test_what_was_pruned_twice_is_rebuilt_from_one_structure() -> None:
    batch = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for kind in EXPECTED:
        smaller, grouping = grouped(net(kind), batch)
        first = remove(smaller, grouping, some(grouping))
        again = group(channels_of(smaller, batch), {})
        structure = joined(first, remove(smaller, again, some(again, seed=1)))
        rebuilt = resized(net(kind), structure)
        rebuilt.load_state_dict(smaller.state_dict())
        with torch.no_grad():
            assert torch.equal(rebuilt(batch), smaller(batch)), kind


def test_option_a_shortcuts_are_followed_through_their_pads() -> None:
    torch.manual_seed(0)
    network = with_running_statistics(CifarResNet(2))
    smaller, grouping = pruned(network, torch.randn(2, 3, 32, 32))
    assert grouping.kept == {"linear": "they are the network's outputs"}
    # The stream's 16 channels lie in the middle of the next stage's 32, and those in the middle of its 64; half of
    # each part is gone.
    found = widths(smaller)
    assert [found[f"layer{stage}.1.conv2"][0] for stage in (1, 2, 3)] == [8, 16, 32]
    assert found["linear"] == (10, 32)


class Shuffle(nn.Module):
    def forward(self, x):
        images, channels, height, width = x.shape
        parts = x.view(images, 2, channels // 2, height, width).transpose(1, 2)
        return parts.reshape(images, channels, height, width)


class Permuted(nn.Module):
    """As ConvNeXt: a norm over the channels of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        found = self.norm(x.permute(0, 2, 3, 1))
        return x + self.narrow(functional.gelu(self.wide(found))).permute(0, 3, 1, 2)


class Unknown(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, 1)


class AcrossChannels(nn.Module):
    """A pool of one dimension on ``(N, C)`` runs over the channels, as if the images were them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool1d(3, stride=1, padding=1)

    def forward(self, x):
        return self.pool(x.mean((2, 3)))[:, :, None, None]


class Places(nn.Module):
    """A pool that gives two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)

    def forward(self, x):
        return self.pool(x)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(functional.relu(self.one(x)))


class Softened(nn.Module):
    def forward(self, x):
        return functional.softmax(x, dim=1)


@pytest.mark.parametrize(
    ("body", "kept", "reason"),
    [
        (Shuffle, {"stem"}, "they are split over two dimensions, as in a channel shuffle"),
        (Permuted, {"stem", "body.narrow"}, "they reach LayerNorm body.norm, through which channels are not followed"),
        (Unknown, {"stem"}, "they reach cumsum, through which channels are not followed"),
        (Softened, {"stem"}, "they reach softmax, through which channels are not followed"),
        (AcrossChannels, {"stem"}, "they reach MaxPool1d body.pool, through which channels are not followed"),
        (Places, {"stem"}, "they reach MaxPool2d body.pool, through which channels are not followed"),
        (Tied, {"stem", "body.one", "body.two"}, "the weights of body.one are read elsewhere, too"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_is_not_understood_stays_whole_and_says_why(body: type[nn.Module], kept: set[str], reason: str) -> None:
    torch.manual_seed(1)
    network = with_running_statistics(Net(body(), 8))
    batch = torch.randn(2, 3, 8, 8)
    _, grouping = grouped(network, batch)
    assert set(grouping.kept) == {*kept, "head"}
    assert reason in {name: said for name, said in grouping.kept.items() if name != "head"}[sorted(kept)[-1]]
    assert {name for each in grouping.groups for name in each.layers} == (
        {"body.wide"} if body is Permuted else set()
    )  # the hidden layer of an MLP is followed, whatever is around it


def test_a_single_hook_or_parametrised_weight_keeps_a_layer() -> None:
    network = net(Add)
    torch.nn.utils.parametrizations.weight_norm(network.get_submodule("body.conv"))
    _, grouping = grouped(network, torch.randn(2, 3, 8, 8))
    assert not grouping.groups


def test_a_structure_of_another_model_is_refused_in_one_line() -> None:
    with pytest.raises(PassError, match="the stored shapes of a pruned network do not fit this model"):
        resized(net(Add), {"layers": {"body.left": [3, 4]}, "nodes": {}})
    with pytest.raises(PassError, match="do not fit this model"):
        resized(net(Add), {"layers": {"stem": [30, 3]}, "nodes": {}})


def test_multiply_accumulates_are_those_that_the_layers_do() -> None:
    _, grouping = grouped(net(Grouped), torch.randn(2, 3, 8, 8))
    by_hand = 8 * 3 * 9 * 64 + 16 * 2 * 9 * 36 + 8 * 16 * 36 + 8 * 5
    assert Costs(grouping).full == by_hand


# --- torchvision's families

#: Those whose every layer can be pruned but the head, which is named.
HEADS_ALONE = {
    "alexnet": "classifier.6",
    "densenet": "classifier",
    "efficientnet": "classifier.1",
    "googlenet": "9",
    "inception": "7",
    "mnasnet": "classifier.1",
    "mobilenet_v2": "classifier.1",
    "mobilenet_v3": "classifier.3",
    "regnet": "fc",
    "resnet": "fc",
    "resnext": "fc",
    "squeezenet": "classifier.1",
    "vgg": "classifier.6",
}
#: Of the others, the layers that can be pruned: hidden ones of MLPs and gates, and those between two channel shuffles.
OTHERS: dict[str, set[str]] = {
    "convnext": {"features.1.0.block.3", "features.3.0.block.3"},
    "shufflenet": {
        *("conv1.0", "stage2.0.branch1.0", "conv5.0"),
        *(f"stage{block}.branch2.{place}" for block in ("2.0", "3.0", "3.1", "4.0") for place in (0, 3)),
    },
    "swin": {f"features.{stage}.{block}.mlp.0" for stage in (1, 3) for block in (0, 1)},
    "swin_v2": {
        f"features.{stage}.{block}.{mlp}.0" for stage in (1, 3) for block in (0, 1) for mlp in ("mlp", "attn.cpb_mlp")
    },
    "vit": {f"encoder.layers.encoder_layer_{block}.mlp.0" for block in (0, 1)},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_answers_as_the_whole_one_with_the_channels_silent(name: str) -> None:
    network = with_running_statistics(build(name))
    if name == "vit":
        nn.init.normal_(network.get_parameter("heads.head.weight"))  # which begins as zeros
    batch = torch.randn(2, 3, side(name), side(name), generator=torch.Generator().manual_seed(0))
    _, grouping = pruned(network, batch)
    if name in HEADS_ALONE:
        assert grouping.kept == {HEADS_ALONE[name]: "they are the network's outputs"}
    elif name in OTHERS:
        assert {layer for each in grouping.groups for layer in each.layers} == OTHERS[name]
    else:
        assert name == "maxvit"
        found = {layer for each in grouping.groups for layer in each.layers}
        prefix = "blocks.0.layers.0.layers"
        assert found >= {f"{prefix}.MBconv.layers.conv_a.0", f"{prefix}.grid_attention.mlp_layer.1", "classifier.3"}
        assert any("LayerNorm" in reason for reason in grouping.kept.values())
