"""Removes slices that select everything. An observer behind one would round the same tensor once more.

GhostNet takes the first channels of ``torch.cat([x, cheap(x)], 1)``, which may be all of them. OpenVINO (2026.4.1)
crashes (SIGSEGV) when it compiles a concatenation that is quantized, dequantized and quantized again.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from optimize.quantization.graph.editing import replace, shape_of


def drop_whole_slices(module: fx.GraphModule) -> int:
    """Make readers of a slice that selects everything read its input, in place.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        The number of slices removed.
    """
    dropped = 0
    for node in [node for node in module.graph.nodes if node.target is operator.getitem]:
        given, which = node.args
        parts: Any = which if isinstance(which, tuple) else (which,)
        axes, shape = [part for part in parts if part is not Ellipsis], shape_of(given)
        if shape is None or shape != shape_of(node):
            continue
        # A slice of the batch axis is never whole by its size, because the batch may differ from the example's. An
        # Ellipsis may stand for no axis.
        whole = not axes or axes[0] == slice(None) or (parts[0] is Ellipsis and len(axes) < len(shape))
        if whole and all(isinstance(part, slice) and part.step in (None, 1) for part in axes):
            replace(node, given)
            dropped += 1
    module.recompile()
    return dropped
