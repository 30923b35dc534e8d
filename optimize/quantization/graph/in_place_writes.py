"""Names in-place writes: later readers of an overwritten tensor read the node that wrote it.

An observer passes on the very tensor that it gets. So a network under calibration still sees what a ``relu_`` writes
into a tensor, even if it reads that tensor by its old name. Between a quantizer and a dequantizer the tensor is a copy.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx

from optimize.errors import PassError
from optimize.quantization.graph.nodes import called_module

_OPERATORS = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def name_written(module: fx.GraphModule, example: torch.Tensor) -> int:
    """Make all later readers of an overwritten tensor read the node that wrote it, in place.

    Args:
        module: traced, in eval mode.
        example: an input, ``float32 (N, C, H, W)``.

    Returns:
        The number of changed reads.

    Raises:
        PassError: a part of a tensor is overwritten, and the whole tensor is read afterwards.
    """
    if not any(writes(module, node) and _read_afterwards(module, node) for node in module.graph.nodes):
        return 0  # nothing to run the network for
    seen = _Writing(copy.deepcopy(module))
    with torch.no_grad():
        seen.run(example.clone())
    order = {node.name: place for place, node in enumerate(module.graph.nodes)}
    named = 0
    for node in module.graph.nodes:
        for written in seen.written.get(node.name, ()):
            for other in module.graph.nodes:
                if other is node or order[other.name] > order[node.name]:
                    continue
                if seen.memory.get(other.name, (None,))[0] != seen.memory[written][0]:
                    continue
                later = [user for user in other.users if order[user.name] > order[node.name]]
                if not later:
                    continue
                if seen.memory[other.name] != seen.memory[written] or node.name not in seen.memory:
                    raise PassError(
                        f"{node.name} writes into a part of {other.name}, which is read afterwards: "
                        "in int8 the two are copies; write a new tensor instead"
                    )
                for user in later:
                    user.replace_input_with(other, node)
                named += len(later)
    module.recompile()
    return named


def writes(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node may write into its first input."""
    if not node.all_input_nodes or node.op in ("output", "get_attr"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        (node.op == "call_method" and name.endswith("_") and not name.endswith("__"))
        or (node.op == "call_function" and (name.endswith("_") or node.target in _OPERATORS))
        or bool(node.kwargs.get("inplace"))
        or any(argument is True for argument in node.args[1:])  # functional.relu(x, True)
        or bool(getattr(called_module(module, node), "inplace", False))
    )


def _read_afterwards(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a later node reads what a node may overwrite: its input, or a tensor of which that may be a view."""
    given = node.all_input_nodes[0]
    while True:
        if any(node < user for user in given.users):
            return True
        layer = called_module(module, given)
        if not given.all_input_nodes or (layer is not None and next(layer.parameters(), None) is not None):
            return False
        given = given.all_input_nodes[0]


class _Writing(fx.Interpreter):
    """Records by name the memory of each node's tensor, and what each node writes into."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)  # otherwise memory would be used again
        self.memory: dict[str, tuple[Any, ...]] = {}
        self.written: dict[str, list[str]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """See `fx.Interpreter`."""
        given = [(node, self.env[node]) for node in n.all_input_nodes]
        before = [(node, tensor, tensor._version) for node, tensor in given if isinstance(tensor, torch.Tensor)]
        value = super().run_node(n)
        written = [node.name for node, tensor, version in before if tensor._version != version]
        if written and n.op != "output":
            self.written[n.name] = written
        first = value[0] if isinstance(value, tuple | list) and value else value
        if isinstance(first, torch.Tensor):
            place = first.untyped_storage().data_ptr()
            shape = (tuple(first.shape), first.stride(), first.storage_offset()) if first is value else ("parts",)
            self.memory[n.name] = (place, *shape)
        return value
