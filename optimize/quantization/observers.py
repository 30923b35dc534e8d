"""Observers and fake-quantize modules for int8 calibration and training, and functions that find them in a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.ao.nn.intrinsic.modules.fused import _FusedModule
from torch.ao.quantization import FakeQuantizeBase
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize
from torch.ao.quantization.observer import MinMaxObserver, ObserverBase

from optimize.quantization.graph.nodes import called_module


class MeanMinMaxObserver(MinMaxObserver):
    """The mean over batches of each batch's least and largest value. `end_batch` marks the end of a batch.

    Within a batch it works as `MinMaxObserver`, also where several tensors share it (those of a concatenation).
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def end_batch(self) -> None:
        """Record the extremes of the batch, and reset them."""
        if bool(self.min_val <= self.max_val):  # otherwise it saw nothing
            self._batches.append((self.min_val.clone(), self.max_val.clone()))
        self.reset_min_max_vals()

    def settle(self) -> None:
        """Set the range to the mean of the recorded extremes."""
        if self._batches:
            low, high = (torch.stack(side).mean(0) for side in zip(*self._batches, strict=True))
            self.min_val.copy_(low)
            self.max_val.copy_(high)
            self._batches = []


def activations(prepared: nn.Module) -> list[FusedMovingAvgObsFakeQuantize]:
    """Return the fake-quantize modules of activations whose range is observed. A sigmoid's range is fixed."""
    return [fake for fake in _observed(prepared) if not fake.is_per_channel]


def weights(prepared: nn.Module) -> list[FusedMovingAvgObsFakeQuantize]:
    """Return the fake-quantize modules of weights."""
    return [fake for fake in _observed(prepared) if fake.is_per_channel]


def observe(fakes: Iterable[FakeQuantizeBase], enabled: bool) -> None:
    """Let ranges follow the values seen, or freeze them."""
    for fake in fakes:
        fake.enable_observer(enabled)


def watched(prepared: fx.GraphModule) -> dict[nn.Module, str]:
    """Return for each observer or fake-quantize module the name of the layer whose output it sees.

    Those behind functions are missing.
    """
    found: dict[nn.Module, str] = {}
    for node in prepared.graph.nodes:
        layer = called_module(prepared, node)
        if isinstance(layer, (ObserverBase, FakeQuantizeBase)):
            before = node.args[0]
            if before.op == "call_module":
                found.setdefault(layer, str(before.target))
    return found


def settle_weights(prepared: nn.Module, example: torch.Tensor) -> None:
    """Give each fake-quantized weight the range of exactly the weight that conversion writes, and freeze it.

    Torch's two conversions (2.11 to 2.14) differ if a range is not the weight's. Packing quantizes to [-128, 127]
    whatever ``quant_min`` is, and the reference form clamps to it. A range may belong to the last forward. It is then
    one optimizer step old, and was taken before the norm was folded as conversion folds it.

    Args:
        prepared: on the CPU, in eval mode. A model that was not prepared for QAT stays unchanged.
        example: an input, ``float32 (N, C, H, W)``. Running it finds the weights that no module owns.
    """
    if not weights(prepared):  # calibrated only: its observers would record the example
        return
    observe(activations(prepared), False)
    for fake in weights(prepared):
        _forget(fake)
    with torch.no_grad():
        prepared(example)
        for layer in prepared.modules():
            own = getattr(layer, "weight_fake_quant", None)
            if isinstance(own, FusedMovingAvgObsFakeQuantize):
                written: Any = layer.to_float()  # type: ignore[operator]
                _forget(own)
                own((written[0] if isinstance(written, _FusedModule) else written).weight)
    observe(weights(prepared), False)


def _observed(prepared: nn.Module) -> list[FusedMovingAvgObsFakeQuantize]:
    return [layer for layer in prepared.modules() if isinstance(layer, FusedMovingAvgObsFakeQuantize)]


def _forget(fake: FusedMovingAvgObsFakeQuantize) -> None:
    fake.enable_observer()
    fake.activation_post_process.reset_min_max_vals()
