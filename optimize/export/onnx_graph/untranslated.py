"""Rewrites operators that torch's exporter (2.11 to 2.14) cannot translate as operators that it can.

It can translate a quantile, but with copies for the number of images. See `optimize.export.onnx_graph.engine_rewrites`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from optimize.export.onnx_graph.engine_rewrites import put_for

_ATEN = torch.ops.aten


def write_out_untranslated(module: fx.GraphModule) -> None:
    """Write these operators out in place, if their size along the axis does not depend on the batch."""
    for node in list(module.graph.nodes):
        if (write := _WAYS.get(node.target)) is not None:
            with module.graph.inserting_before(node):
                write(module.graph, node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _given(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by name, with their defaults."""
    arguments: Any = node.target._schema.arguments  # type: ignore[union-attr]
    said = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    return {argument.name: argument.default_value for argument in arguments} | said


def _write_hypotenuse(graph: fx.Graph, node: fx.Node) -> None:
    """Write it as the larger side times the root of 1 plus the squared ratio of the sides. No square overflows."""
    sides = [graph.call_function(_ATEN.abs.default, (side,)) for side in node.args]
    larger, smaller = (graph.call_function(way.default, tuple(sides)) for way in (_ATEN.maximum, _ATEN.minimum))
    divisor = graph.call_function(_ATEN.clamp.default, (larger, torch.finfo(node.meta["val"].dtype).tiny))
    share = graph.call_function(_ATEN.div.Tensor, (smaller, divisor))
    square = graph.call_function(_ATEN.mul.Tensor, (share, share))
    root = graph.call_function(_ATEN.sqrt.default, (graph.call_function(_ATEN.add.Tensor, (square, 1.0)),))
    put_for(graph.call_function(_ATEN.mul.Tensor, (larger, root)), node)


def _write_products(graph: fx.Graph, node: fx.Node) -> None:
    """Multiply each place by the one before it, then by the one two before, four and so on.

    This takes one step for each bit of the size.
    """
    given = _given(node)
    product, axis = given["self"], given["dim"]
    size = product.meta["val"].shape[axis]
    if given["dtype"] is not None or not isinstance(size, int):
        return
    step = 1
    while step < size:
        first, left, right = (
            graph.call_function(_ATEN.slice.Tensor, (product, axis, *ends))
            for ends in ((0, step), (step, size), (0, size - step))
        )
        behind = graph.call_function(_ATEN.mul.Tensor, (left, right))
        product = graph.call_function(_ATEN.cat.default, ([first, behind], axis))
        step *= 2
    put_for(graph.call_function(_ATEN.clone.default, (product,)) if size < 2 else product, node)


def _write_smallest(graph: fx.Graph, node: fx.Node) -> None:
    """Take the largest of the k smallest. With an even count torch's median is the lower of the two middle values."""
    given = _given(node)
    size = given["self"].meta["val"].shape[given["dim"]]
    readers = [reader for reader in node.users if reader.users]
    if not isinstance(size, int) or any(reader.args[1] != 0 for reader in readers):
        return  # it returns an index, and among equal values any may be meant
    found = _smallest(graph, given, given.get("k", (size + 1) // 2))
    for reader in readers:
        put_for(found, reader)


def _smallest(graph: fx.Graph, given: dict[str, Any], count: int) -> fx.Node:
    """Return the ``count``-th smallest value along an axis, which is kept or not."""
    axis = given["dim"]
    smallest = graph.call_function(_ATEN.topk.default, (given["self"], count, axis, False))
    values = graph.call_function(operator.getitem, (smallest, 0))
    if given["keepdim"]:
        return graph.call_function(_ATEN.slice.Tensor, (values, axis, count - 1, count))
    return graph.call_function(_ATEN.select.int, (values, axis, count - 1))


def _write_quantile(graph: fx.Graph, node: fx.Node) -> None:
    """Interpolate between the two neighbouring values in sorted order."""
    given = _given(node)
    size = None if given["dim"] is None else given["self"].meta["val"].shape[given["dim"]]
    if not isinstance(size, int) or given["interpolation"] not in _BETWEEN:
        return
    place = given["q"] * (size - 1)
    below, above = (_smallest(graph, given, rounded(place) + 1) for rounded in (math.floor, math.ceil))
    share = _BETWEEN[given["interpolation"]](place - math.floor(place))
    step = graph.call_function(_ATEN.mul.Tensor, (graph.call_function(_ATEN.sub.Tensor, (above, below)), share))
    put_for(graph.call_function(_ATEN.add.Tensor, (below, step)), node)


#: Position of a quantile between the value below and the value above it, by torch's interpolation modes.
_BETWEEN: Final[dict[str, Callable[[float], float]]] = {
    "linear": lambda share: share,
    "lower": lambda share: 0.0,
    "higher": lambda share: 1.0,
    "midpoint": lambda share: 0.5,
}


_WAYS: Final[dict[Any, Callable[[fx.Graph, fx.Node], None]]] = {
    _ATEN.hypot.default: _write_hypotenuse,
    _ATEN.cumprod.default: _write_products,
    _ATEN.median.dim: _write_smallest,
    _ATEN.kthvalue.default: _write_smallest,
    _ATEN.quantile.scalar: _write_quantile,
}
