"""Rewrites calls that torch.ao (2.11 to 2.14) gets wrong as others that give the same numbers."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from optimize.quantization.graph.editing import replace, shape_of
from optimize.quantization.graph.nodes import called_function

_CLAMPS: Final = (torch.clamp, torch.clip, "clamp", "clip")
_BOUNDS: Final = {"min": torch.maximum, "max": torch.minimum}


def write_types(module: fx.GraphModule) -> int:
    """Write ``x.type_as(y)`` and ``x.to(y)`` as ``x.to(dtype)``, in place. They read no value of ``y``.

    torch.ao dequantizes ``y`` for the call, and an exporter drops it. The graph then has other quantizers than the
    program.

    Args:
        module: traced, with the dtypes that `note_shapes` notes.

    Returns:
        The number of calls written.
    """
    found = [node for node in module.graph.nodes if _asks_for_a_type(node)]
    for node in found:
        given, *_ = node.args
        with module.graph.inserting_before(node):
            replace(node, module.graph.call_method("to", (given, node.meta["tensor_meta"].dtype)))
    module.recompile()
    return len(found)


def _asks_for_a_type(node: fx.Node) -> bool:
    """Tell whether a node converts a tensor to the dtype of another one."""
    called = called_function(node)
    return called == "type_as" or (called == "to" and any(shape_of(other) is not None for other in node.args[1:]))


def drop_empty(module: fx.GraphModule) -> int:
    """Remove empty tensors from concatenations, in place. No int8 program can hold an empty tensor.

    vit-pytorch's ViT concatenates its own tokens. There are none if it takes the mean.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        The number of concatenations changed.
    """
    changed = 0
    for node in list(module.graph.nodes):
        if called_function(node) not in (torch.cat, torch.concat, torch.concatenate):
            continue
        parts: Any = node.args[0] if node.args else node.kwargs["tensors"]
        if isinstance(parts, fx.Node):
            continue  # the parts are pieces of one tensor
        left = [part for part in parts if 0 not in (shape_of(part) or ())]
        if not 0 < len(left) < len(parts):
            continue
        if len(left) == 1:
            replace(node, left[0])
        else:
            node.args, node.kwargs = (left, *node.args[1:]), {k: v for k, v in node.kwargs.items() if k != "tensors"}
        changed += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return changed


def write_bounds(module: fx.GraphModule) -> int:
    """Write clamps with tensors as bounds as a maximum and a minimum, in place.

    torch.ao can clamp integers to plain numbers only.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        The number of clamps written.
    """
    written = 0
    for node in list(module.graph.nodes):
        if called_function(node) not in _CLAMPS:
            continue
        given: dict[str, Any] = {**dict(zip(("input", "min", "max"), node.args, strict=False)), **node.kwargs}
        bounds = {name: given[name] for name in _BOUNDS if given.get(name) is not None}
        if all(shape_of(bound) is None for bound in bounds.values()):
            continue
        answer = given["input"]
        with module.graph.inserting_before(node):
            for name, bound in bounds.items():
                answer = module.graph.call_function(_BOUNDS[name], (answer, bound))
                answer.meta["tensor_meta"] = node.meta["tensor_meta"]
        replace(node, answer)
        written += 1
    module.recompile()
    return written
