"""Mixed precision: the dtype of a training step, and the scaling that keeps small gradients from vanishing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optimize.training.config import TrainingConfig
from optimize.training.distributed.fake_quantize import in_float32

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """The precision of the settings on a device: forward under autocast, FP16 gradients scaled."""

    def __init__(self, config: TrainingConfig, device: torch.device) -> None:
        self._device = device
        self._type = _TYPES.get(config.precision)
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")

    def prepare(self, module: nn.Module) -> None:
        """Let the module's fake-quantize modules work with it; see `Float32FakeQuantize`."""
        if self._type is not None:
            in_float32(module)

    def forward(self, module: nn.Module, inputs: torch.Tensor) -> Any:
        """Return the module's output, a tensor or tuples of tensors, in float32."""
        if self._type is None:
            return module(inputs)
        with torch.autocast(self._device.type, dtype=self._type):
            given = module(inputs)
        return _float32(given)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the loss's gradients, scaled if they could vanish."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scaling of the gradients."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the step, or skip it if a scaled gradient overflowed."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def state(self) -> dict[str, Any]:
        """Return the scale, for a checkpoint."""
        return self._scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Load the scale of a checkpoint."""
        self._scaler.load_state_dict(state)


def _float32(given: Any) -> Any:
    return given.float() if isinstance(given, torch.Tensor) else tuple(map(_float32, given))
