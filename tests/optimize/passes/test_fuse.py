"""What ``fuse`` folds, what it must leave alone, and that the numbers stay the parent's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from optimize.errors import PassError
from optimize.passes.fuse import FUSE, Fuse
from optimize.passes.onnx import ONNX, Onnx
from optimize.passes.ptq import PTQ, Ptq
from optimize.tracing.folding import fuse_module
from tests.narrow import layer
from tests.optimize.foreign_layers import (
    BranchingNorm,
    GatedSameConv,
    NamedConv,
    NamedNorm,
    NormAct,
    SameConv,
    StandardisedConv,
    UnbiasedConv,
)
from tests.optimize.workbench import noise_context, parent_of, run, with_running_statistics

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def norms_left(module: nn.Module) -> int:
    return sum(isinstance(layer, NORMS) for layer in module.modules())


def assert_same_function(fused: nn.Module, module: nn.Module, *shape: int) -> None:
    """On other inputs than fuse saw, and of another batch size."""
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        torch.testing.assert_close(fused(batch), module.eval()(batch), rtol=1e-4, atol=1e-4)


def _hooked(layer: nn.Conv2d) -> nn.Conv2d:
    """As the old ``nn.utils.weight_norm`` does: the weight is computed before each call."""

    def clamp(module: nn.Module, given: object) -> None:
        layer.weight.data.clamp_(-0.1, 0.1)

    layer.register_forward_pre_hook(clamp)
    layer.weight.data.clamp_(-0.1, 0.1)
    return layer


FOLDED = {
    "a convolution with bias": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (3, 6, 6)),
    "a convolution without bias": (nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)), (3, 6, 6)),
    "a norm without weight": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)), (3, 6, 6)),
    "a depthwise convolution": (
        nn.Sequential(nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d(6)),
        (6, 6, 6),
    ),
    "a grouped convolution": (nn.Sequential(nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4)), (6, 6, 6)),
    "a padded, strided, dilated one": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=2, dilation=2, padding_mode="reflect"), nn.BatchNorm2d(4, eps=0.1)
        ),
        (3, 9, 9),
    ),
    "a transposed convolution": (
        nn.Sequential(nn.ConvTranspose2d(3, 5, 3, stride=2, bias=False), nn.BatchNorm2d(5)),
        (3, 4, 4),
    ),
    "a 1-D convolution": (nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (3, 8)),
    "a linear layer on (N, features)": (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), (5,)),
    "a linear layer without bias": (nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4)), (5,)),
    "a subclass of a norm that adds nothing": (nn.Sequential(nn.Conv2d(3, 4, 3), NamedNorm(4)), (3, 6, 6)),
    "a subclass of a convolution that adds nothing": (nn.Sequential(NamedConv(3, 4, 3), nn.BatchNorm2d(4)), (3, 6, 6)),
    "subclasses of both, reflecting": (
        nn.Sequential(NamedConv(3, 4, 3, padding=1, padding_mode="reflect"), NamedNorm(4)),
        (3, 6, 6),
    ),
    "a norm with an activation inside": (nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), NormAct(4)), (3, 6, 6)),
    "a norm with another activation, after a group": (
        nn.Sequential(
            NamedConv(4, 4, 3, groups=4), NormAct(4, nn.SiLU()), nn.Conv2d(4, 2, 1), NormAct(2, nn.Identity())
        ),
        (4, 6, 6),
    ),
    "a convolution whose weight is standardised": (
        nn.Sequential(StandardisedConv(3, 4, 3, stride=2, padding=1), NormAct(4)),
        (3, 6, 6),
    ),
    "a convolution that pads by its input's size": (
        nn.Sequential(
            SameConv(3, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), SameConv(4, 4, 3), NormAct(4)
        ),
        (3, 7, 7),
    ),
    "two norms in a row": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), (3, 6, 6)),
    "a norm behind dropout": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), nn.BatchNorm2d(4)), (3, 6, 6)),
}


@pytest.mark.parametrize("case", FOLDED, ids=lambda case: case.replace(" ", "-"))
def test_a_norm_is_folded_into(case):
    plain, shape = FOLDED[case]
    module = with_running_statistics(plain)
    fused = fuse_module(module, torch.randn(4, *shape))
    assert norms_left(fused) == 0
    assert_same_function(fused, module, 3, *shape)


class Shared(nn.Module):
    """One convolution called twice, each time before another norm; or two before one norm; or one norm twice."""

    def __init__(self, convolutions: int, norms: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(convolutions))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(norms))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.convolutions[0](x))
        return self.norms[-1](self.convolutions[-1](x))


class SeenTwice(nn.Module):
    """The convolution's output goes around the norm as well."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x)
        return x + self.norm(x)


