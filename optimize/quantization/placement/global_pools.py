"""The average pool that a network ends with: computed in floats, it gives integers of a scale of their own.

torch's integer kernels (2.11 to 2.14) give a pool's answer the scale of what it is given, and FX one range to both. The
mean of k integers in their own scale is a multiple of 1/k, where for an even k one sum in k lies halfway between two
integers, and engines round it to either side: a quarter of a 2×2 pool's, right in front of the answer. And means span a
part of the range of what they are means of, so that most integers would never occur.

Between a dequantizer and a quantizer of its own the pool is the same float operator in torch, and what ONNX Runtime and
OpenVINO compute with two scales instead of one. Pools inside a network (squeeze and excitation, transitions) stay as
they are: their tensors are large, and torch would pay for them.
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
    """The mean of each channel, of a class that torch.ao has no integer kernel for.

    FX (2.11 to 2.14) makes its own pools integer ones wherever they stand between integers, whatever it is told.

    Args:
        flat: whether ``(N, C, H, W)`` becomes ``(N, C)``, and not ``(N, C, 1, 1)``.
    """

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """``(N, C, H, W)`` to its means."""
        means = functional.adaptive_avg_pool2d(batch, 1)
        return torch.flatten(means, 1) if self.flat else means


def free_last_pool(module: fx.GraphModule, example: torch.Tensor) -> int:
    """Put a `GlobalPool` in the place of each global average pool that everything goes through, in place.

    Args:
        module: a traced network, on the CPU.
        example: ``float32 (N, C, H, W)``.

    Returns:
        How many were replaced: hardly ever more than one.
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
    """Notes which nodes give tensors, and which are global average pools, by name; those of a pool, whether flat."""

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
        """What a node calls, if it may be a pool."""
        if n.op == "call_module":
            layer = self.fetch_attr(str(n.target))
            return layer if type(layer) in _MODULES else None
        if n.op == "call_method":
            return torch.Tensor.mean if n.target == "mean" else None
        return n.target if n.op == "call_function" and n.target in _FUNCTIONS and callable(n.target) else None


def _averages(pool: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> bool | None:
    """Whether a pool gives the means of all places flat; None if it gives anything else.

    Tried on other numbers of the same shape: the ways to ask for a mean are many.
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
    """Whether every tensor that the answer is made of goes through a pool; the sizes of others may be asked for."""
    around: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (
            node is not pool and node.name in tensors and any(given in around for given in node.all_input_nodes)
        ):
            around.add(node)
    return all(node not in around for node in graph.nodes if node.op == "output")
