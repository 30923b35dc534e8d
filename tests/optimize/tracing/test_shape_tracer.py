"""Forwards that compute with sizes, or branch on them: traced where the images' size settles it, else refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import einops
import pytest
import torch
from einops.layers.torch import Rearrange
from torch import fx, nn
from torch.nn import functional

from optimize.errors import PassError
from optimize.tracing.folding import fuse_module
from optimize.tracing.shape_tracer import ShapedTracer
from optimize.tracing.trace import graph_as_is, trace

EXAMPLE = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Padded(nn.Module):
    """As MobileViT does: padded or resized where the patches do not fill the map."""

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.convolution, self.norm, self.patch = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), patch

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(images))
        batch, channels, height, width = x.shape
        rows, columns = math.ceil(height / self.patch), math.ceil(width / self.patch)
        if rows * self.patch != height or columns * self.patch != width:
            x = functional.interpolate(x, size=(rows * self.patch, columns * self.patch), mode="bilinear")
        x = x.reshape(batch * channels, rows, self.patch, columns, self.patch).transpose(2, 3)
        x = x.reshape(batch, channels, rows * columns, self.patch**2).mean(-1)
        return x.flatten(1)


class Counting(nn.Module):
    """Loops, unpacks and asserts by sizes, kinds and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.convolution(images)
        assert x.dim() == x.ndim == 4
        assert len(x.shape) == 4
        assert x.device.type != "meta"
        assert x.shape == images[:, :1].expand(-1, 4, -1, -1)[..., 2:, 2:].shape
        assert int(x.size(0) == -1) == 0.0 == float(x.shape[0] < 0)
        total = x.new_zeros(x.size(0), int(math.sqrt(x.shape[1])))
        for row in range(x.size(-2)):
            total = total + x[:, :2, row].mean(-1)
        left, right = x.chunk(2, dim=1)
        return total + (left * right).sum((2, 3)) / x.shape[2:].numel()


class OfTheBatch(nn.Module):
    """Another way for an odd number of images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) if images.shape[0] % 2 else images.amax((2, 3))


class OfTheContent(nn.Module):
    """Another way for bright images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) if images.sum() > 1e9 else images.amax((2, 3))


class OfOneNumber(nn.Module):
    """The same by a number that has left the tensor."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) if images.sum().item() > 1e9 else images.amax((2, 3))


class Row(nn.Module):
    """Adds a row for each place, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(12.0).reshape(12, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.rows
        if rows.shape[0] != images.shape[-2]:
            rows = rows[: images.shape[-2]]
        return (images + rows).flatten(1)


class AFew(nn.Module):
    """Computes with the first images, two at most: of a lone one there is one."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = images[:2]
        if images.shape[-1] > 8:
            first = first[..., :8]
        return images.flatten(1) + first.reshape(first.shape[0], -1).amax(1).sum()


class Neighbours(nn.Module):
    """Compares each image with the second of its batch, and can take none alone."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[-1] % 2:
            images = images[..., 1:]
        return (images - images[1]).flatten(1)


class Squeezed(nn.Module):
    """Takes away each axis of one place, and gives the batch's back where that was among them."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pooled = functional.adaptive_avg_pool2d(images, 1).squeeze()
        return pooled.unsqueeze(0) if pooled.dim() == 1 else pooled


class OfLoneImages(nn.Module):
    """Another way for lone images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) if images.shape[0] > 1 else images.amax((2, 3))


class Shifted(nn.Module):
    """Moves a part of the channels up and a part down, and writes numbers, a row and another type."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.register_buffer("row", torch.arange(12, dtype=torch.float64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.convolution(images)
        moved = torch.zeros_like(x)
        moved[:, :2, 1:] = x[:, :2, :-1]
        moved[:, 2:4, :-1] = x[:, 2:4, 1:]
        moved[:, 4:] = x[:, 4:]
        moved[..., 0] = 0.5
        row: torch.Tensor = self.row  # type: ignore[assignment]
        moved[:, -1, 3] = row
        moved[:, 5:5] = 7.0
        moved[:] = moved * 2
        return moved


class Added(nn.Module):
    """As MViTv2's attention does, which spares the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        queries = self.convolution(images).flatten(2).transpose(1, 2)
        x = queries.softmax(-1)
        x[:, 1:] += queries[:, 1:]
        x[:, 0] -= 1
        return x.flatten(1)


