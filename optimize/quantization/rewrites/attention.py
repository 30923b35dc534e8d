"""Writes attention out as layers and products that torch.ao can quantize.

torch.ao (2.11 to 2.14) quantizes linear layers and ``torch.matmul``. It sees neither in `nn.MultiheadAttention`, in
torchvision's `shifted_window_attention`, in ``scaled_dot_product_attention``, in ``@`` and in ``einsum``. Each is a
single call for it, and stays in float with all its weights, a third of a ViT's. Written out, the projections are linear
layers and both products are ``torch.matmul``. Query, key and value have one linear layer each, because their ranges
differ.

The scores between the products, and their softmax, stay in float. See `free_scores`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torchvision.models.swin_transformer import shifted_window_attention

from optimize.quantization.graph.editing import Writer, computed, fold_constants, replace, scaled, shape_of
from optimize.quantization.rewrites.window_attention import window_name, write_window
from optimize.tracing.trace import note_shapes

_PRODUCTS = (operator.matmul, torch.bmm, "matmul", "bmm", "__matmul__")
_DOT_PRODUCT = functional.scaled_dot_product_attention


def write_out_attention(
    module: fx.GraphModule, example: torch.Tensor, in_float: Callable[[str], bool] = lambda name: False
) -> int:
    """Replace attention by linear layers, products and a softmax that compute the same, in place.

    These stay unchanged: `nn.MultiheadAttention` with a mask, ``scaled_dot_product_attention`` with a boolean mask,
    causal attention, and attention that returns its weights.

    Args:
        module: traced in eval mode.
        example: ``float32 (N, C, H, W)``. It gives the sizes of windows and of sequences. N stays free.
        in_float: tells by name whether an attention stays unchanged.

    Returns:
        The number of calls replaced.
    """
    found = [node for node in module.graph.nodes if _kind(module, node) is not None]
    if not found:
        return 0
    note_shapes(module, example)
    written = 0
    for node in found:
        kind = _kind(module, node)
        assert kind is not None
        if not in_float(_called(node)):
            with torch.no_grad(), module.graph.inserting_before(node):
                written += kind(module, node)
    fold_constants(module)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.graph.lint()
    module.recompile()
    module.train(module.training)  # also for the new layers
    return written


def _kind(module: fx.GraphModule, node: fx.Node) -> Callable[[fx.GraphModule, fx.Node], bool] | None:
    """Return the function that writes out this node, if it is attention."""
    if node.op == "call_module":
        return _multi_head if type(module.get_submodule(str(node.target))) is nn.MultiheadAttention else None
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target is shifted_window_attention:
        return write_window
    if node.target is _DOT_PRODUCT:
        return _dot_product
    if node.target is torch.einsum:
        return _einsum
    return _product if node.target in _PRODUCTS else None


def _called(node: fx.Node) -> str:
    """Return the attention's name, if it has its own layers and the graph tells it."""
    if node.op == "call_module":
        return str(node.target)
    return window_name(node) if node.target is shifted_window_attention else ""


