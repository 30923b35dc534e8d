"""Rewrites means over 1 × 1 maps, on which torch's packed kernel fails. There is nothing to compute.

Torch (2.11 to 2.14) gives the result of a quantized ``x.mean([2, 3])`` the layout of ``x``. A 1 × 1 map fits every
layout, and torch takes it for channels-last: "required rank 4 tensor to use channels_last format" for a result of rank
2. Small images end so in networks that take a mean and no pool (MNASNet, ShuffleNet).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.ao.quantization.backend_config import BackendConfig

from optimize.lint.graph import of_a_map
from optimize.quantization.graph.editing import replace, shape_of
from optimize.quantization.graph.nodes import called_function, is_watcher, remove_watcher
from optimize.quantization.placement.layer_outputs import reads_integers

_MEANS = ("mean", torch.mean)


def flatten_places(module: fx.GraphModule) -> int:
    """Replace means over maps ``(N, C, 1, 1)`` by a flatten, which gives the same, in place.

    Args:
        module: traced, with the shapes that `note_shapes` notes. Its example sets the sizes of maps.

    Returns:
        The number of means replaced.
    """
    written = 0
    for node in [node for node in module.graph.nodes if called_function(node) in _MEANS]:
        given: Any = node.args[0] if node.args else node.kwargs.get("input")
        axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        shape, after = shape_of(given), shape_of(node)
        if shape is None or after is None or len(after) != 2 or not isinstance(axes, tuple | list):
            continue
        if of_a_map(axes, len(shape)) and shape[2:] == (1, 1):
            with module.graph.inserting_before(node):
                replace(node, module.graph.call_function(torch.flatten, (given, 1)))
            written += 1
    module.recompile()
    return written


def free_means(prepared: fx.GraphModule, backend: BackendConfig) -> int:
    """Remove observers of means that no integer operator gives or reads, in place.

    FX (2.11 to 2.14) gives a mean the range of its input. For squares (a norm that is written out, a pool by a power)
    that is far more than the means reach. The network then divides by a variance of a few steps.

    Args:
        prepared: with observers or fake-quantize modules.
        backend: the backend that it was prepared for.

    Returns:
        The number of observers removed.
    """
    quantized = {config.pattern for config in backend.configs}

    def in_floats(node: Any) -> bool:
        return not is_watcher(prepared, node) and not reads_integers(prepared, node, quantized)

    freed: list[fx.Node] = []
    for node in prepared.graph.nodes:
        if called_function(node) not in _MEANS:
            continue
        given = node.args[0] if node.args else node.kwargs["input"]
        if is_watcher(prepared, given) and all(called_function(user) in _MEANS for user in given.users):
            source = given.args[0]
            freed += [given] if in_floats(source) and source.op != "placeholder" else []
        freed += [user for user in node.users if is_watcher(prepared, user) and all(map(in_floats, user.users))]
    freed = [watcher for watcher in dict.fromkeys(freed) if watcher.users]
    for watcher in freed:
        remove_watcher(prepared, watcher)
    prepared.recompile()
    return len(freed)