class Writing(nn.Module):
    """Writes as it is told to."""

    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.write = write

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.write(images * 2)


def into_a_view(x: torch.Tensor) -> torch.Tensor:
    part = x[:, :2]
    part[:, 0] = 1.0
    return x


def beside_a_view(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(2)
    x[:, 0] = 1.0
    return rows + 1


def given_back_by_another_name(x: torch.Tensor) -> torch.Tensor:
    same = functional.dropout(x, 0.5, training=False)
    x[:, 0] = 1.0
    return same


def behind_a_mask(x: torch.Tensor) -> torch.Tensor:
    x[x > 0] = 0.0
    return x


def every_second(x: torch.Tensor) -> torch.Tensor:
    x[:, :, ::2] = 0.0
    return x


def into_the_batch(x: torch.Tensor) -> torch.Tensor:
    x[0] = 0.0
    return x


def refused(module: nn.Module) -> None:
    with pytest.raises(Exception, match=r"control flow|cannot be interpreted|real number|item assignment"):
        fx.Tracer().trace(module.eval())


@pytest.mark.parametrize(
    "module",
    [Padded(4), Padded(5), Counting(), Row(), AFew(), Shifted(), Added()],
    ids=["filled", "resized", "counting", "row", "a few", "shifted", "added"],
)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_forward_that_goes_by_sizes_is_traced_and_takes_batches_of_any_size(module: nn.Module, count: int) -> None:
    refused(copy.deepcopy(module))
    traced = trace(copy.deepcopy(module), EXAMPLE)
    images = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(count))
    with torch.no_grad():
        torch.testing.assert_close(traced(images), module.eval()(images))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_forward_that_takes_no_lone_image_is_traced_by_several(count: int) -> None:
    with pytest.raises(IndexError):
        Neighbours()(EXAMPLE[:1])
    refused(Neighbours())
    traced = trace(Neighbours(), EXAMPLE)
    images = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(count))
    assert torch.equal(traced(images), Neighbours()(images))