class NormFirst(nn.Module):
    """A sum stands between the convolution and the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x) + x)


class Read(nn.Module):
    """Who else reads the convolution's weight would read the norm's factors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x)) + self.convolution.weight.mean()


KEPT = {
    "a convolution that uses its weight otherwise too": (
        nn.Sequential(GatedSameConv(3, 4, 3), nn.BatchNorm2d(4)),
        1,
    ),
    "a convolution that can take no bias": (
        nn.Sequential(UnbiasedConv(3, 4, 3, bias=False), nn.BatchNorm2d(4)),
        1,
    ),
    "a norm that does more than a norm": (nn.Sequential(nn.Conv2d(3, 4, 3), BranchingNorm(4)), 1),
    "an activation inside a norm in between": (
        nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.BatchNorm2d(4)),
        1,
    ),
    "a weight that a hook computes": (
        nn.Sequential(_hooked(nn.Conv2d(3, 3, 3)), nn.BatchNorm2d(3)),
        1,
    ),
    "a shared convolution": (Shared(1, 2), 2),
    "a shared norm": (Shared(2, 1), 1),
    "both shared": (Shared(1, 1), 1),
    "an output that is used twice": (SeenTwice(), 1),
    "a weight that is read elsewhere": (Read(), 1),
    "a sum in between": (NormFirst(), 1),
    "an activation in between": (nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.BatchNorm2d(3)), 1),
    "no layer before it": (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)), 1),
    "batch statistics": (nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)), 1),
    "a grouped transposed convolution": (
        nn.Sequential(nn.ConvTranspose2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)),
        1,
    ),
    "a computed weight": (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3)), nn.BatchNorm2d(3)),
        1,
    ),
}


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.replace(" ", "-"))
def test_a_norm_is_kept_with(case):
    module, count = KEPT[case]
    module = with_running_statistics(module)
    fused = fuse_module(module, torch.randn(4, 3, 6, 6))
    assert sum(isinstance(layer, NORMS) for name, layer in fused.named_modules()) == count
    assert_same_function(fused, module, 5, 3, 6, 6)


