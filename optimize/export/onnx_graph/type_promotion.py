"""Makes torch's ONNX exporter promote types by the types noted at nodes, instead of computing all of them.

``torch.onnx.export`` (2.11 to 2.14) writes explicit casts, and tensors for numbers, where an operator would promote its
inputs. To know the types it runs the whole program on tensors without data, which takes a tenth of an export. The
clamps of an int8 graph, which it writes with tensors, take another tenth. The value of each node is noted at it
already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.traceback import preserve_node_meta

_CLAMP = torch.ops.aten.clamp.Tensor


@contextlib.contextmanager
def promoted_by_notes() -> Iterator[None]:
    """Let each ``torch.onnx.export`` in the block promote types by the noted values. One thread at a time."""
    from torch.onnx._internal.exporter import _fx_passes

    own = _fx_passes.insert_type_promotion_nodes

    def promote(graph_module: fx.GraphModule) -> None:
        if any("val" not in node.meta for node in graph_module.graph.nodes if node.users):
            own(graph_module)
        else:
            _promote(graph_module)

    _fx_passes.insert_type_promotion_nodes = promote
    try:
        yield
    finally:
        _fx_passes.insert_type_promotion_nodes = own


def _promote(graph_module: fx.GraphModule) -> None:
    """Write a program's promotions into its graph, as torch's own pass does by running it."""
    from torch.onnx._internal.fx.passes import type_promotion

    class Noted(type_promotion._TypePromotionInterpreter):
        """Knows the values of nodes. It runs new nodes, except clamps, whose value stays as noted."""

        def _run_node_and_set_meta(self, node: fx.Node) -> Any:
            noted = node.meta.get("val")
            given = [self.env[before] for before in node.all_input_nodes]
            if node.target is _CLAMP and noted is not None and all(part.dtype == noted.dtype for part in given):
                self.env[node] = noted
                return noted
            return super()._run_node_and_set_meta(node)

    rules = type_promotion.TypePromotionTable()
    interpreter = Noted(graph_module, rules)
    interpreter.env = {node: node.meta["val"] for node in graph_module.graph.nodes if node.users}
    mode = type_promotion.InsertTypePromotion(graph_module).fake_mode
    assert mode is not None
    with mode, enable_python_dispatcher(), preserve_node_meta():
        for node in list(graph_module.graph.nodes):
            if rule := type_promotion.get_type_promotion_rule(node, rules):
                with interpreter._set_current_node(node):
                    interpreter._maybe_promote_node(node, rule)
