"""Folds zero padding of a network into the convolution behind it.

Networks that were converted from TensorFlow have ``nn.ZeroPad2d`` or ``torch.nn.functional.pad`` in front of their
convolutions. Engines fold that in a float graph. None folds it between a dequantizer and a quantizer, and the int8
graph would be slower than the float one.

Torch's convolutions pad evenly on both sides. Uneven padding stays a pad here.
`optimize.quantization.lowering.uneven_padding` folds it into formats that support it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from optimize.tracing.naming import free_name
from optimize.tracing.trace import calls

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: Zero padding in one, two and three dimensions.
LAYERS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_ZEROS = (*LAYERS, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
#: Elementwise activations that give 0 for 0.
_KEEP_ZERO = frozenset({nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish, nn.SiLU, nn.GELU})
_KEEP_ZERO_FUNCTIONS = frozenset({functional.relu, functional.relu6, torch.relu, functional.hardswish, functional.silu})


def call_pads(module: fx.GraphModule) -> int:
    """Write zero padding that only convolutions read as layers, and other padding as function calls, in place.

    The quantizer can then tell them apart. A padding layer extends a map, and has the scale of its input.

    Args:
        module: traced.

    Returns:
        The number of layers written.
    """
    written = 0
    for node in list(module.graph.nodes):
        sides = around(module, node)
        if sides is None:
            continue
        (given,) = node.all_input_nodes
        readers = [_layer_of(module, reader) for reader in node.users]
        layers = all(
            type(reader) in _CONVOLUTIONS and of_places(sides, len(reader.kernel_size)) is not None
            for reader in readers
        )
        with module.graph.inserting_before(node):
            if layers and readers:
                name = free_name(module, f"{node.name}_zeros")
                module.add_submodule(name, _as_layer(sides, len(readers[0].kernel_size)))
                padded = module.graph.call_module(name, (given,))
                written += 1
            elif node.op == "call_module":
                padded = module.graph.call_function(functional.pad, (given, list(sides)))
            else:
                continue
        padded.meta.update(node.meta)
        node.replace_all_uses_with(padded)
        module.graph.erase_node(node)
    module.delete_all_unused_submodules()
    module.recompile()
    return written


def _layer_of(module: fx.GraphModule, node: fx.Node) -> Any:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _as_layer(sides: tuple[int, ...], axes: int) -> nn.Module:
    """Return the padding along a convolution's axes as a layer."""
    kind: Any = LAYERS[axes - 1]
    found: nn.Module = kind((*sides, *[0] * 2 * axes)[: 2 * axes])
    return found


def fold_padding(module: fx.GraphModule) -> int:
    """Turn zero padding into the padding of the convolutions that read it, in place. The sums stay the same.

    An activation between the two that gives 0 for 0 moves in front of the padding. Padding stays if another layer reads
    it, if it is around channels, or if it has another value or mode.

    Args:
        module: traced.

    Returns:
        The number of convolutions that got padding.
    """
    called = calls(module)
    for node in list(module.graph.nodes):
        _put_behind_activations(module, node)
    for node in list(module.graph.nodes):
        _put_together(module, node)
    folded = 0
    for node in list(module.graph.nodes):
        layer = _layer_of(module, node)
        if type(layer) not in _CONVOLUTIONS or called[id(layer)] != 1 or len(node.all_input_nodes) != 1:
            continue
        before, twin = node.all_input_nodes[0], None
        while (sides := _even(around(module, before), layer)) is not None:
            twin = twin or copy.copy(layer)
            twin.padding = tuple(own + more for own, more in zip(twin.padding, sides, strict=True))
            node.replace_input_with(before, before.all_input_nodes[0])
            before = node.all_input_nodes[0]
        if twin is not None:
            twin._reversed_padding_repeated_twice = [side for side in reversed(twin.padding) for _ in range(2)]
            module.set_submodule(str(node.target), twin)
            folded += 1
    if folded:
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
    module.recompile()
    return folded


