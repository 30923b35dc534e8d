"""Rewrites reads of a tuple of pieces as reads of each piece.

The pieces of ``torch.cat(x.chunk(2, 1)[::-1], 1)`` never are tensors of the traced graph. torch.ao (2.11 to 2.14) puts
an observer on the tuple, and it fails.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_IN_PIECES = frozenset(
    {
        *(torch.chunk, torch.split, torch.unbind, torch.tensor_split, torch.functional.split),
        *("chunk", "split", "unbind", "tensor_split"),
    }
)


def take_pieces(module: fx.GraphModule) -> int:
    """Make readers of all or several pieces of a tensor read the pieces one by one, in place.

    Args:
        module: traced, with the shapes of its nodes for an example.

    Returns:
        The number of split tensors changed.
    """
    found = 0
    for node in list(module.graph.nodes):
        if node.op in ("call_function", "call_method") and node.target in _IN_PIECES:
            found += _write_out(module.graph, node)
    module.recompile()
    return found


def _write_out(graph: fx.Graph, node: fx.Node) -> bool:
    """Write out the pieces of a node, and tell whether anything read several of them at once."""
    slices: dict[fx.Node, Any] = {user: user.args[1] for user in node.users if _is_slice(user)}
    whole = [user for user in node.users if user.target is not operator.getitem or user in slices]
    if not whole:
        return False
    pieces: list[Any] = []
    with graph.inserting_after(node):
        for number in reversed(range(len(node.meta["tensor_meta"]))):
            piece = graph.call_function(operator.getitem, (node, number))
            piece.meta["tensor_meta"] = node.meta["tensor_meta"][number]
            pieces.insert(0, piece)
    for user in whole:
        _replace(user, node, pieces)
    for user, part in slices.items():
        for reader in list(user.users):
            _replace(reader, user, pieces[part])
        graph.erase_node(user)
    for piece in pieces:
        if not piece.users:
            graph.erase_node(piece)
    return True


def _replace(reader: fx.Node, whole: fx.Node, pieces: list[fx.Node]) -> None:
    """Make a node read the pieces in the place of their tuple."""
    given = (reader.args, reader.kwargs)
    reader.args, reader.kwargs = fx.map_arg(given, lambda each: tuple(pieces) if each is whole else each)


def _is_slice(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], slice)
