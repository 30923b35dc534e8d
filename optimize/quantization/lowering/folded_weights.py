"""Stores weights of a program with explicit quantizers as integers, and removes pairs that change no integer."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.errors import PassError
from optimize.quantization.graph.editing import computed
from optimize.quantization.graph.explicit_quantizers import quantizers, quantizing
from optimize.quantization.lowering.duplicates import content
from optimize.tracing.constants import constant_value

_ATEN = torch.ops.aten

#: Operators that return their input, in eval mode.
_AS_IT_IS = (_ATEN.dropout.default, _ATEN.alias.default, _ATEN.clone.default)


def fold_weights(module: fx.GraphModule) -> None:
    """Replace quantize(weight) by the int8 tensor that torch computes, and other quantized constants by floats.

    Equal integers become one tensor. A layer that is called several times (as in CoaT) would otherwise have as many
    copies. The exporter merges them only if they are small.
    """
    folded: dict[tuple[Any, ...], str] = {}
    for index, node in enumerate(quantizers(module, "quantize_per_channel")):
        if computed(node):
            raise PassError(f"cannot fold the weight behind {node.name}: its value or scale is not a constant")
        with torch.no_grad():
            weight = constant_value(module, node)
        _replace(module, node, folded.setdefault(content(weight), f"weight_int8_{index}"), weight)
    # Torch quantizes some constants per tensor, even if they are computed from constants. Examples are the factors by
    # which ConvNeXt scales its layers (a view of them in timm), and the positions of a ViT. As rounded floats they are
    # the same numbers without a quantizer.
    for index, node in enumerate(quantizers(module, "quantize_per_tensor")):
        if computed(node):
            continue
        for number, user in enumerate(list(node.users)):
            with torch.no_grad():
                _replace(module, user, f"rounded_{index}_{number}", constant_value(module, user))
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    drop_unused_tensors(module)


def drop_doubled(module: fx.GraphModule) -> None:
    """Remove pairs that dequantize and quantize again with the same scale, which changes no integer."""
    for node in quantizers(module, "quantize_per_tensor"):
        before: Any = node.args[0]
        while isinstance(before, fx.Node) and before.target in _AS_IT_IS:
            before = before.args[0]
        if quantizing(before) == "dequantize_per_tensor" and before.args[1:6] == node.args[1:6]:
            node.replace_all_uses_with(before.args[0])
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def drop_unused_tensors(module: fx.GraphModule) -> None:
    """Delete parameters and buffers that no node reads, so that float weights are not written to the file."""
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name not in used]:
        owner, _, leaf = name.rpartition(".")
        delattr(module.get_submodule(owner), leaf)


def _replace(module: fx.GraphModule, node: fx.Node, name: str, value: torch.Tensor) -> None:
    """Replace ``node`` by the constant ``value``, as a buffer called ``name``."""
    module.register_buffer(name, value)
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(module.graph.get_attr(name))
    module.graph.erase_node(node)
