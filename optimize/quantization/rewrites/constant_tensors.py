"""Computes tensors that do not depend on the images, such as coordinates, once instead of for each image.

If they are joined with an image, torch.ao (2.11 to 2.14) follows their inputs until it meets a number, and fails
(``'int' object has no attribute 'args'``). It takes the result of ``x.new_ones(8, 1, 1)`` for an image, and would
quantize it whenever a graph is loaded.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.editing import replace, shape_of
from optimize.quantization.graph.in_place_writes import writes
from optimize.tracing.naming import free_name
from optimize.tracing.proxies import METHODS

_NEW = ("new_zeros", "new_ones", "new_full", "new_tensor")
_ASKED = ("shape", "size", "device", "dtype", "dim", "ndim", "numel")
#: Operators that draw random numbers, or return uninitialised memory.
_DRAWN = ("rand", "normal", "bernoulli", "multinomial", "poisson", "dropout")


def make_once(module: fx.GraphModule, example: torch.Tensor) -> int:
    """Make buffers of the tensors that depend only on the dtype and the sizes of the images, in place.

    Args:
        module: traced, in eval mode, with the shapes that `note_shapes` notes.
        example: ``(N, C, H, W)``. Sizes that depend on the number of images stay dynamic.

    Returns:
        The number of buffers made.
    """
    if not any(_begins(node) for node in module.graph.nodes):
        return 0
    known, made = _known(module, example), 0
    for node, value in known.items():
        readers = [reader for reader in node.users if reader not in known]
        if not isinstance(value, torch.Tensor) or not readers or any(writes(module, reader) for reader in readers):
            continue
        name = free_name(module, f"{node.name}_once")
        module.register_buffer(name, value.detach().clone())
        with module.graph.inserting_before(node):
            replace(node, module.graph.get_attr(name))
        for reader in readers:
            if reader.op == "call_method" and reader.target in METHODS and isinstance(reader.args[1], fx.Node):
                reader.args = (reader.args[0], reader.args[1:])  # with a proxy, sizes may be given one by one
        made += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return made


def _begins(node: fx.Node) -> bool:
    """Tell whether a node creates a tensor from other values, or from a tensor's dtype."""
    if node.op == "call_method" and node.target in _NEW:
        return True
    tensors = [given for given in node.all_input_nodes if shape_of(given) is not None]
    return node.op == "call_function" and not tensors and shape_of(node) is not None


def _known(module: fx.GraphModule, example: torch.Tensor) -> dict[fx.Node, Any]:
    """Return the values of nodes that depend neither on the images nor on their number."""
    asked, known, values = set[fx.Node](), dict[fx.Node, Any](), _Values.of(module, example)
    for node in module.graph.nodes:
        if _asks(node) or (node.target is operator.getitem and node.args[0] in asked):
            asked.add(node)
            if len(found := {values[node] for values in values}) == 1:
                known[node] = found.pop()
        elif node.op in ("call_function", "call_method") and not any(word in str(node.target) for word in _DRAWN):
            given = known
            if node.op == "call_method" and node.target in _NEW and isinstance(owner := node.args[0], fx.Node):
                given = known | {owner: torch.empty(0, dtype=owner.meta["tensor_meta"].dtype)}
            if all(before in given for before in node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
                called: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
                known[node] = called(*(args[1:] if node.op == "call_method" else args), **kwargs)
    return known


def _asks(node: fx.Node) -> bool:
    """Tell whether a node reads a property of a tensor that may be the same for all images."""
    method = node.target if node.op == "call_method" else None  # layers, tensors and inputs may have such names, too
    asked: Any = node.args[1] if node.target is getattr else method
    return asked in _ASKED and isinstance(given := node.args[0], fx.Node) and shape_of(given) is not None


class _Values(fx.Interpreter):
    """The properties of tensors that are read in a run of a module, by node."""

    @classmethod
    def of(cls, module: fx.GraphModule, example: torch.Tensor) -> tuple[dict[fx.Node, Any], ...]:
        """Return them for two runs with different numbers of images."""
        found = []
        for count in (2, 3):
            run = cls(module)
            run.seen = {}
            with torch.no_grad():
                run.run(example[:1].repeat(count, *[1] * (example.dim() - 1)))
            found.append(run.seen)
        return tuple(found)

    seen: dict[fx.Node, Any]

    def run_node(self, n: fx.Node) -> Any:
        """See `fx.Interpreter`."""
        value = super().run_node(n)
        if not isinstance(value, torch.Tensor | tuple) or isinstance(value, torch.Size):
            self.seen[n] = value
        return value
