"""Writes functional convolutions and linear layers as modules, and unsupported padding as separate pads.

torch.ao (2.11 to 2.14) packs a functional convolution only if all its arguments are positional tuples. ``conv2d(x,
weight, padding=1)`` fails. Its quantized layers refuse "same" and "valid". Its packed layers only know reflection. Its
reference layers, from which graphs are made, pad with zeros whatever ``padding_mode`` says.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from optimize.errors import NotApplicableError
from optimize.quantization.graph.editing import computed, replace
from optimize.quantization.graph.nodes import called_module
from optimize.quantization.placement.between_layers import before_layers, learned
from optimize.quantization.placement.float_calls import call_in_float
from optimize.tracing.constants import constant_value
from optimize.tracing.naming import free_name

_CONVOLUTIONS: dict[Any, Any] = {
    functional.conv1d: nn.Conv1d,
    functional.conv2d: nn.Conv2d,
    functional.conv3d: nn.Conv3d,
}
_TRANSPOSED: tuple[Any, ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(_CONVOLUTIONS, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
    functional.linear: ("input", "weight", "bias"),
}
_PADDED = tuple(_CONVOLUTIONS.values())


def lift_functions(module: fx.GraphModule) -> int:
    """Write functional convolutions and linear layers with constant weights as modules, in place.

    A weight that depends on the image, as in a dynamic convolution, has no integers. Such a layer stays in float. So do
    transposed convolutions, and operations with fixed weights in front of the first learned layer (see
    `before_layers`).

    Args:
        module: traced.

    Returns:
        The number of layers written.

    Raises:
        NotApplicableError: a convolution has as many groups as images, and the traced network fixes that number.
    """
    lifted = 0
    _, early = before_layers(module, lambda node: learned(module, node))
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _TRANSPOSED:
            call_in_float(module, node)  # as modules of that kind, see `Target`
        if node.op != "call_function" or node.target not in _ARGUMENTS:
            continue
        given: dict[str, Any] = {**dict(zip(_ARGUMENTS[node.target], node.args, strict=False)), **node.kwargs}
        if computed(given.get("groups")):
            raise NotApplicableError(
                f"{node.name}: a convolution with a computed number of groups (a weight for each image, as in "
                "CondConv) can be traced for one batch size only; remove it to quantize the others"
            )
        if node in early or any(computed(value) for name, value in given.items() if name != "input"):
            call_in_float(module, node)  # the integers of such weights are not constant
            continue
        if not computed(given["input"]):
            continue
        read = given.pop("input")
        with torch.no_grad():
            values = {name: constant_value(module, value) for name, value in given.items()}
        name = free_name(module, f"{node.name}_layer")
        # In the module's mode: torch.ao does not fold a norm in eval mode into a layer in training mode.
        module.add_submodule(name, _layer(node.target, values).train(module.training))
        with module.graph.inserting_before(node):
            replace(node, module.graph.call_module(name, (read,)))
        lifted += 1
    module.graph.eliminate_dead_code()
    _drop_unread(module)
    module.recompile()
    return lifted


def _drop_unread(module: fx.GraphModule) -> None:
    """Delete the network's own parameters that no node reads. Each layer has its own by now."""
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name, _ in list(module.named_parameters(recurse=False)):
        if name not in read:
            delattr(module, name)
    module.delete_all_unused_submodules()


def _layer(function: Any, values: dict[str, Any]) -> nn.Module:
    weight, bias = values.pop("weight"), values.pop("bias", None)
    outputs, inputs, *kernel = weight.shape
    layer: Any
    if function in _CONVOLUTIONS:
        inputs *= values.get("groups", 1)
        layer = _CONVOLUTIONS[function](inputs, outputs, kernel, bias=bias is not None, **values)
    else:
        layer = nn.Linear(inputs, outputs, bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return cast("nn.Module", layer)


def write_out_padding(module: fx.GraphModule) -> int:
    """Write a pad in front of convolutions with other than zero padding, or with padding given by a word, in place.

    Args:
        module: traced.

    Returns:
        The number of convolutions changed.
    """
    written = 0
    changed: dict[int, _ConvNd] = {}
    for node in list(module.graph.nodes):
        layer = called_module(module, node)
        if type(layer) not in _PADDED or not isinstance(layer, _ConvNd):
            continue
        borders = list(layer._reversed_padding_repeated_twice)  # in the order that `functional.pad` takes
        if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            continue
        even = layer.padding_mode == "zeros" and borders[::2] == borders[1::2]
        if id(layer) not in changed:
            twin = changed[id(layer)] = copy.copy(layer)
            sides: tuple[Any, ...] = tuple(borders[::-2]) if even else (0,) * (len(borders) // 2)
            twin.padding_mode, twin.padding = "zeros", sides
            twin._reversed_padding_repeated_twice = [side for side in reversed(sides) for _ in range(2)]
        module.set_submodule(str(node.target), changed[id(layer)])
        if not even:
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            with module.graph.inserting_before(node):
                padded = module.graph.call_function(functional.pad, (node.args[0], borders), {"mode": mode})
            node.args = (padded, *node.args[1:])
        written += 1
    module.recompile()
    return written