def zeros_around(node: Any) -> tuple[int, ...] | None:
    """Return the zeros that ``torch.nn.functional.pad`` puts on each side, last axis first, or None for other nodes.

    It is also None if the call crops, or if the amounts are computed.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not functional.pad:
        return None
    given: dict[str, Any] = {**dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)), **node.kwargs}
    sides = given["pad"]
    if given.get("mode", "constant") != "constant" or given.get("value") not in (None, 0):
        return None
    if not isinstance(sides, tuple | list) or not all(isinstance(side, int) and side >= 0 for side in sides):
        return None
    return tuple(sides)


def around(module: fx.GraphModule, node: fx.Node) -> tuple[int, ...] | None:
    """Return the same as `zeros_around`, also for padding layers."""
    layer = _layer_of(module, node)
    if type(layer) in _ZEROS and layer.value == 0 and all(side >= 0 for side in layer.padding):
        return tuple(layer.padding)
    return zeros_around(node)


def of_places(sides: tuple[int, ...] | None, axes: int) -> tuple[tuple[int, int], ...] | None:
    """Return the zeros before and after each axis of a convolution.

    None: there are no zeros, or some are around channels.
    """
    if sides is None or not any(sides) or any(sides[2 * axes :]):
        return None
    ends = [(before, behind) for before, behind in zip(sides[::2], sides[1::2], strict=True)][:axes]
    return tuple(reversed([*ends, *[(0, 0)] * (axes - len(ends))]))


def _even(sides: tuple[int, ...] | None, layer: Any) -> tuple[int, ...] | None:
    """Return the padding that a convolution can do itself along each axis, or None if it cannot."""
    ends = of_places(sides, len(layer.kernel_size))
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if ends is None or not plain or any(before != behind for before, behind in ends):
        return None
    return tuple(before for before, _ in ends)


def _put_behind_activations(module: fx.GraphModule, node: fx.Node) -> None:
    """Move padding behind an activation that is its only reader, in place."""
    sides = around(module, node)
    while sides is not None and len(node.users) == 1:
        (reader,), (given,) = node.users, node.all_input_nodes
        if reader.all_input_nodes != [node] or not _keeps_zero(module, reader, given):
            return
        reader.replace_input_with(node, given)
        reader.replace_all_uses_with(node)
        node.replace_input_with(given, reader)
        reader.append(node)


def _put_together(module: fx.GraphModule, node: fx.Node) -> None:
    """Merge two directly nested paddings into one call, in place, if nothing else reads the inner one."""
    sides = around(module, node)
    before = node.all_input_nodes[0] if sides is not None else None
    inner = around(module, before) if before is not None and len(before.users) == 1 else None
    if sides is None or before is None or inner is None:
        return
    axes = range(max(len(sides), len(inner)))
    both = [sum(each[axis] for each in (sides, inner) if axis < len(each)) for axis in axes]
    with module.graph.inserting_before(node):
        padded = module.graph.call_function(functional.pad, (before.all_input_nodes[0], both))
    padded.meta.update(node.meta)
    node.replace_all_uses_with(padded)
    module.graph.erase_node(node)
    module.graph.erase_node(before)


def _keeps_zero(module: fx.GraphModule, node: fx.Node, given: fx.Node) -> bool:
    """Tell whether a node is an activation that gives 0 for 0.

    If it works in place, it must also be the only reader of its input.
    """
    if node.op == "call_module":
        layer: Any = module.get_submodule(str(node.target))
        found, writes = type(layer) in _KEEP_ZERO, getattr(layer, "inplace", False)
    else:
        found = node.op == "call_function" and node.target in _KEEP_ZERO_FUNCTIONS
        writes = any((*node.args[1:], *node.kwargs.values()))
    return found and (not writes or _is_alone(module, given))


def _is_alone(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node owns its tensor and has one reader. The output of a layer with weights is never a view."""
    layer = _layer_of(module, node)
    return len(node.users) == 1 and isinstance(layer, (_ConvNd, _BatchNorm))
