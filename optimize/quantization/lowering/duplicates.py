"""Merges equal computations. The exporter merges them too, and the count of quantizers would differ otherwise."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import MOVES, quantizing
from optimize.tracing.constants import constant_value

_ATEN = torch.ops.aten

#: Operators that depend only on their input, beside those that only move values.
_READING = frozenset(
    {_ATEN.expand.default, _ATEN.repeat.default, _ATEN.repeat_interleave.self_int}
    | {_ATEN.select.int, _ATEN.slice.Tensor, _ATEN.sym_size.int}
    | {_ATEN.unbind.int, operator.getitem}
)
#: Operators that return their input if it has the wanted type or device already, and a new tensor otherwise.
_MADE_TO_BE = frozenset({_ATEN.to.device, _ATEN.to.dtype, _ATEN.to.other, _ATEN.to.dtype_layout})
#: Operators that split a tensor along an axis, their third argument.
_IN_PIECES = frozenset(
    {
        *(_ATEN.chunk.default, _ATEN.split.Tensor, _ATEN.split_with_sizes.default),
        *(_ATEN.tensor_split.sections, _ATEN.tensor_split.indices),
    }
)


def merge_alike(module: fx.GraphModule) -> None:
    """Merge equal nodes, as the exporter does, so that equal values are computed and quantized once.

    GCViT's blocks all read one query, and each moves and scales it by itself. ConViT's blocks each have the same
    positions as constants. DLA's trees pool one map on two levels. Pieces are equal if their sizes are, however they
    were split.
    """
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and node.users and not _written(node):
            key = content(constant_value(module, node))
        elif node.target in _IN_PIECES:
            key = _pieces(node)
        elif _only_moves(node) or quantizing(node) or _computes(node):
            key = (node.target, repr((node.args, sorted(node.kwargs.items()))))  # `repr` tells 1, 1.0 and True apart
        else:
            continue
        first = known.get(key)
        if first is None or any(_changes(given, first, node) for given in node.all_input_nodes):
            known[key] = node
        else:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    for node in reversed(module.graph.nodes):
        # A dropout returns its input itself. Exported again, readers of that input would read the dropout.
        if not node.users and _only_moves(node):
            module.graph.erase_node(node)
    module.recompile()


def _pieces(node: fx.Node) -> tuple[Any, ...]:
    """Return the split tensor, the axis, and the size of each piece."""
    pieces: list[torch.Tensor] = node.meta["val"]
    axis: int = dict(enumerate(node.args)).get(2, node.kwargs.get("dim", 0))  # type: ignore[assignment]
    return ("pieces", node.args[0], axis % pieces[0].ndim, tuple(str(piece.shape[axis]) for piece in pieces))


def _only_moves(node: fx.Node) -> bool:
    return node.target in MOVES or node.target in _READING or node.target in _IN_PIECES


def _computes(node: fx.Node) -> bool:
    """Tell whether a node returns a new tensor that depends only on its inputs and that nobody writes into."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and (not _aliases(node) or target in _MADE_TO_BE)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not _written(node)
    )


def write_aside(module: fx.GraphModule) -> int:
    """Write in-place operators as operators that return new tensors, if nobody reads the old tensor later, in place.

    A ``relu_`` becomes a ``relu``, for all code that looks for one and for `merge_alike`.

    Args:
        module: of a program, with ``aten`` operators.

    Returns:
        The number of operators changed.
    """
    place = {node: number for number, node in enumerate(module.graph.nodes)}
    found = 0
    for node in module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        name, given = target._schema.name.removeprefix("aten::").removesuffix("_"), node.args[0]
        other = getattr(getattr(_ATEN, name, None), target._overloadname, None)
        if other is None or not isinstance(given.target, torch._ops.OpOverload) or _aliases(given):
            continue
        others = [user for user in given.users if user is not node]
        if any(place[user] > place[node] or _views(user) for user in others):
            continue
        node.target = other
        found += 1
    module.recompile()
    return found


def _views(node: fx.Node) -> bool:
    """Tell whether a node may return a view of its input."""
    return not isinstance(node.target, torch._ops.OpOverload) or _aliases(node)


def _written(node: fx.Node) -> bool:
    """Tell whether a node changes a tensor in place or through a view. A program still contains its ``relu_``."""
    return any(_writers(node))


def _writers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that change a tensor in place, or through a view of it."""
    for user in node.users:
        if isinstance(user.target, torch._ops.OpOverload):
            if user.target._schema.is_mutable:
                yield user
            if _aliases(user):
                yield from _writers(user)


def _changes(node: fx.Node, first: fx.Node, last: fx.Node) -> bool:
    """Tell whether a node changes a tensor, or the tensor of which it is a view, between two of its readers."""
    while isinstance(node.target, torch._ops.OpOverload) and _aliases(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return any(first < writer < last for writer in _writers(node))


def _aliases(node: fx.Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    return any(returned.alias_info is not None for returned in node.target._schema.returns)


def content(constant: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for equal tensors."""
    numbers = constant.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return (type(constant), constant.dtype, tuple(constant.shape), hashlib.sha256(numbers).digest())
