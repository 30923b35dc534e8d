"""A quotient by a norm of integers has a floor that no engine's rounding of zeros reaches, and keeps its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.lowering.openvino.norm_floors import raise_floors
from tests.optimize.explicit_nets import Int8Linear, meant_and_found, rounded

#: A scale and a zero point whose product is no float32, as it is for nearly all.
STEP, ZERO = 0.0137, 118
#: Of quotients: from -1 to 1.
PARTS, HALF = 1 / 127, 128


class Keys(nn.Module):
    """Swin's keys: a layer without a bias, moved, divided by their lengths ``(N, 8, 4)``."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = Int8Linear(3, 6, STEP, ZERO)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        keys = rounded(self.keys(tokens).reshape(-1, 8, 2, 3).permute(0, 2, 1, 3), STEP, ZERO)
        return rounded(functional.normalize(keys, dim=-1), PARTS, HALF)


def test_in_openvino_a_vector_of_zeros_stays_one(tmp_path: Path) -> None:
    tokens = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(5))
    tokens[:, 5:] = 0  # what a window has beyond the image
    meant, found = meant_and_found(Keys(), tokens, tmp_path)
    assert not meant[:, :, 5:].any()
    assert meant[:, :, :5].abs().amax(-1).min() > 0.5  # and the others have directions
    torch.testing.assert_close(found, meant, rtol=0, atol=1.01 * PARTS)


def floors_of(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, set[float]]:
    """How many floors were raised in a network, and all that it then has; it computes what it computed."""

    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    # Of each image one entry at most is not zero, and that is an integer of a step or two.
    images = torch.zeros(5, 2, 3)
    images[1, 0, 1], images[2, 1, 2], images[3, 1, 0] = STEP, -STEP, 2 * STEP
    module = torch.export.export(Network(), (images,)).module()
    assert isinstance(module, fx.GraphModule)
    expected = module(images)
    raised = raise_floors(module)
    assert torch.equal(module(images), expected)
    clamps = [node for node in module.graph.nodes if "clamp" in str(node.target)]
    return raised, {float(node.args[1]) for node in clamps}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.normalize(rounded(x, STEP, ZERO), dim=-1),
        lambda x: functional.normalize(rounded(x, STEP, ZERO).transpose(1, 2).flatten(1), p=1.0, dim=1),
        lambda x: (y := rounded(x, STEP, ZERO)) / y.norm(dim=-1, keepdim=True).clamp(min=1e-6),
        lambda x: (y := rounded(x, STEP, ZERO)) / torch.linalg.vector_norm(y, float("inf")).clamp_min(1e-9),
        lambda x: (y := rounded(x, STEP, ZERO)).flatten(1) / y.norm(dim=(1, 2)).clamp_min(1e-9)[:, None].expand(-1, 6),
    ],
)
def test_a_floor_below_half_a_step_becomes_half_a_step(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert floors_of(function) == (1, {STEP / 2})


@pytest.mark.parametrize(
    ("function", "floor"),
    [
        (lambda x: functional.normalize(rounded(x, STEP, ZERO), eps=0.5), 0.5),  # it is meant to be seen
        (functional.normalize, 1e-12),  # of floats any norm occurs
        (lambda x: functional.normalize(rounded(x, STEP, ZERO) * 1e-3), 1e-12),
        (lambda x: rounded(x, STEP, ZERO).norm(dim=-1).clamp(1e-6, 0.004), 1e-6),
        (lambda x: rounded(x, STEP, ZERO).clamp_min(1e-6), 1e-6),  # no norm
        (lambda x: rounded(x, STEP, ZERO).norm(-1.0, -1).clamp_min(1e-12), 1e-12),  # smaller than its least entry
        (lambda x: rounded(x, STEP, ZERO).norm(dim=-1).clamp_min(1e-6).log(), 1e-6),
        (lambda x: (x + 1) / rounded(x, STEP, ZERO).norm(dim=-1, keepdim=True).clamp_min(1e-3), 1e-3),
        (lambda x: rounded(x, STEP, ZERO).norm(dim=-1).clamp_min(1e-6), 1e-6),  # the network's answer
        (
            lambda x: (y := rounded(x, STEP, ZERO)) / (n := y.norm(dim=-1, keepdim=True).clamp_min(1e-6)) + n.log(),
            1e-6,
        ),
        (lambda x: (n := rounded(x, STEP, ZERO).norm(dim=-1).clamp_min(1e-6)) / n, 1e-6),
    ],
)
def test_other_floors_stay(function: Callable[[torch.Tensor], torch.Tensor], floor: float) -> None:
    assert floors_of(function) == (0, {floor})