def test_a_norm_over_positions_is_not_folded_into_a_linear_layer():
    # (N, L, C): BatchNorm1d(L) speaks of axis 1, the linear layer of axis 2. With L = C the sizes would fit.
    module = with_running_statistics(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    fused = fuse_module(module, torch.randn(2, 4, 5))
    assert norms_left(fused) == 1
    assert_same_function(fused, module, 3, 4, 5)


class Dropouts(nn.Module):
    """Dropout as modules and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Dropout(0.5), nn.Identity(), nn.Linear(64, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.layers(x), 0.5, training=self.training)


class Overwritten(nn.Module):
    """Writes into what a dropout gives, by a view, of an activation that keeps its answer for its gradient."""

    def __init__(self, *, as_function: bool) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(64, 4)
        self.dropouts, self.as_function = (
            nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5)]),
            as_function,
        )

    def _dropped(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return functional.dropout(x, 0.5, self.training) if self.as_function else self.dropouts[number](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._dropped(self.norm(self.convolution(x)), 0).relu_()
        x = self._dropped(torch.sigmoid(x), 1)
        x.flatten(1).mul_(0.5)
        return self.head(self._dropped(x.flatten(1), 2))


@pytest.mark.parametrize("as_function", [True, False])
def test_a_dropout_stays_whose_answer_is_written_into_so_that_the_network_can_be_trained_on(as_function):
    torch.manual_seed(0)
    module, batch = with_running_statistics(Overwritten(as_function=as_function), 3, 6, 6), torch.randn(2, 3, 6, 6)
    fused = fuse_module(module, batch)
    assert norms_left(fused) == 0
    assert [each.p for each in fused.modules() if isinstance(each, nn.Dropout)] == [0.5]
    assert_same_function(fused, module, 3, 3, 6, 6)
    weight = layer(fused, "convolution", nn.Conv2d).weight
    fused.train()(batch).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_dropout_and_identity_are_removed_and_functional_dropout_stays_off():
    module = Dropouts().train()
    fused = fuse_module(module, torch.randn(2, 3, 6, 6))
    kinds = {type(layer).__name__ for layer in fused.modules()}
    assert not kinds & {"Dropout", "Dropout2d", "Identity"}
    assert_same_function(fused, module, 3, 3, 6, 6)
    fused.train()  # even then: what was traced computes what the parent computes in eval mode
    batch = torch.ones(2, 3, 6, 6)
    assert torch.equal(fused(batch), fused(batch))


def test_the_parent_module_is_left_as_it_was():
    module = with_running_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fuse_module(module, torch.randn(2, 3, 6, 6))
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_a_model_that_cannot_be_traced_is_refused_in_one_line(tmp_path):
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((1, 2, 3)) if x.sum() > 0 else x.sum((1, 2, 3))

    context = noise_context()
    with pytest.raises(PassError, match=r"torch\.fx cannot trace this model: TraceError.*") as caught:
        FUSE.apply(parent_of(Branches(), context, tmp_path / "parent"), Fuse(), context, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_fold_that_changes_the_numbers_is_refused(tmp_path, monkeypatch):
    from optimize.tracing import folding

    context = noise_context()
    module = with_running_statistics(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    )
    monkeypatch.setattr(folding, "_fold", lambda layer, norm: layer)  # drops the norm without folding it
    with pytest.raises(PassError, match=r"logits differ from the parent's by .* more than the tolerance 0\.001"):
        FUSE.apply(parent_of(module, context, tmp_path / "parent"), Fuse(), context, tmp_path)


def test_the_trained_network_is_fused_whole_and_rebuilt_from_its_weights(trained, made, digits_context):
    fused = made("fuse")
    rebuilt = fused.module()
    assert norms_left(trained.module()) == 4
    assert norms_left(rebuilt) == 0
    batch = digits_context.example(7)
    expected = run(trained, batch)
    torch.testing.assert_close(run(fused, batch), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(batch), run(fused, batch), rtol=1e-5, atol=1e-5)
        assert torch.equal(rebuilt(batch), fused.module()(batch))


def test_a_fused_module_can_be_fused_again(made, session):
    again = session.apply(made("fuse"), Fuse(), "again").artifact
    batch = session.context.example(3)
    torch.testing.assert_close(run(again, batch), run(made("fuse"), batch))


def test_what_is_fused_of_foreign_layers_is_torchs_own_and_has_no_weight_twice():
    module = with_running_statistics(
        nn.Sequential(NamedConv(3, 4, 3, bias=False), NormAct(4), StandardisedConv(4, 5, 3), NamedNorm(5))
    )
    fused = fuse_module(module, torch.randn(2, 3, 8, 8))
    own = {type(layer) for layer in fused.modules() if next(layer.parameters(recurse=False), None) is not None}
    assert own == {nn.Conv2d}
    sizes = sorted(tensor.numel() for tensor in fused.state_dict().values())
    assert sizes == sorted([4 * 3 * 9, 4, 5 * 4 * 9, 5])


def test_a_fused_network_of_foreign_layers_is_rebuilt_from_its_weights(tmp_path):
    context = noise_context()
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    module = with_running_statistics(nn.Sequential(SameConv(1, 4, 3, stride=2), NormAct(4), *head))
    FUSE.apply(parent_of(module, context, tmp_path / "parent"), Fuse(), context, tmp_path)
    rebuilt = fuse_module(with_running_statistics(copy.deepcopy(module), seed=9), context.example())
    rebuilt.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert_same_function(rebuilt, module, 3, 1, 16, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("efficientnet_b0", 0),  # BatchNormAct2d
        ("tf_efficientnet_b0", 0),  # Conv2dSame
        ("resnetv2_50", 17),  # norms before the first convolution of each block, which nothing absorbs
        ("resnetv2_50x1_bit", 0),  # StdConv2d and group norms
        ("dm_nfnet_f0", 0),  # ScaledStdConv2dSame
    ],
)
def test_timms_networks_are_fused(name, norms):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    module = with_running_statistics(timm.create_model(name, num_classes=10))
    fused = fuse_module(module, torch.randn(2, 3, 64, 64))
    assert norms_left(fused) == norms
    batch = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = module(batch)
        assert (fused(batch) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_dead_channel_leaves_no_subnormal_numbers():
    """As weight decay leaves one: small weights, and a small scale in its norm."""
    torch.manual_seed(0)
    module = with_running_statistics(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
    )
    dead = torch.tensor([1, 6])
    convolution, norm = layer(module, 0, nn.Conv2d), layer(module, 1, nn.BatchNorm2d)
    assert convolution.bias is not None
    assert norm.running_mean is not None
    with torch.no_grad():
        convolution.weight[dead] *= 1e-25
        convolution.bias[dead] = 0
        norm.weight[dead] *= 1e-15
        norm.bias[dead] = 1e-39
        norm.running_mean[dead] = 0
    batch = torch.randn(2, 3, 8, 8)
    tiniest = torch.finfo(torch.float32).tiny
    scaled = (convolution.weight * norm.weight.view(-1, 1, 1, 1)).abs()
    assert bool(((scaled > 0) & (scaled < tiniest)).any())  # what folding multiplies
    fused = fuse_module(module, batch)
    for name, tensor in fused.state_dict().items():
        assert not bool(((tensor != 0) & (tensor.abs() < tiniest)).any()), name
    weight = fused.get_parameter("0.weight")
    assert not weight[dead].any()
    assert bool((weight[[0, 2, 3, 4, 5, 7]] != 0).all())
    assert_same_function(fused, module, 2, 3, 8, 8)


class Branching(nn.Module):
    """Cannot be traced: it goes by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


class Narrowed(Branching):
    """Computes with 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.fc(x).float()


class Around(nn.Module):
    """A convolution and a norm that fold, and something in front of the head."""

    def __init__(self, middle: nn.Module, narrowed: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.middle, self.head, self.narrowed = middle, nn.Linear(6, 4), narrowed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.narrowed):
            return self.head(self.middle(self.norm(self.conv(x)).relu().mean((2, 3)))).float()


def around(middle: nn.Module, narrowed: bool = False) -> Around:
    return with_running_statistics(Around(middle, narrowed))


def fuse_notes(network: nn.Module, folder: Path) -> tuple[str, ...]:
    context = noise_context()
    return FUSE.apply(parent_of(network, context, folder / "parent"), Fuse(), context, folder).notes


def test_a_layer_that_cannot_be_traced_stays_and_the_rest_is_folded(tmp_path):
    network = around(nn.Sequential(Branching(), nn.ReLU()))
    (note,) = (note for note in fuse_notes(network, tmp_path) if "stays as it is" in note)
    assert note.startswith("middle.0 stays as it is: ")
    assert "control flow" in note
    assert "norm.weight" not in load_file(tmp_path / "weights.safetensors")
    fused = fuse_module(copy.deepcopy(network), torch.randn(2, 1, 16, 16))
    assert type(layer(fused, "middle.0", nn.Module)) is Branching
    assert norms_left(fused) == 0
    assert_same_function(fused, network, 5, 1, 16, 16)


def test_a_network_of_which_nothing_but_one_such_layer_has_weights_is_refused():
    with pytest.raises(PassError, match=r"torch\.fx cannot trace this model"):
        fuse_module(nn.Sequential(nn.Sequential(nn.Flatten(), Branching()), nn.ReLU()), torch.randn(2, 6))


@pytest.mark.parametrize("middle", [nn.Identity(), Narrowed()])
def test_autocast_is_left_out_and_said(tmp_path, middle):
    network = around(middle, narrowed=not isinstance(middle, Narrowed))
    assert "autocast is ignored: everything is computed in float32" in fuse_notes(network, tmp_path)
    fused = fuse_module(copy.deepcopy(network), torch.randn(2, 1, 16, 16))
    network.narrowed = False
    network.middle = nn.Identity() if not isinstance(middle, Narrowed) else middle.fc
    assert_same_function(fused, network, 3, 1, 16, 16)


@pytest.mark.parametrize("name", ["conv", "norm", "middle"])
@pytest.mark.parametrize("before", [False, True])
def test_what_a_hook_changes_stays_changed(tmp_path, name, before):
    network = around(nn.Dropout())
    hooked = layer(network, name, nn.Module)
    if before:
        hooked.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    else:
        hooked.register_forward_hook(lambda module, given, answer: answer + 1)
    kept = [note for note in fuse_notes(network, tmp_path) if "hook" in note]
    assert kept == ([] if name == "middle" else [f"norm is not folded: {name} has a hook"])
    assert_same_function(fuse_module(copy.deepcopy(network), torch.randn(2, 1, 16, 16)), network, 5, 1, 16, 16)


class Asking(Branching):
    """Is exported, and not traced: it asks what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not issubclass(type(x), torch.Tensor):
            raise TypeError("no tensor")
        return self.fc(x)


def test_what_stays_is_in_float_where_the_rest_is_quantized(tmp_path):
    context, network = noise_context(), around(Asking())
    parent = parent_of(network, context, tmp_path / "parent")
    product = PTQ.apply(parent, Ptq(images=16), context, tmp_path)
    assert product.precision == "int8"
    quantized = torch.jit.load(tmp_path / product.file)
    text = str(quantized.inlined_graph)
    assert text.count("quantized::linear(") == 1  # the head's
    assert text.count("aten::linear(") == 1


def test_a_layer_that_goes_by_values_fails_where_it_must_be_exported_in_one_line(tmp_path):
    context, network = noise_context(), around(Branching())
    steps: list[tuple[Any, Any]] = [(PTQ, Ptq(images=16)), (ONNX, Onnx())]
    for step, config in steps:
        with pytest.raises(PassError, match=r"torch\.export cannot write this model: ") as caught:
            step.apply(parent_of(network, context, tmp_path / step.name), config, context, tmp_path)
        assert "\n" not in str(caught.value)
