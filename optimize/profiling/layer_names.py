"""Names the layers of an artifact: an int8 program has lost the names of its float module's program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from optimize.export.macs import program_work
from serve.runtime.model_files.program_file import load_program


def layer_name(node: fx.Node) -> str:
    """Return the path of the module that a node comes from, or the node's own name if there is none."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    if path:
        return path
    weights = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    return next((name.removesuffix(".weight") for name in weights if name.endswith(".weight")), node.name)


def float_layers(program: Path, batch: int, shape: Sequence[int]) -> list[tuple[str, int]]:
    """Return names and MACs of the computing layers of a float program, in order.

    Args:
        program: a ``.pt2`` file.
        batch: the number of images in one batch.
        shape: shape of one image, ``(C, H, W)``.
    """
    module: Any = load_program(program).module()
    work = program_work(module, torch.zeros(batch, *shape))
    return [(layer_name(node), work[node.name].macs) for node in module.graph.nodes if _computes(work, node)]


def _computes(work: dict[str, Any], node: fx.Node) -> bool:
    return node.name in work and work[node.name].macs > 0


def called(own: Sequence[int], known: Sequence[tuple[str, int]]) -> list[str] | None:
    """Return names for layers with these MACs if the known ones have the same MACs in the same order, else None.

    Args:
        own: MACs of each layer, in order.
        known: names and MACs of the same network's layers, in order.
    """
    return [name for name, _ in known] if known and [macs for _, macs in known] == list(own) else None
