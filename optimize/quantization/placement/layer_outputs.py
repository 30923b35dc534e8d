"""Keeps outputs of layers with weights in float if no integer operator reads them, for kernels that fuse.

TensorRT's documentation ("Explicit Quantization", Q/DQ layer-placement recommendations) says to quantize the inputs of
weighted operations, not their outputs. It also says to quantize the shortcut of a residual sum. The sum then becomes
part of the convolution that gives its other addend. With quantizers on both addends, the sum is a layer of its own.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase
from torch.ao.quantization.backend_config import BackendConfig
from torch.ao.quantization.observer import ObserverBase
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from optimize.quantization.graph.nodes import SUMS, called_function, called_module, remove_watcher


def free_outputs(prepared: fx.GraphModule, backend: BackendConfig) -> int:
    """Remove observers behind weighted layers that the backend need not quantize, in place.

    These are observers before operators that it computes in float, and before the answer. In each residual sum it is
    also the observer of the longer branch, if a convolution alone gives it.

    Args:
        prepared: with observers or fake-quantize modules.
        backend: the backend that it was prepared for.

    Returns:
        The number of observers removed.
    """
    depths: dict[fx.Node, int] = {}
    for node in prepared.graph.nodes:
        depths[node] = 1 + max((depths[before] for before in node.all_input_nodes), default=0)
    quantized = {config.pattern for config in backend.configs}
    freed = [
        node
        for node in prepared.graph.nodes
        if _layer_before(prepared, node) is not None
        and all(not reads_integers(prepared, user, quantized) for user in node.users)
    ]
    for node in prepared.graph.nodes:
        if called_function(node) not in SUMS or len(node.all_input_nodes) != 2:
            continue
        if branches := [addend for addend in node.args if _convolved(prepared, addend)]:
            freed.append(max(branches, key=depths.__getitem__))
    for node in dict.fromkeys(freed):
        remove_watcher(prepared, node)
    prepared.recompile()
    return len(freed)


def _layer_before(module: fx.GraphModule, watcher: fx.Node) -> nn.Module | None:
    """Return the weighted layer whose output this node observes, if it is the only reader."""
    watching = called_module(module, watcher)
    # An observer with a bound (see `relu6`) is also a ReLU6's clamp.
    if not isinstance(watching, (ObserverBase, FakeQuantizeBase)) or watching._forward_pre_hooks:
        return None
    before = watcher.args[0]
    layer = called_module(module, before)
    weighted = [layer, *layer.children()] if layer is not None else []
    if not isinstance(before, fx.Node) or len(before.users) != 1:
        return None
    return layer if any(isinstance(part, (_ConvNd, nn.Linear)) for part in weighted) else None


def _convolved(module: fx.GraphModule, addend: Any) -> bool:
    """Tell whether an addend is the observed output of a convolution, without activation, for this sum only."""
    layer = _layer_before(module, addend) if isinstance(addend, fx.Node) else None
    if layer is None or len(addend.users) != 1:
        return False
    parts = [part for part in (layer, *layer.children()) if not isinstance(part, (ObserverBase, FakeQuantizeBase))]
    activated = "relu" in type(layer).__name__.lower() or any(isinstance(part, nn.ReLU) for part in parts)
    return any(isinstance(part, _ConvNd) for part in parts) and not activated


def reads_integers(module: fx.GraphModule, user: fx.Node, quantized: set[Any]) -> bool:
    """Tell whether the backend has a pattern for an operator, which then reads integers."""
    if user.op == "output":
        return False
    layer = called_module(module, user)
    if layer is None:
        return called_function(user) in quantized
    if isinstance(layer, _BatchNorm):
        return False
    return type(layer) in quantized or isinstance(layer, (ObserverBase, FakeQuantizeBase))