class Sized(nn.Module):
    """Makes tensors of as many places as there are images, and of others' sizes, one by one."""

    def __init__(self, make: Callable[[Sized, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make, self.convolution = make, nn.Conv2d(3, 4, 5)
        self.table: torch.Tensor
        self.register_buffer("table", torch.rand(1, 4, 1, 1))
        self.beside = torch.rand(1, 4, 1, 1)  # that is in no list of the network's tensors

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.convolution(images)
        return x + self.make(self, x)


SIZED: dict[str, Callable[[Sized, torch.Tensor], torch.Tensor]] = {
    "zeros": lambda net, x: torch.zeros(x.shape[0], 1, 8, 8),
    "one size": lambda net, x: torch.ones(x.size(0))[:, None, None, None],
    "of a type": lambda net, x: torch.ones(x.shape[0] * 2, 1, 8, 8, device=x.device, dtype=x.dtype).chunk(2)[0],
    "filled": lambda net, x: torch.empty(x.shape[0], 4, 1, 1).fill_(3),
    "a buffer": lambda net, x: net.table.expand(x.shape[0], -1, -1, -1),
    "a buffer's sizes": lambda net, x: net.table.expand(*x.shape),
    "as a buffer": lambda net, x: net.table.new_zeros(x.shape[0], 4, 1, 1) + net.table.new_ones(x.size(0), 1, 1, 1),
    "a tensor": lambda net, x: net.beside.expand(x.size(0), 4, 8, 8),
    "made here": lambda net, x: torch.arange(8).expand(x.shape[0], 1, 8, 8),
    "of a type that is asked for": lambda net, x: (
        net.table.type(x.dtype) + net.beside.type(torch.float64).type(x.dtype)
    ),
    "the end of a type": lambda net, x: torch.full_like(x, torch.finfo(x.dtype).eps) + torch.finfo(torch.half).tiny,
    "in a tuple": lambda net, x: torch.zeros((x.shape[0], 1, 8, 8)) + net.table.expand((x.shape[0], -1, 8, 8)),
}


@pytest.mark.parametrize("way", SIZED)
def test_a_forward_gives_sizes_of_the_batch_one_by_one(way: str) -> None:
    module = Sized(SIZED[way]).eval()
    traced = trace(copy.deepcopy(module), EXAMPLE)
    for count in (1, 2, 5):
        images = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            assert torch.equal(traced(images), module(images))


#: What is asked of a tensor's device; who hears that it is no CPU adds a hundred.
DEVICES: dict[str, Callable[[Sized, torch.Tensor], bool]] = {
    "another tensor's": lambda net, x: x.device == net.table.device == net.convolution.weight.device,
    "a CPU": lambda net, x: x.device == torch.device("cpu"),
    "a GPU": lambda net, x: x.device != torch.device("cuda", 0),
    "its number": lambda net, x: x.device.index is None,
    "its number by a method": lambda net, x: x.get_device() < 0,
    "its name": lambda net, x: str(x.device) == "cpu" and not x.is_cuda,
    "its kind": lambda net, x: torch.device(x.device.type).type == "cpu",
}


@pytest.mark.parametrize("way", DEVICES)
def test_a_forward_that_branches_on_a_device_goes_as_on_a_cpu(way: str) -> None:
    module = Sized(lambda net, x: net.table.to(x.device) + (0 if DEVICES[way](net, x) else 100)).eval()
    traced = trace(copy.deepcopy(module), EXAMPLE)
    with torch.no_grad():
        assert torch.equal(traced(EXAMPLE), module(EXAMPLE))


@pytest.mark.parametrize("module", [Sized(SIZED["zeros"]), OfTheContent()], ids=["traced", "refused"])
def test_tracing_leaves_torch_as_it_was(module: nn.Module) -> None:
    before = {name: getattr(torch, name) for name in dir(torch)}
    methods = dict(vars(torch.Tensor))
    with contextlib.suppress(PassError):
        trace(module, EXAMPLE)
    assert {name: getattr(torch, name) for name in dir(torch)} == before
    assert dict(vars(torch.Tensor)) == methods


def taken_over(x: torch.Tensor) -> torch.Tensor:
    other = torch.empty_like(x)
    other.set_(2 * x)  # type: ignore[call-overload]
    return other + x


def emptied(x: torch.Tensor) -> torch.Tensor:
    other = x.exp()
    found = other + x
    other.set_()  # type: ignore[call-overload]
    return found


@pytest.mark.parametrize("way", [taken_over, emptied])
def test_a_tensor_that_is_set_to_another_is_that_one(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As reversible networks do, which keep no activations."""
    module = Sized(lambda net, x: way(x)).eval()
    with torch.no_grad():
        expected = module(EXAMPLE)
    traced = trace(module, EXAMPLE)
    answer = traced(EXAMPLE)  # with a gradient, which torch has none of
    torch.testing.assert_close(answer, expected)
    answer.sum().backward()
    assert "set_" not in {node.target for node in traced.graph.nodes}


class MakingLayers(nn.Module):
    """As beginners write: a layer without weights that each forward makes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = nn.ReLU()(self.norm(self.convolution(images)))
        x = nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2))(x)
        return nn.Softmax(dim=1)(x.mean((2, 3)))


def test_layers_that_a_forward_makes_are_what_they_do() -> None:
    module = MakingLayers().eval()
    traced = trace(copy.deepcopy(module))
    with torch.no_grad():
        assert torch.equal(traced(EXAMPLE), module(EXAMPLE))
    assert {str(node.target) for node in traced.graph.nodes if node.op == "call_module"} == {"convolution", "norm"}


class Keeping(nn.Module):
    """Keeps what it has made for maps of one size, as timm's ConViT does."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.register_buffer("places", torch.zeros(1, 1), persistent=False)
        self.last: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.convolution(images)
        if self.places.shape[1] != x.shape[-1]:
            self.places = torch.arange(x.shape[-1]).to(x.dtype)[None] * x.shape[-1]
        self.last = x
        return x + self.places


def test_a_forward_keeps_nothing_of_its_tracing() -> None:
    module = Keeping().eval()
    for _ in range(2):
        traced = trace(module, EXAMPLE)
        assert module.places.shape == (1, 1)
        assert module.last is None
        with torch.no_grad():
            assert torch.equal(traced(EXAMPLE), copy.deepcopy(module)(EXAMPLE))


class KeepingMuch(nn.Module):
    """Keeps its maps in a list, in a dictionary and in an attribute that it did not have, and the shape of the last."""

    part: torch.Tensor
    one: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.maps: list[torch.Tensor] = []
        self.named: dict[str, list[torch.Tensor]] = {"first": [], "other": []}
        self.seen: torch.Size | None = None
        self.register_buffer("part", torch.tensor(0.5))
        self.register_buffer("one", torch.tensor(1.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.convolution(images)
        if self.seen != x.shape:
            self.seen = x.shape
        self.maps.append(x)
        self.named["first"] += [x]
        self.newest = (x, 1)
        self.part = x.mean()
        return x * self.part * self.one


def test_nor_in_what_it_keeps_more_than_one_in() -> None:
    module = KeepingMuch().eval()
    maps, names = module.maps, list(module.state_dict())
    for _ in range(2):
        traced = trace(module, EXAMPLE)
        assert module.maps is maps
        assert (maps, module.named, module.seen) == ([], {"first": [], "other": []}, None)
        assert not hasattr(module, "newest")
        assert list(module.state_dict()) == names
        assert module.part == 0.5
        with torch.no_grad():
            assert torch.equal(traced(EXAMPLE), copy.deepcopy(module)(EXAMPLE))


class KeepingConvolution(nn.Conv2d):
    """A convolution that is traced into, and keeps what it adds."""

    added: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = super().forward(images)
        if self.added is None:
            self.added = torch.ones_like(x)
        return x + self.added


def test_a_layer_that_was_tried_by_itself_has_nothing_of_that() -> None:
    module = nn.Sequential(KeepingConvolution(3, 4, 3), nn.ReLU()).eval()
    traced = trace(module, EXAMPLE)
    with torch.no_grad():
        assert torch.equal(traced(EXAMPLE), copy.deepcopy(module)(EXAMPLE))
    assert module[0].added is None


_KEPT: dict[str, torch.Tensor] = {}


class KeepingElsewhere(nn.Module):
    """Keeps what it has made where no network is asked for it."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + _KEPT.setdefault("added", torch.ones_like(images))


def test_what_another_tracing_has_left_is_a_fault_that_is_told() -> None:
    _KEPT.clear()
    trace(KeepingElsewhere())
    with pytest.raises(PassError, match=r"torch\.fx cannot trace this model: .* does not belong to this Graph"):
        trace(KeepingElsewhere())


class MakingWeights(nn.Module):
    """A layer that nobody can have trained."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.Conv2d(3, 4, 3)(images)


def test_a_layer_with_weights_that_a_forward_makes_is_refused() -> None:
    with pytest.raises(PassError, match="parameter is not a member of this module"):
        trace(MakingWeights(), EXAMPLE)


def matched(x: object) -> bool:
    match x:
        case torch.Tensor():
            return True
        case _:
            return False


@functools.singledispatch
def dispatched(x: object) -> bool:
    return False


@dispatched.register
def _(x: torch.Tensor) -> bool:
    return True


class Asking(nn.Module):
    """As DenseNet asks whether it is given one tensor or several, and others whether to keep a gradient."""

    def __init__(self, ask: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.ask, self.convolution = ask, nn.Conv2d(3, 4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.convolution(images)
        return x.relu() if self.ask(x) else x.sigmoid()


QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "by its class": lambda x: isinstance(x, torch.Tensor),
    "by torch": torch.is_tensor,
    "by several classes": lambda x: isinstance(x, list | tuple | torch.Tensor),
    "by its name": lambda x: x.__class__ is torch.Tensor,
    "by a pattern": matched,
    "by dispatch": dispatched,
    "no parameter": lambda x: not isinstance(x, nn.Parameter),
    "no gradient": lambda x: not x.requires_grad,
}


@pytest.mark.parametrize("way", QUESTIONS)
def test_a_forward_that_asks_what_it_is_given_hears_that_it_is_a_tensor(way: str) -> None:
    module = Asking(QUESTIONS[way]).eval()
    traced = trace(copy.deepcopy(module), EXAMPLE)
    with torch.no_grad():
        assert torch.equal(traced(EXAMPLE), module.convolution(EXAMPLE).relu())


@pytest.mark.parametrize("way", ["by its class", "by torch", "by its name", "by a pattern", "by dispatch"])
def test_without_an_example_a_forward_that_asks_whether_it_is_given_a_tensor_is_refused(way: str) -> None:
    with pytest.raises(PassError, match="it checks the type of a tensor"):
        trace(Asking(QUESTIONS[way]))


class Rearranged(nn.Module):
    """Attention as einops writes it, behind patches of its own layer, a token, and a mean of einops'."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=3, q=3)
        self.queries, self.token = nn.Linear(27, 3 * 8), nn.Parameter(torch.randn(27))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images)
        x = torch.cat([einops.repeat(self.token, "c -> b 1 c", b=images.shape[0]), x], 1)
        queries, keys, values = (
            einops.rearrange(part, "b n (h c) -> b h n c", h=2) for part in self.queries(x).chunk(3, -1)
        )
        found = torch.einsum("bhnc,bhmc->bhnm", queries, keys).softmax(-1) @ values
        return einops.reduce(einops.rearrange(found, "b h n c -> b n (h c)"), "b n c -> b c", "mean")


@pytest.mark.parametrize("count", [1, 2, 7])
def test_networks_are_written_with_einops(count: int) -> None:
    torch.manual_seed(0)
    module = Rearranged().eval()
    traced = trace(copy.deepcopy(module), EXAMPLE)
    images = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(count))
    with torch.no_grad():
        torch.testing.assert_close(traced(images), module(images))


