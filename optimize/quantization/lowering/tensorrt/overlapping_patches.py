"""Rewrites maps that are summed from overlapping patches as transposed convolutions, for TensorRT."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten


def write_out_folds(module: fx.GraphModule) -> int:
    """Write sums of overlapping patches (``torch.nn.functional.fold``) as transposed convolutions, in place.

    The exporter writes them as Col2Im, which TensorRT's parser (10 and 11) does not have. The patches of each channel
    are the channels of one group. Each weight is a 1 at the value's position in a patch. The sums are the same.

    Args:
        module: of a program, with ``aten`` operators, for maps of one size.

    Returns:
        The number of sums written.
    """
    found = [node for node in module.graph.nodes if node.target is _ATEN.col2im.default]
    for number, node in enumerate(found):
        given: Any = node.args
        patches, size, kernel, dilation, padding, stride = given
        # By axis: the steps from the first patch to the last, and what they leave over at the end.
        steps, rest = zip(
            *(
                divmod(whole + 2 * around - apart * (wide - 1) - 1, step)
                for whole, wide, apart, around, step in zip(size, kernel, dilation, padding, stride, strict=True)
            ),
            strict=True,
        )
        inputs, area = patches.meta["val"].shape[-2], kernel[0] * kernel[1]
        ones = torch.eye(area).reshape(area, 1, *kernel).repeat(inputs // area, 1, 1, 1)
        module.register_buffer(f"patch_places_{number}", ones)
        with module.graph.inserting_before(node):
            weight = module.graph.get_attr(f"patch_places_{number}")
            laid = module.graph.call_function(
                _ATEN.reshape.default, (patches, [-1, inputs, *(count + 1 for count in steps)])
            )
            settings = (stride, padding, list(rest), inputs // area, dilation)
            summed = module.graph.call_function(_ATEN.conv_transpose2d.input, (laid, weight, None, *settings))
            node.replace_all_uses_with(summed)
        module.graph.erase_node(node)
    module.recompile()
    return len(found)
