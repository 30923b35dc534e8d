"""Which outputs of weighted layers stay in float: those that no integers are read from, for kernels that fuse.

TensorRT's documentation ("Explicit Quantization", Q/DQ layer-placement recommendations): quantize the inputs of
weighted operations, not their outputs; and the shortcut of a residual sum, so that the sum becomes part of the
convolution that gives its other addend. With quantizers on both, the sum is a layer of its own.
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
    """Take away the watchers behind weighted layers that the backend need not quantize, in place.

    These are the ones before operators that it computes in float (and before the answer), and the one of each residual
    sum's longer branch, if a convolution alone gives it.

    Args:
        prepared: with observers or fake-quantize modules.
        backend: what it was prepared for.

    Returns:
        How many were taken away.
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
    """The weighted layer whose output this node watches, if it alone takes it."""
    watching = called_module(module, watcher)
    # One with a bound (see `relu6`) is a ReLU6's clamp, too.
    if not isinstance(watching, (ObserverBase, FakeQuantizeBase)) or watching._forward_pre_hooks:
        return None
    before = watcher.args[0]
    layer = called_module(module, before)
    weighted = [layer, *layer.children()] if layer is not None else []
    if not isinstance(before, fx.Node) or len(before.users) != 1:
        return None
    return layer if any(isinstance(part, (_ConvNd, nn.Linear)) for part in weighted) else None


def _convolved(module: fx.GraphModule, addend: Any) -> bool:
    """Whether an addend is what a convolution gives, watched, for this sum alone, and without an activation between."""
    layer = _layer_before(module, addend) if isinstance(addend, fx.Node) else None
    if layer is None or len(addend.users) != 1:
        return False
    parts = [part for part in (layer, *layer.children()) if not isinstance(part, (ObserverBase, FakeQuantizeBase))]
    activated = "relu" in type(layer).__name__.lower() or any(isinstance(part, nn.ReLU) for part in parts)
    return any(isinstance(part, _ConvNd) for part in parts) and not activated


def reads_integers(module: fx.GraphModule, user: fx.Node, quantized: set[Any]) -> bool:
    """Whether an operator has a pattern of the backend's, and so takes integers."""
    if user.op == "output":
        return False
    layer = called_module(module, user)
    if layer is None:
        return called_function(user) in quantized
    if isinstance(layer, _BatchNorm):
        return False
    return type(layer) in quantized or isinstance(layer, (ObserverBase, FakeQuantizeBase))
