"""Rewrites pools along one axis as pools of maps with one row, for TensorRT."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
_POOLS: dict[Any, Any] = {
    _ATEN.avg_pool1d.default: _ATEN.avg_pool2d.default,
    _ATEN.max_pool1d.default: _ATEN.max_pool2d.default,
}
#: The value of each setting along the new axis, by position behind the input. Later arguments are flags.
_KERNEL, _STRIDE, _PADDING, _DILATION = 1, 1, 0, 1
_ROW = -2


def write_out_lines(module: fx.GraphModule) -> int:
    """Write pools along one axis (``nn.AvgPool1d``, ``nn.MaxPool1d``) as pools of maps, in place.

    TensorRT (10 and 11) pools along two or three axes only.

    Args:
        module: of a program, with ``aten`` operators.

    Returns:
        The number of pools written.
    """
    found = [node for node in module.graph.nodes if node.target in _POOLS]
    for node in found:
        given, *settings = node.args
        rows = (_KERNEL, _STRIDE, _PADDING, *((_DILATION,) if node.target is _ATEN.max_pool1d.default else ()))
        wide: list[Any] = [_beside(row, setting) for row, setting in zip(rows, settings, strict=False)]
        with module.graph.inserting_before(node):
            laid = module.graph.call_function(_ATEN.unsqueeze.default, (given, _ROW))
            pooled = module.graph.call_function(_POOLS[node.target], (laid, *wide, *settings[len(rows) :]))
            line = module.graph.call_function(_ATEN.squeeze.dim, (pooled, _ROW))
        node.replace_all_uses_with(line)
        module.graph.erase_node(node)
    module.recompile()
    return len(found)


def _beside(row: int, setting: list[int]) -> list[int]:
    """Return a setting for both axes. An empty stride stays empty, as it is the kernel's size."""
    return [row, *setting] if setting else setting
