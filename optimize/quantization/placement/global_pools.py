"""Computes a network's last average pool in float. Its integers get a scale of their own.

Torch's integer kernels (2.11 to 2.14) give a pool's output the scale of its input, and FX gives one range to both. The
mean of k integers in their own scale is a multiple of 1/k. For an even k, one sum in k lies halfway between two
integers, and engines round it to either side. That is a quarter of a 2×2 pool's sums, right in front of the answer.
Means also use only a part of their input's range, so most integers would never occur.

Between a dequantizer and its own quantizer the pool is the same float operator in torch. ONNX Runtime and OpenVINO
compute it with two scales instead of one. Pools inside a network (squeeze and excitation, transitions) stay as they
are: their tensors are large, and torch would pay for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.tracing.naming import free_name

_MODULES = (nn.AdaptiveAvgPool2d, nn.AvgPool2d)
_FUNCTIONS = (functional.adaptive_avg_pool2d, functional.avg_pool2d, torch.mean)


class GlobalPool(nn.Module):
    """The mean of each channel, from a class for which torch.ao has no integer kernel.

    FX (2.11 to 2.14) turns its own pools into integer ones between integers, whatever the settings say.

    Args:
        flat: whether ``(N, C, H, W)`` becomes ``(N, C)``, and not ``(N, C, 1, 1)``.
    """

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the means of ``(N, C, H, W)``."""
        means = functional.adaptive_avg_pool2d(batch, 1)
        return torch.flatten(means, 1) if self.flat else means


def free_last_pool(module: fx.GraphModule, example: torch.Tensor) -> int:
    """Replace each global average pool through which everything flows by a `GlobalPool`, in place.

    Args:
        module: a traced network, on the CPU.
        example: an input, ``float32 (N, C, H, W)``.

    Returns:
        The number of pools replaced: hardly ever more than one.
    """
    seen = _Seen(copy.deepcopy(module).eval() if module.training else module)
    with torch.no_grad():
        seen.run(example)
    pools = [
        node for node in module.graph.nodes if node.name in seen.pools and _is_passed(module.graph, node, seen.tensors)
    ]
    for node in pools:
        name = free_name(module, f"{node.name}_in_float")
        module.add_submodule(name, GlobalPool(flat=seen.pools[node.name]))
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.call_module(name, (node.args[0],)))
        module.graph.erase_node(node)
    module.delete_all_unused_submodules()
    module.recompile()
    return len(pools)


class _Seen(fx.Interpreter):
    """Records the names of nodes that give tensors, and of global average pools with whether their output is flat."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.tensors: set[str] = set()
        self.pools: dict[str, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        """See `fx.Interpreter`."""
        value = super().run_node(n)
        if not isinstance(value, int | float | torch.Size):
            self.tensors.add(n.name)
        call = self._call(n)
        if call is not None and n.args and isinstance(n.args[0], fx.Node):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            flat = _averages(lambda given: call(given, *args[1:], **kwargs), args[0])
            if flat is not None:
                self.pools[n.name] = flat
        return value

    def _call(self, n: fx.Node) -> Callable[..., Any] | None:
        """Return the function or layer that a node calls, if it may be a pool."""
        if n.op == "call_module":
            layer = self.fetch_attr(str(n.target))
            return layer if type(layer) in _MODULES else None
        if n.op == "call_method":
            return torch.Tensor.mean if n.target == "mean" else None
        return n.target if n.op == "call_function" and n.target in _FUNCTIONS and callable(n.target) else None


def _averages(pool: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> bool | None:
    """Tell whether the output of a global average pool is flat, or None if it is no such pool.

    The pool is tried on random numbers of the same shape, because there are many ways to write a mean.
    """
    if given.dim() != 4 or given.shape[2] * given.shape[3] == 1:
        return None
    numbers = torch.rand(given.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = pool(numbers)
    shape = tuple(given.shape[:2])
    if tuple(found.shape) not in (shape, (*shape, 1, 1)) or found.dtype != numbers.dtype:
        return None
    return found.dim() == 2 if torch.allclose(found.flatten(1), numbers.mean((2, 3)), rtol=1e-9) else None


def _is_passed(graph: fx.Graph, pool: fx.Node, tensors: set[str]) -> bool:
    """Tell whether every tensor of the answer goes through a pool. Sizes of other tensors may be read."""
    around: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (
            node is not pool and node.name in tensors and any(given in around for given in node.all_input_nodes)
        ):
            around.add(node)
    return all(node not in around for node in graph.nodes if node.op == "output")
