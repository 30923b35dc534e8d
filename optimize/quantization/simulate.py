"""A calibrated model in float arithmetic that rounds as its integers will. It shows what int8 does to each layer.

Every observed tensor and every weight is quantized and dequantized at once. This needs no kernel and no conversion.
Each layer can be inspected and changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.ao.nn.intrinsic.modules.fused import _FusedModule
from torch.ao.quantization import QConfig
from torch.ao.quantization.observer import ObserverBase

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_INTEGERS = (torch.quint8, torch.qint8, torch.uint8, torch.int8)


class _Rounded(nn.Module):
    """Quantizes and dequantizes with one scale."""

    def __init__(self, scale: float, zero_point: int, low: int, high: int) -> None:
        super().__init__()
        self.scale, self.zero_point, self.low, self.high = scale, zero_point, low, high

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = torch.fake_quantize_per_tensor_affine(
            x, self.scale, self.zero_point, self.low, self.high
        )
        return rounded


def weighted(prepared: fx.GraphModule) -> dict[str, nn.Module]:
    """Return the convolutions and linear layers of a prepared model that will be quantized, in the graph's order.

    The keys are the names that the graph calls. The graph calls a layer that is fused with its ReLU as one module. The
    value is then the layer alone.
    """
    found: dict[str, nn.Module] = {}
    for node in prepared.graph.nodes:
        if node.op != "call_module":
            continue
        called = prepared.get_submodule(str(node.target))
        layer: nn.Module = called[0] if isinstance(called, _FusedModule) else called
        if type(layer) in _LAYERS and getattr(called, "qconfig", None) is not None:
            found[str(node.target)] = layer
    return found


def weight_grid(prepared: fx.GraphModule, name: str) -> tuple[torch.Tensor, int, int]:
    """Return the scale of a layer's weight, in a shape that broadcasts with it, and its least and largest integer."""
    weight: torch.Tensor = weighted(prepared)[name].weight  # type: ignore[assignment]
    qconfig: QConfig = prepared.get_submodule(name).qconfig  # type: ignore[assignment]
    observer: Any = qconfig.weight().to(weight.device)
    observer(weight.detach())
    scale, zero_point = observer.calculate_qparams()
    assert not zero_point.any()  # weights are symmetric
    return scale.view(-1, *[1] * (weight.ndim - 1)), int(observer.quant_min), int(observer.quant_max)


def simulated(prepared: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a calibrated model that rounds all tensors as its integers will, and weights to the nearest.

    Args:
        prepared: with observers that have seen images. It is not changed.
    """
    module = copy.deepcopy(prepared)
    for name, layer in list(weighted(module).items()):
        scale, low, high = weight_grid(module, name)
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        weight.data = (weight.data / scale).round().clamp(low, high) * scale
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(layer, ObserverBase):
            continue
        observer: Any = layer
        if observer.dtype in _INTEGERS:
            scale, zero_point = observer.calculate_qparams()
            ends = int(observer.quant_min), int(observer.quant_max)
            module.set_submodule(name, _Rounded(float(scale), int(zero_point), *ends))
    return module


def unwatched(prepared: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the same graph in float. Observers become identities that keep a ReLU6's bound (see `bind`)."""
    module = copy.deepcopy(prepared)
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, ObserverBase):
            passing = nn.Identity()
            passing._forward_pre_hooks.update(layer._forward_pre_hooks)
            module.set_submodule(name, passing)
    return module


def each_alone(prepared: fx.GraphModule, plain: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield for each layer to be quantized the model with only that layer rounded: its weight, input and output.

    Args:
        prepared: with observers that have seen images. It is not changed.
        plain: the same with the float network's weights, as those of ``prepared`` may be clipped to a range. Its
            observers need not have seen anything.

    Yields:
        The layer's name, and the model. It is always the same object, and the next step changes it.
    """
    rounded, module = simulated(prepared), unwatched(plain)
    passing = {
        name: module.get_submodule(name)
        for name, layer in prepared.named_modules(remove_duplicate=False)
        if isinstance(layer, ObserverBase)
    }
    places = {str(node.target): node for node in module.graph.nodes if node.op == "call_module"}
    twins = weighted(rounded)
    for name, layer in list(weighted(module).items()):
        node = places[name]
        near = [str(other.target) for other in (*node.all_input_nodes, *node.users) if str(other.target) in passing]
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        kept, weight.data = weight.data, twins[name].weight.data  # type: ignore[assignment]
        for watcher in near:
            module.set_submodule(watcher, rounded.get_submodule(watcher))
        yield name, module
        weight.data = kept
        for watcher in near:
            module.set_submodule(watcher, passing[watcher])
