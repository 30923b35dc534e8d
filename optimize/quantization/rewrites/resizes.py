"""Maps that are scaled in ways that no int8 kernel knows: in float, and in a graph as the products that they are."""

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
#: Ranks of what torch's int8 kernels (2.11 to 2.14) scale, by mode; none of them blurs before (``antialias``).
_KERNELS = {"nearest": (4, 5), "nearest-exact": (4, 5), "bilinear": (4,), "area": (3, 4, 5)}
#: By cubic curves, or blurred before.
_AS_PRODUCTS = frozenset({
    _ATEN.upsample_bicubic2d.vec,
    _ATEN._upsample_bicubic2d_aa.vec,
    _ATEN._upsample_bilinear2d_aa.vec,
})  # fmt: skip


def free_resizes(module: fx.GraphModule) -> int:
    """Let those resizes stay in float that torch has no int8 kernel for, in place.

    torch.ao (2.11 to 2.14) gives all of them the range of what they scale, which a cubic curve overshoots.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        How many.
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
    """Write resizes by cubic curves, and blurred ones, as two products with constants, of rows and columns, in place.

    TensorRT (10 and 11) takes neither, and behind an int8 convolution ONNX Runtime (1.31) asks a cubic one with the
    channels last, in which its own kernel refuses to make a map smaller. Each scales along both axes by itself and is
    linear, so that one column of its matrix is what it makes of a 1 among zeros. The sums have another order than the
    operator's, and nothing else differs.

    Args:
        module: a program's, of ``aten`` operators, for maps of one size.

    Returns:
        How many there were.
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
    """What a resize multiplies ``size`` numbers along an axis with: ``float32 (scaled size, size)``."""
    _, _, corners, factors = (*node.args, *[None] * 4)[:4]
    wanted = [int(node.meta["val"].shape[axis]), size]  # the other axis numbers the ones, and stays as it is
    factor = [factors[axis], 1.0] if isinstance(factors, list | tuple) else None
    assert callable(node.target)
    matrix: torch.Tensor = node.target(torch.eye(size)[None, None], None if factor else wanted, corners, factor)
    return matrix[0, 0]
