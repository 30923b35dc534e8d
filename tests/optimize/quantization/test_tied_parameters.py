"""One parameter that several layers have: what a pass does to one of them is not done to the others, or to none."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from optimize.passes.prune_magnitude import PRUNE_MAGNITUDE, PruneMagnitude
from optimize.passes.ptq import Ptq
from optimize.pruning.groups import group
from optimize.pruning.propagation import channels_of
from optimize.pruning.regularised import GroupLasso, parts_of
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import resolve
from optimize.quantization.convert import trace_calls
from optimize.quantization.recovery.equalization import pairs
from optimize.quantization.recovery.layerwise import recover
from optimize.quantization.rewrites.batch_norms import turn_signs
from optimize.quantization.static import calibrating, observing
from optimize.tracing.folding import fuse_module
from optimize.tracing.trace import trace
from tests.optimize.workbench import noise_context, parent_of, with_running_statistics


class Tied(nn.Module):
    """Two convolutions of one weight and one bias; or two norms behind convolutions with the same factors."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.of_a, self.of_b = (nn.BatchNorm2d(8) if shared != "alone" else nn.Identity() for _ in range(2))
        if shared == "norms":
            self.of_b.weight = self.of_a.weight
        else:
            self.b.weight, self.b.bias = self.a.weight, self.a.bias
        self.head = nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.of_a(self.a(torch.relu(self.stem(batch)))))
        logits: torch.Tensor = self.head(torch.relu(self.of_b(self.b(x))).mean((2, 3)))
        return logits


def tied(shared: str = "alone") -> Tied:
    torch.manual_seed(0)
    module = with_running_statistics(Tied(shared))
    if isinstance(module.of_a, nn.BatchNorm2d):
        module.of_a.weight.data[::2] *= -1
    return module.eval()


def apart(module: nn.Module) -> nn.Module:
    """The same network, in which nobody shares anything."""
    own = copy.deepcopy(module)
    for layer in own.modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(parameter.detach().clone()))
    return own


@pytest.mark.parametrize("shared", ["layers", "norms"])
def test_signs_that_are_turned_for_one_layer_are_not_turned_for_the_other(shared: str) -> None:
    batch, module = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)), tied(shared)
    traced, again = (trace_calls(copy.deepcopy(module), batch) for _ in range(2))
    turn_signs(traced)
    assert all(bool((norm.weight > 0).all()) for norm in traced.modules() if isinstance(norm, nn.BatchNorm2d))
    again.load_state_dict(traced.state_dict())  # as what is trained from there opens again
    with torch.no_grad():
        for network in (traced, again):
            torch.testing.assert_close(network(batch), module(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"bias_correction": True}, {"rounding": "adaround", "rounding_steps": 20}])
def test_what_mends_one_layer_leaves_the_other_as_if_nothing_were_shared(settings: dict[str, Any]) -> None:
    context = noise_context()
    found = []
    for module in (tied(), apart(tied())):
        config = Ptq(**settings, images=32)
        chosen = resolve(functools.partial(copy.deepcopy, module), config)
        prepared = observing(functools.partial(copy.deepcopy, module), config, chosen, context.example())("minmax")
        batches = calibrating(config, context)
        calibrate(prepared, context, batches)
        figures = recover(prepared, context, batches, config)
        found.append((figures, prepared))
    (figures, shared), (expected, alone) = found
    assert figures == expected
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter, shared.get_parameter(name)), name


def test_a_weight_of_a_layer_that_is_kept_loses_nothing_and_others_are_counted_once(tmp_path: Path) -> None:
    context = noise_context()
    zeros = {}
    for keep in ((), ("b",)):
        module, folder = tied(), tmp_path / str(len(keep))
        folder.mkdir()
        config = PruneMagnitude(sparsity=0.5, keep=keep, train={"epochs": 0})
        product = PRUNE_MAGNITUDE.apply(parent_of(module, context, folder / "parent"), config, context, folder)
        (note,) = (note for note in product.notes if "of the weights of" in note)
        zeros[keep] = (note.partition(" are zero")[0], int((built(folder, module).a.weight == 0).sum()))
    sizes = [8 * 9, 8 * 8 * 9, 4 * 8]
    every = torch.cat([weight.abs().flatten() for weight in (tied().stem.weight, tied().a.weight, tied().head.weight)])
    border = every.sort().values[sum(sizes) // 2]
    assert zeros[()] == ("50.0% of the weights of 3 layers", int((tied().a.weight.abs() < border).sum()))
    assert zeros["b",] == ("50.0% of the weights of 2 layers", 0)


def built(folder: Path, module: nn.Module) -> Any:
    again = copy.deepcopy(module)
    again.load_state_dict(load_file(folder / "weights.safetensors"))
    return again


def test_a_pull_on_channels_passes_over_what_layers_share() -> None:
    module, batch = trace(tied("norms")), torch.zeros(2, 1, 16, 16)
    parts, count = parts_of(module, group(channels_of(module, batch), {}))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    GroupLasso(parts, count, 1.0).add(module)
    pulled = {name for name, parameter in module.named_parameters() if bool(parameter.grad.any())}  # type: ignore[union-attr]
    assert pulled == {"stem.weight", "a.weight"}  # the stem's outputs, and what reads them


def test_what_something_else_reads_is_not_equalized() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x))) + nn.functional.conv2d(x, self.a.weight)

    assert pairs(trace(Read())) == []


def test_a_norm_is_folded_into_one_of_them_alone() -> None:
    module, batch = tied("layers"), torch.randn(2, 1, 16, 16)
    folded = fuse_module(copy.deepcopy(module), batch)
    assert not [layer for layer in folded.modules() if isinstance(layer, nn.BatchNorm2d)]
    with torch.no_grad():
        torch.testing.assert_close(folded(batch), module(batch), rtol=1e-4, atol=1e-4)