def _multi_head(module: fx.GraphModule, node: fx.Node) -> bool:
    """Write out `nn.MultiheadAttention` (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2)."""
    layer = module.get_submodule(str(node.target))
    assert isinstance(layer, nn.MultiheadAttention)
    given = inspect.signature(layer.forward).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    asked = given.arguments
    plain = asked["key_padding_mask"] is None and asked["attn_mask"] is None and not asked["is_causal"]
    only_answer = all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users)
    inputs = [asked[name] for name in ("query", "key", "value")]
    shapes = [shape for read in inputs if (shape := shape_of(read)) is not None and len(shape) == 3]
    if not (plain and only_answer) or len(shapes) < 3 or layer.bias_k is not None or layer.add_zero_attn:
        return False
    write = Writer(module, str(node.target))
    if not layer.batch_first:
        inputs = [write.method("transpose", read, 0, 1) for read in inputs]
    lengths = [shape[1 if layer.batch_first else 0] for shape in shapes]
    if layer._qkv_same_embed_dim:
        weights: Sequence[torch.Tensor] = layer.in_proj_weight.chunk(3)
    else:
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    biases = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    scale = layer.head_dim**-0.5
    projected = [
        write.linear("query", inputs[0], weights[0] * scale, scaled(biases[0], scale)),
        write.linear("key", inputs[1], weights[1], biases[1]),
        write.linear("value", inputs[2], weights[2], biases[2]),
    ]
    query, key, value = (
        write.method("reshape", part, -1, length, layer.num_heads, layer.head_dim)
        for part, length in zip(projected, lengths, strict=True)
    )
    scores = write.function(
        torch.matmul, write.method("permute", query, 0, 2, 1, 3), write.method("permute", key, 0, 2, 3, 1)
    )
    share = write.softmax(scores, layer.dropout)
    mixed = write.function(torch.matmul, share, write.method("permute", value, 0, 2, 1, 3))
    mixed = write.method("reshape", write.method("permute", mixed, 0, 2, 1, 3), -1, lengths[0], layer.embed_dim)
    answer = write.linear("out_proj", mixed, layer.out_proj.weight, layer.out_proj.bias)
    if not layer.batch_first:
        answer = write.method("transpose", answer, 0, 1)
    for user in list(node.users):
        replace(user, answer)
    module.graph.erase_node(node)
    return True


def _dot_product(module: fx.GraphModule, node: fx.Node) -> bool:
    """Write out ``scaled_dot_product_attention``, as timm and users call it."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    asked: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    asked |= dict(zip(names, node.args, strict=False)) | node.kwargs
    shape, mask = shape_of(asked["query"]), asked["attn_mask"]
    in_bits = mask is not None and (not isinstance(mask, fx.Node) or mask.meta["tensor_meta"].dtype == torch.bool)
    if shape is None or asked["is_causal"] or asked.get("enable_gqa") or in_bits or asked["dropout_p"]:
        return False
    write = Writer(module, "")
    scores = write.function(torch.matmul, asked["query"], write.method("transpose", asked["key"], -2, -1))
    scale = asked["scale"] if asked["scale"] is not None else shape[-1] ** -0.5
    scores = write.function(operator.mul, scores, scale)
    if mask is not None:
        scores = write.function(operator.add, scores, mask)
    answer = write.function(torch.matmul, write.softmax(scores), asked["value"])
    replace(node, answer)
    return True


def _product(module: fx.GraphModule, node: fx.Node) -> bool:
    """Write a product of two computed tensors as ``matmul``. Products with a constant stay unchanged."""
    if node.kwargs or not all(computed(factor) for factor in node.args):
        return False
    replace(node, module.graph.call_function(torch.matmul, node.args))
    return True


def _einsum(module: fx.GraphModule, node: fx.Node) -> bool:
    """Write an ``einsum`` as ``matmul`` if it is a matrix product, with or without leading batch axes."""
    equation, *factors = node.args
    if len(factors) == 1 and isinstance(factors[0], tuple | list):
        factors = list(factors[0])
    left, _, result = str(equation).replace(" ", "").partition("->")
    if len(factors) != 2 or not all(computed(factor) for factor in factors) or left.count(",") != 1:
        return False
    first, second = left.split(",")
    batch, ends = result[:-2], result[-2:]
    if first[:-2] != batch or second[:-2] != batch or "." in left or len(ends) != 2:
        return False
    summed = set(first[-2:]) & set(second[-2:])
    if len(summed) != 1 or {*first[-2:], *second[-2:]} - summed != set(ends):
        return False
    (common,) = summed
    write = Writer(module, "")
    if ends[0] in second[-2:]:
        (first, second), factors = (second, first), factors[::-1]
    if first[-1] != common:
        factors[0] = write.method("transpose", factors[0], -2, -1)
    if second[-2] != common:
        factors[1] = write.method("transpose", factors[1], -2, -1)
    replace(node, write.function(torch.matmul, *factors))
    return True
