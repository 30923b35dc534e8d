"""Operators whose range is known, kept in float where 7 bits are wanted: torch's kernels of them give all 8.

Of a tanh, a sigmoid and a hardsigmoid torch.ao (2.11 to 2.14) knows the range, and its kernels give 256 integers
whatever the target. A layer with weights that reads them has products that a CPU without VNNI adds in 16 bits, in
torch, ONNX Runtime and OpenVINO alike: behind the tanh of a small MaxViT's head two thirds of the last layer's integers
were others. In float they are rounded by the quantizer of what reads them, to 7 bits. What a sigmoid multiplies (a
squeeze and excitation) is no sum of products, and takes 8.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.between import has_weights


class FloatTanh(nn.Tanh):
    """See the module: torch.ao has no kernel for this class."""


class FloatSigmoid(nn.Sigmoid):
    """See the module."""


class FloatHardsigmoid(nn.Hardsigmoid):
    """See the module."""


#: What they become.
KNOWN_IN_FLOAT: Final = (FloatTanh, FloatSigmoid, FloatHardsigmoid)
_OPERATORS: Final[dict[Any, type[nn.Module]]] = {
    **dict.fromkeys((nn.Tanh, torch.tanh, functional.tanh, "tanh", "tanh_"), FloatTanh),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, functional.sigmoid, "sigmoid", "sigmoid_"), FloatSigmoid),
    **dict.fromkeys((nn.Hardsigmoid, functional.hardsigmoid, "hardsigmoid", "hardsigmoid_"), FloatHardsigmoid),
}
#: What gives numbers of another range than it is given: nothing behind it reads these integers.
_OTHERS: Final = frozenset(
    {
        *(operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, operator.truediv, operator.matmul),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm),
        *("add", "add_", "sub", "mul", "mul_", "div", "matmul", "bmm"),
    }
)


def free_known(module: fx.GraphModule) -> int:
    """Make operators of known range, which layers with weights read, ones that stay in float, in place.

    Args:
        module: traced, before anything watches its tensors.

    Returns:
        How many.
    """
    freed = 0
    for node in list(module.graph.nodes):
        kind = _kind(module, node)
        if kind is None or not _weighed(module, node):
            continue
        name = f"{node.name}_in_float"
        module.add_submodule(name, kind())
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.call_module(name, (node.all_input_nodes[0],)))
        module.graph.erase_node(node)
        freed += 1
    module.recompile()
    return freed


def _kind(module: fx.GraphModule, node: fx.Node) -> type[nn.Module] | None:
    if node.op == "call_module":
        return _OPERATORS.get(type(module.get_submodule(str(node.target))))
    in_place = str(node.target).endswith("_") and len(node.all_input_nodes[0].users) > 1
    return None if node.op not in ("call_function", "call_method") or in_place else _OPERATORS.get(node.target)


def _weighed(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a layer with weights reads what a node gives, or what is only moved, pooled or put together of it."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if has_weights(module, user):
                return True
            if user.target not in _OTHERS and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
