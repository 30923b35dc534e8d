"""What a node of an exported program gives, as `torch.export` notes it in ``meta["val"]``: type and shape, no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

_CLAMP = torch.ops.aten.clamp.default


def value_of(node: fx.Node) -> Any:
    """What a node gives; noted where it was written in. To be called under the mode that others were noted under."""
    if "val" not in node.meta:
        note_value(node)
    return node.meta["val"]


def note_value(node: fx.Node) -> None:
    """Note at an operator what it gives of its arguments, whatever is noted at it; under the mode of `value_of`."""
    values: Any = fx.node.map_arg((node.args, node.kwargs), value_of)
    args, kwargs = values
    assert callable(node.target)
    if (kind := _kind_of(node.target, args, kwargs)) is not None:
        node.meta["val"] = torch.empty_like(args[0], dtype=kind)
    else:
        with enable_python_dispatcher():  # else what is made of other operators counts images: `aten.pad` (torch 2.14)
            node.meta["val"] = node.target(*args, **kwargs)
    node.meta.pop("tensor_meta", None)


def _kind_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The type that a quantizer, its counterpart or a clamp of integers gives of a tensor as it is; None: another one.

    Torch writes these out in up to a dozen operators, of which each would be asked for its shape (2.14: 40 ms a clamp).
    """
    if getattr(target, "namespace", "") == "quantized_decomposed":
        name = target._schema.name.split("::")[1]
        if name in ("quantize_per_tensor", "quantize_per_channel"):
            return args[-1] if isinstance(args[-1], torch.dtype) else None
        if name in ("dequantize_per_tensor", "dequantize_per_channel"):
            return kwargs.get("out_dtype") or torch.float32
    whole = target is _CLAMP and not kwargs and not args[0].dtype.is_floating_point
    return args[0].dtype if whole and all(isinstance(bound, int | None) for bound in args[1:]) else None


def are_alike(noted: Any, found: Any) -> bool:
    """Whether two values have the same devices, types, shapes and order in memory, in the same symbols."""
    return bool(_described(noted) == _described(found))


def _described(value: Any) -> Any:
    """What is compared of a value; no size is asked for its number, which would be a condition of the program."""
    if isinstance(value, torch.Tensor):
        return value.device, value.dtype, tuple(map(_described, value.shape)), tuple(map(_described, value.stride()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value
