"""What is computed alike several times, made one: the exporter does it, and the count of quantizers would be off."""

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

#: Operators that read their input and are not asked for anything else, beside those that only move numbers.
_READING = frozenset(
    {_ATEN.expand.default, _ATEN.repeat.default, _ATEN.repeat_interleave.self_int}
    | {_ATEN.select.int, _ATEN.slice.Tensor, _ATEN.sym_size.int}
    | {_ATEN.unbind.int, operator.getitem}
)
#: Operators that give what they are given where it is that already, or a tensor of its own.
_MADE_TO_BE = frozenset({_ATEN.to.device, _ATEN.to.dtype, _ATEN.to.other, _ATEN.to.dtype_layout})
#: Operators that give a tensor in pieces along an axis, their third argument.
_IN_PIECES = frozenset(
    {
        *(_ATEN.chunk.default, _ATEN.split.Tensor, _ATEN.split_with_sizes.default),
        *(_ATEN.tensor_split.sections, _ATEN.tensor_split.indices),
    }
)


def merge_alike(module: fx.GraphModule) -> None:
    """Compute and quantize once what is computed and quantized alike several times, as the exporter does.

    GCViT's blocks all read one query, and each moves and scales it for itself; ConViT's have the same places each, as
    constants; DLA's trees pool one map on two levels. Pieces are alike by their sizes, however they were asked for.
    """
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and node.users and not _written(node):
            key = content(constant_value(module, node))
        elif node.target in _IN_PIECES:
            key = _pieces(node)
        elif _only_moves(node) or quantizing(node) or _computes(node):
            key = (node.target, repr((node.args, sorted(node.kwargs.items()))))  # to which 1, 1.0 and True differ
        else:
            continue
        first = known.get(key)
        if first is None or any(_changes(given, first, node) for given in node.all_input_nodes):
            known[key] = node
        else:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    for node in reversed(module.graph.nodes):
        # A dropout gives the very tensor that it is given: exported again, who reads that one would read the dropout.
        if not node.users and _only_moves(node):
            module.graph.erase_node(node)
    module.recompile()


def _pieces(node: fx.Node) -> tuple[Any, ...]:
    """What a tensor is in pieces of, where, and how large each is."""
    pieces: list[torch.Tensor] = node.meta["val"]
    axis: int = dict(enumerate(node.args)).get(2, node.kwargs.get("dim", 0))  # type: ignore[assignment]
    return ("pieces", node.args[0], axis % pieces[0].ndim, tuple(str(piece.shape[axis]) for piece in pieces))


def _only_moves(node: fx.Node) -> bool:
    return node.target in MOVES or node.target in _READING or node.target in _IN_PIECES


def _computes(node: fx.Node) -> bool:
    """Whether it gives a tensor of its own, by its inputs alone, that nobody writes into."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and (not _aliases(node) or target in _MADE_TO_BE)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not _written(node)
    )


def write_aside(module: fx.GraphModule) -> int:
    """Write what operators write into tensors that nobody reads afterwards as new tensors, in place.

    A ``relu_`` is a ``relu`` then: for all who look for one, and for `merge_alike`.

    Args:
        module: a program's, of ``aten`` operators.

    Returns:
        How many.
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
    """Whether it may give a part of what it is given."""
    return not isinstance(node.target, torch._ops.OpOverload) or _aliases(node)


def _written(node: fx.Node) -> bool:
    """Whether somebody changes a tensor where it lies, or by a view of it (a program has its ``relu_`` still)."""
    return any(_writers(node))


def _writers(node: fx.Node) -> Iterator[fx.Node]:
    """Who changes a tensor where it lies, or by a view of it."""
    for user in node.users:
        if isinstance(user.target, torch._ops.OpOverload):
            if user.target._schema.is_mutable:
                yield user
            if _aliases(user):
                yield from _writers(user)


def _changes(node: fx.Node, first: fx.Node, last: fx.Node) -> bool:
    """Whether somebody changes what a node gives, or what that is a view of, between two who read it."""
    while isinstance(node.target, torch._ops.OpOverload) and _aliases(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return any(first < writer < last for writer in _writers(node))


def _aliases(node: fx.Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    return any(returned.alias_info is not None for returned in node.target._schema.returns)


def content(constant: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors that are the same have in common."""
    numbers = constant.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return (type(constant), constant.dtype, tuple(constant.shape), hashlib.sha256(numbers).digest())
