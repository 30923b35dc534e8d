"""Slices that take everything: left out, because an observer of their own would round the same tensor once more.

GhostNet takes of ``torch.cat([x, cheap(x)], 1)`` the first channels, of which there are as many as are wanted. OpenVINO
(2026.4.1) crashes (SIGSEGV) when it compiles a concatenation that is quantized, dequantized and quantized again.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from optimize.quantization.graph.editing import replace, shape_of


def drop_whole_slices(module: fx.GraphModule) -> int:
    """Read what is sliced where the slice is all of it, in place.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        How many slices were left out.
    """
    dropped = 0
    for node in [node for node in module.graph.nodes if node.target is operator.getitem]:
        given, which = node.args
        parts: Any = which if isinstance(which, tuple) else (which,)
        axes, shape = [part for part in parts if part is not Ellipsis], shape_of(given)
        if shape is None or shape != shape_of(node):
            continue
        # As many images as there are is not as many as the example has. An Ellipsis may stand for no axis.
        whole = not axes or axes[0] == slice(None) or (parts[0] is Ellipsis and len(axes) < len(shape))
        if whole and all(isinstance(part, slice) and part.step in (None, 1) for part in axes):
            replace(node, given)
            dropped += 1
    module.recompile()
    return dropped
