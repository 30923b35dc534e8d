"""Writes convolutions of wide patches that do not overlap as matrix products, because their AMX kernels are wrong.

oneDNN's int8 and bfloat16 convolutions for AMX (as of torch 2.14, and in OpenVINO 2026) give useless numbers for some
shapes. The layer has fewer than 64 channels, and channels times kernel width are 128 or more and a multiple of 64.
Examples are 32 channels by 4 x 4, and 16 by 8 x 8. The kernels treat several pixels as one with more channels. oneDNN
turned that off for AArch64, where it was wrong as well (uxlfoundation/oneDNN, pull request 4684). Transformers reduce
keys and values with such layers (PVT v2, SegFormer). Convolutions whose stride is less than their kernel (16 channels
by 8 x 8 with stride 4) stay unchanged. A later check tells whether int8 answers are right.
"""

from __future__ import annotations

import math
from typing import Final

from torch import fx, nn

from optimize.quantization.graph.editing import Writer, shape_of

# Seen wrong from 8 to 56 channels, and from a width of 4 on. Images with 3 or 4 channels are right.
_FEW: Final = range(5, 64)
_WIDE: Final = 4
_LONG: Final = 128
_AT_ONCE: Final = 64


def unfold_patches(module: fx.GraphModule) -> int:
    """Make wide convolutions without overlap read each patch as one place, in place. The products are the same.

    Args:
        module: traced, with the shapes that `note_shapes` notes. Each layer is called once.

    Returns:
        The number of layers changed.
    """
    found = [node for node in module.graph.nodes if node.op == "call_module" and _reads_patches(module, node)]
    for node in found:
        layer = module.get_submodule(str(node.target))
        assert isinstance(layer, nn.Conv2d)
        given, *_ = node.args
        shape = shape_of(given)
        assert isinstance(given, fx.Node)
        assert shape is not None
        _, channels, height, width = shape
        (tall, wide), places = layer.kernel_size, channels * math.prod(layer.kernel_size)
        write = Writer(module, str(node.target))
        with module.graph.inserting_before(node):
            patches = write.method("reshape", given, (-1, channels, height // tall, tall, width // wide, wide))
            patches = write.method("permute", patches, (0, 1, 3, 5, 2, 4))
            patches = write.method("reshape", patches, (-1, places, height // tall, width // wide))
        node.replace_input_with(given, patches)
        layer.weight = nn.Parameter(layer.weight.detach().reshape(layer.out_channels, places, 1, 1))
        layer.in_channels, layer.kernel_size, layer.stride = places, (1, 1), (1, 1)
    if found:
        module.recompile()
    return len(found)


def is_misread(channels: int, width: int, groups: int) -> bool:
    """Tell whether AMX kernels are wrong for a convolution with these channels and this kernel width.

    This is known for convolutions without overlap. A kernel that is widened for another reason must not become one.
    """
    row = channels * width
    return groups == 1 and channels in _FEW and row >= _LONG and row % _AT_ONCE == 0


def _reads_patches(module: fx.GraphModule, node: fx.Node) -> bool:
    layer = module.get_submodule(str(node.target))
    shape = shape_of(node.args[0]) if node.args else None
    return (
        type(layer) is nn.Conv2d
        and shape is not None
        and len(shape) == 4
        and layer.in_channels in _FEW
        and layer.kernel_size[1] >= _WIDE
        and layer.kernel_size == layer.stride
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding in ((0, 0), "valid")
        and not any(side % step for side, step in zip(shape[2:], layer.stride, strict=True))
    )