@torch.jit.script
def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    """As networks wrote their activations before torch fused them."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.convolution, self.layer = nn.Conv2d(3, 4, 3), layer

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = swish(self.convolution(images))
        return x if self.layer is None else self.layer(x)


def test_a_scripted_function_is_what_it_was_written_as() -> None:
    module = Scripted().eval()
    traced = trace(copy.deepcopy(module), EXAMPLE)
    with torch.no_grad():
        torch.testing.assert_close(traced(EXAMPLE), module(EXAMPLE))
    assert torch.sigmoid in {node.target for node in traced.graph.nodes}


def test_a_scripted_layer_is_refused_in_a_line() -> None:
    with pytest.raises(PassError, match="one of its layers is TorchScript") as caught:
        trace(Scripted(torch.jit.script(nn.SiLU())), EXAMPLE)
    assert len(str(caught.value).splitlines()) == 1


class Settled(nn.Module):
    """Divides by a number that it has learned, and lets no gradient through."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.temperature = nn.Conv2d(3, 4, 3), nn.Parameter(torch.tensor(3.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (self.convolution(images.data) / self.temperature.item()).softmax(1)


def test_a_number_that_a_network_has_learned_stands_in_its_graph() -> None:
    module = Settled().eval()
    traced = trace(copy.deepcopy(module), EXAMPLE)
    with torch.no_grad():
        assert torch.equal(traced(EXAMPLE), module(EXAMPLE))
    assert [node.args[1] for node in traced.graph.nodes if node.target is operator.truediv] == [3.0]
    exported = torch.export.export(traced, (EXAMPLE,), strict=False)
    assert torch.equal(exported.module()(EXAMPLE), module(EXAMPLE))


