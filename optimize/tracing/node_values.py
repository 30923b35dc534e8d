"""The value of a node of an exported program: type and shape, no data. `torch.export` notes it in ``meta["val"]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

_CLAMP = torch.ops.aten.clamp.default


def value_of(node: fx.Node) -> Any:
    """Return the value of a node, and note it first if the node is new.

    Call it under the fake mode in which the values of the other nodes were noted.
    """
    if "val" not in node.meta:
        note_value(node)
    return node.meta["val"]


def note_value(node: fx.Node) -> None:
    """Compute the value of an operator from its arguments and note it, replacing an older note.

    Call it under the mode of `value_of`.
    """
    values: Any = fx.node.map_arg((node.args, node.kwargs), value_of)
    args, kwargs = values
    assert callable(node.target)
    if (kind := _kind_of(node.target, args, kwargs)) is not None:
        node.meta["val"] = torch.empty_like(args[0], dtype=kind)
    else:
        with enable_python_dispatcher():  # without it `aten.pad` and others fix the batch (torch 2.14)
            node.meta["val"] = node.target(*args, **kwargs)
    node.meta.pop("tensor_meta", None)


def _kind_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that a quantizer, a dequantizer or an integer clamp gives, or None for other operators.

    These operators keep the shape. Torch decomposes them into up to a dozen operators and would compute the shape of
    each (2.14: 40 ms a clamp).
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
    """Tell whether two values have the same devices, dtypes, shapes and strides, in the same symbols."""
    return bool(_described(noted) == _described(found))


def _described(value: Any) -> Any:
    """Return the comparable parts of a value.

    No symbolic size is evaluated, as that would add a condition to the program.
    """
    if isinstance(value, torch.Tensor):
        return value.device, value.dtype, tuple(map(_described, value.shape)), tuple(map(_described, value.stride()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value
