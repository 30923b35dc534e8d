"""Convolutions of wide patches that do not overlap, written as the products that they are: their kernels are wrong.

oneDNN's int8 and bfloat16 convolutions for AMX (as of torch 2.14, and in OpenVINO 2026) give numbers of no use where
channels times a row of the kernel are 128 or more and a multiple of 64, of fewer than 64 channels: 32 by 4 x 4, or 16
by 8 x 8. They take several pixels for one with more channels; oneDNN has turned that off for AArch64, where it was
wrong as well (uxlfoundation/oneDNN, pull request 4684). Transformers reduce keys and values by such layers (PVT v2,
SegFormer). What steps by less than its kernel (16 channels by 8 x 8 in steps of 4) is left: whether int8 answers are
right is checked anyhow.
"""

from __future__ import annotations

import math
from typing import Final

from torch import fx, nn

from optimize.quantization.graph.editing import Writer, shape_of

# Seen wrong from 8 to 56 channels, and from a width of 4 on. Images of 3 or 4 channels are right.
_FEW: Final = range(5, 64)
_WIDE: Final = 4
_LONG: Final = 128
_AT_ONCE: Final = 64


def unfold_patches(module: fx.GraphModule) -> int:
    """Let wide convolutions that step from patch to patch read each patch as one place, in place: the same products.

    Args:
        module: traced, with the shapes that `note_shapes` notes; each layer is called once.

    Returns:
        Of how many layers.
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
    """Whether a convolution has so many channels, and its kernel's rows so many places, that kernels for AMX err.

    Of steps from patch to patch that is known; a kernel that is made wider for another's sake is not to become one.
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