def test_it_folds_and_is_traced_again_as_any_other() -> None:
    module = Padded(5).eval()
    assert isinstance(module.norm.running_var, torch.Tensor)
    module.norm.running_var.copy_(torch.tensor([0.5, 1.0, 2.0, 4.0]))
    folded = fuse_module(copy.deepcopy(module), EXAMPLE)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in folded.modules())
    again = trace(folded)
    images = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(again(images), module(images), rtol=1e-5, atol=1e-5)


def test_it_goes_to_another_process_as_any_other() -> None:
    traced = trace(Padded(5).eval(), EXAMPLE)
    again = pickle.loads(pickle.dumps(traced))
    assert [node.name for node in again.graph.nodes] == [node.name for node in traced.graph.nodes]
    with torch.no_grad():
        assert torch.equal(again(EXAMPLE), traced(EXAMPLE))


@pytest.mark.parametrize(
    "module",
    [OfTheBatch(), OfLoneImages(), Squeezed(), OfTheContent(), OfOneNumber()],
    ids=["batch", "lone", "squeezed", "content", "number"],
)
def test_a_forward_that_goes_by_the_batch_or_by_what_is_in_a_tensor_is_refused(module: nn.Module) -> None:
    with pytest.raises(PassError, match=r"torch\.fx cannot trace this model: TraceError"):
        trace(module, EXAMPLE)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (into_a_view, "and reads it through another name"),
        (beside_a_view, "and reads it through another name"),
        (given_back_by_another_name, "and reads it through another name"),
        (behind_a_mask, "at indices that are neither integers nor slices"),
        (every_second, "in steps of 2"),
        (into_the_batch, "a part of the batch"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_put_together_of_parts_is_refused(
    write: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    with pytest.raises(PassError, match=f"torch.fx cannot trace this model: TraceError: it writes into .*{said}"):
        trace(Writing(write), EXAMPLE)


def test_without_an_example_a_forward_that_goes_by_sizes_is_refused() -> None:
    with pytest.raises(PassError, match=r"torch\.fx cannot trace this model: TraceError"):
        trace(Padded(5))


def test_a_network_in_training_keeps_its_mode_and_its_statistics() -> None:
    module = Padded(5).train()
    before: dict[str, Any] = copy.deepcopy(module.state_dict())
    graph = graph_as_is(module, EXAMPLE, training=True)
    assert module.training
    assert module.norm.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [str(node.target) for node in graph.nodes if node.op == "call_module"] == ["convolution", "norm"]


def test_what_depends_on_the_batch_stays_a_call_and_all_else_is_a_number() -> None:
    graph = ShapedTracer(EXAMPLE).trace(Padded(4).eval())
    sizes = [node for node in graph.nodes if node.target == "size"]
    assert {node.args[1] for node in sizes} == {0}
    first = next(node for node in graph.nodes if node.target == "reshape")
    assert first.args[2:] == (3, 4, 3, 4)


class Masked(nn.Module):
    """With an input beside the images that is asked for, as timm's masks and positions are."""

    def forward(self, images: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 2.0) -> torch.Tensor:
        if mask is not None:
            images = images * mask.view(-1, 1, 1, 1)
        rows = images.shape[-1] // 2
        return (images[..., : max(rows, 2)] * scale).flatten(1)


def test_inputs_beside_the_images_have_their_defaults() -> None:
    traced = trace(Masked(), EXAMPLE)
    assert [node.name for node in traced.graph.nodes if node.op == "placeholder"] == ["images"]
    assert torch.equal(traced(EXAMPLE), Masked()(EXAMPLE))


class Asked(nn.Module):
    """Asks for its inputs beside the images, and needs no sizes: of a proxy each answer would be the other way."""

    def forward(
        self,
        images: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        scales: tuple[float, ...] = (),
        *more: torch.Tensor,
        pooled: bool = False,
        kind: str = "mean",
        **named: Any,
    ) -> torch.Tensor:
        assert images is not None
        if mask is not None:
            images = images * mask
        for scale in scales:
            images = images * scale
        if more or named.get("tokens") is not None:
            images = images + 1
        if pooled or kind == "max":
            return images.amax((2, 3))
        return images.mean((2, 3))


@pytest.mark.parametrize("example", [None, EXAMPLE])
def test_a_forward_goes_by_the_defaults_of_its_inputs_and_not_by_proxies(example: torch.Tensor | None) -> None:
    traced = trace(Asked(), example)
    assert [node.name for node in traced.graph.nodes if node.op == "placeholder"] == ["images"]
    assert torch.equal(traced(EXAMPLE), EXAMPLE.mean((2, 3)))
    assert torch.equal(pickle.loads(pickle.dumps(traced))(EXAMPLE), EXAMPLE.mean((2, 3)))
