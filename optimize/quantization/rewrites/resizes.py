"""Resizes that no int8 kernel knows: they stay in float, and become matrix products in a graph."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.graph.editing import shape_of
from optimize.quantization.graph.nodes import called_function, called_module
from optimize.quantization.placement.float_calls import InFloat, call_in_float

_ATEN = torch.ops.aten
_RESIZES = (functional.interpolate, functional.upsample)
#: Input ranks of torch's int8 resize kernels (2.11 to 2.14), by mode. None of them antialiases.
_KERNELS = {"nearest": (4, 5), "nearest-exact": (4, 5), "bilinear": (4,), "area": (3, 4, 5)}
#: Cubic or antialiased resizes.
_AS_PRODUCTS = frozenset({
    _ATEN.upsample_bicubic2d.vec,
    _ATEN._upsample_bicubic2d_aa.vec,
    _ATEN._upsample_bilinear2d_aa.vec,
})  # fmt: skip


def free_resizes(module: fx.GraphModule) -> int:
    """Keep resizes in float for which torch has no int8 kernel, in place.

    torch.ao (2.11 to 2.14) gives every resize the range of its input, which a cubic curve overshoots.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        The number of resizes kept in float.
    """
    freed = 0
    for node in list(module.graph.nodes):
        layer = called_module(module, node)
        if isinstance(layer, nn.Upsample):
            mode, blurred = layer.mode, False
        elif called_function(node) in _RESIZES:
            given = inspect.signature(functional.interpolate).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            mode, blurred = given.arguments["mode"], given.arguments["antialias"]
        else:
            continue
        if not blurred and len(shape_of(node) or ()) in _KERNELS.get(mode, ()):
            continue
        if layer is None:
            call_in_float(module, node)
        else:
            module.set_submodule(str(node.target), InFloat(layer.forward))
        freed += 1
    module.recompile()
    return freed


def write_out_resizes(module: fx.GraphModule) -> int:
    """Write cubic and antialiased resizes as two matrix products with constants, for rows and columns, in place.

    TensorRT (10 and 11) accepts neither. Behind an int8 convolution ONNX Runtime (1.31) runs a cubic resize with
    channels last, and its own kernel then refuses to make a map smaller. A resize is linear and scales each axis alone.
    So one column of its matrix is the result for a 1 among zeros. Only the order of the sums differs from the
    operator's.

    Args:
        module: of a program, with ``aten`` operators, for maps of one size.

    Returns:
        The number of resizes written.
    """
    found = [node for node in module.graph.nodes if node.target in _AS_PRODUCTS]
    for number, node in enumerate(found):
        images: Any = node.args[0]
        rows, columns = (_matrix(node, axis, images.meta["val"].shape[axis]) for axis in (-2, -1))
        for name, matrix in ((f"scaled_rows_{number}", rows), (f"scaled_columns_{number}", columns.T.contiguous())):
            module.register_buffer(name, matrix)
        with module.graph.inserting_before(node):
            scaled = module.graph.get_attr(f"scaled_rows_{number}"), images
            for_columns = module.graph.call_function(_ATEN.matmul.default, scaled)
            factors = for_columns, module.graph.get_attr(f"scaled_columns_{number}")
            node.replace_all_uses_with(module.graph.call_function(_ATEN.matmul.default, factors))
        module.graph.erase_node(node)
    module.recompile()
    return len(found)


def _matrix(node: fx.Node, axis: int, size: int) -> torch.Tensor:
    """Return the matrix of a resize along an axis with ``size`` values: ``float32 (scaled size, size)``."""
    _, _, corners, factors = (*node.args, *[None] * 4)[:4]
    wanted = [int(node.meta["val"].shape[axis]), size]  # the other axis numbers the unit vectors and keeps its size
    factor = [factors[axis], 1.0] if isinstance(factors, list | tuple) else None
    assert callable(node.target)
    matrix: torch.Tensor = node.target(torch.eye(size)[None, None], None if factor else wanted, corners, factor)
    return matrix[0, 0]
