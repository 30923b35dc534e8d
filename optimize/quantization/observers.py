"""What watches tensors while a model is calibrated or trained for int8, and which watchers are which."""

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
    """The mean over batches of each batch's least and largest value; `end_batch` says where a batch ends.

    Within a batch it sees what `MinMaxObserver` does, also where several tensors share it (those of a concatenation).
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def end_batch(self) -> None:
        """Take note of the extremes of the batch, and forget them."""
        if bool(self.min_val <= self.max_val):  # else it saw nothing
            self._batches.append((self.min_val.clone(), self.max_val.clone()))
        self.reset_min_max_vals()

    def settle(self) -> None:
        """Take the mean of what was noted as the range."""
        if self._batches:
            low, high = (torch.stack(side).mean(0) for side in zip(*self._batches, strict=True))
            self.min_val.copy_(low)
            self.max_val.copy_(high)
            self._batches = []


def activations(prepared: nn.Module) -> list[FusedMovingAvgObsFakeQuantize]:
    """The fake-quantize modules of activations whose range is observed (a sigmoid's is known)."""
    return [fake for fake in _observed(prepared) if not fake.is_per_channel]


def weights(prepared: nn.Module) -> list[FusedMovingAvgObsFakeQuantize]:
    """The fake-quantize modules of weights."""
    return [fake for fake in _observed(prepared) if fake.is_per_channel]


def observe(fakes: Iterable[FakeQuantizeBase], enabled: bool) -> None:
    """Let ranges follow what is seen, or keep them."""
    for fake in fakes:
        fake.enable_observer(enabled)


def watched(prepared: fx.GraphModule) -> dict[nn.Module, str]:
    """Name of the layer whose output each observer or fake-quantize module sees; that of functions is missing."""
    found: dict[nn.Module, str] = {}
    for node in prepared.graph.nodes:
        layer = called_module(prepared, node)
        if isinstance(layer, (ObserverBase, FakeQuantizeBase)):
            before = node.args[0]
            if before.op == "call_module":
                found.setdefault(layer, str(before.target))
    return found


def settle_weights(prepared: nn.Module, example: torch.Tensor) -> None:
    """Give each fake-quantized weight the range of the very weight that conversion writes, and keep it.

    torch's two conversions (2.11 to 2.14) treat a range that is not the weight's differently: packing quantizes
    to [-128, 127] whatever ``quant_min`` says, the reference form clamps to it. And a range can only be that of the
    last forward: one step of the optimizer old, and taken before the norm was folded as conversion folds it.

    Args:
        prepared: on the CPU, in eval mode; nothing happens to one that was not prepared for QAT.
        example: ``float32 (N, C, H, W)``; running it finds the weights that are no module's own.
    """
    if not weights(prepared):  # calibrated only: its observers would take note of the example
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
