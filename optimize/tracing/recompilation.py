"""Recompiles a graph once after many rewrites, and not after each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx


@contextlib.contextmanager
def recompiled_once(graph: object) -> Iterator[None]:
    """Put off the recompilation of a graph to the end of the block.

    Each rewrite recompiles the graph, so that it is whole if it runs alone. In a table of rewrites, nobody runs the
    code between them, and writing it took a fifth of the time to lower a network. A call of the graph within the block
    recompiles it first.

    Args:
        graph: a graph module, or a program that has one. Anything else is left alone.
    """
    module = getattr(graph, "graph_module", graph)
    if not isinstance(module, fx.GraphModule) or "recompile" in vars(module):
        yield
        return
    kind: Any = type(module)  # each graph module has a class of its own, with its code

    def put_off() -> None:
        kind.forward = recompiled_first

    def recompiled_first(self: fx.GraphModule, *args: Any, **options: Any) -> Any:
        kind.recompile(self)
        return self.forward(*args, **options)

    vars(module)["recompile"] = put_off
    try:
        yield
    finally:
        del vars(module)["recompile"]
        if kind.forward is recompiled_first:
            module.recompile()
