"""Known quantization parameters: scales of weights and grids of activations that no observer has to find."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.ao.quantization import QConfig
from torch.ao.quantization.fake_quantize import FixedQParamsFakeQuantize
from torch.ao.quantization.observer import FixedQParamsObserver, PerChannelMinMaxObserver


class FixedWeight(PerChannelMinMaxObserver):
    """An observer of a weight that keeps the given scale, whatever it sees.

    Args:
        scale: ``(C,)``, one for each output channel.
        low: least integer.
        high: largest integer.
        settings: as `PerChannelMinMaxObserver`'s.
    """

    def __init__(self, scale: torch.Tensor, low: int, high: int, **settings: Any) -> None:
        super().__init__(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=low, quant_max=high, **settings
        )
        self.register_buffer("scale", scale.detach().clone())

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Pass the input on."""
        return seen

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return the scale, and zero points of 0."""
        scale = self.get_buffer("scale")
        return scale, torch.zeros(len(scale), dtype=torch.int64, device=scale.device)


def fix_weight(prepared: fx.GraphModule, name: str, scale: torch.Tensor, low: int, high: int) -> None:
    """Give the weight of a layer of a prepared model its own scale, ``(C,)``, and range of integers, in place."""
    called = prepared.get_submodule(name)
    qconfig: QConfig = called.qconfig  # type: ignore[assignment]
    fixed = FixedWeight.with_args(scale=scale, low=low, high=high)
    called.qconfig = QConfig(qconfig.activation, fixed)  # type: ignore[assignment, no-untyped-call]


def is_fixed(prepared: fx.GraphModule, name: str) -> bool:
    """Tell whether the weight of a layer has a given scale (see `fix_weight`)."""
    qconfig: QConfig = prepared.get_submodule(name).qconfig  # type: ignore[assignment]
    return isinstance(qconfig.weight(), FixedWeight)


def fixed_activation(
    scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype
) -> FixedQParamsFakeQuantize:
    """Return a module that rounds an activation to known integers, for a prepared model."""
    return FixedQParamsFakeQuantize(  # type: ignore[no-untyped-call]
        FixedQParamsObserver.with_args(scale=scale, zero_point=zero_point, dtype=dtype, quant_min=low, quant_max=high)
    )
