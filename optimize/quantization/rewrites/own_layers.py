"""Gives each user of a shared layer, tensor or parameter its own copy.

A weight that is rounded, a sign that is turned or a bias that is shifted for one user would otherwise change for all.
"""

from __future__ import annotations

import copy

import torch
from torch import fx, nn

from optimize.quantization.graph.nodes import called_module
from optimize.quantization.graph.repeated_calls import another_call
from optimize.tracing.constants import attribute
from optimize.tracing.naming import free_name


def part_calls(module: fx.GraphModule) -> None:
    """Make each further call of a layer with parameters a call of a copy, in place.

    torch.ao (2.11 to 2.14) gives a shared layer the output scale of one of its calls for all of them.
    """
    called: set[int] = set()
    for number, node in enumerate(module.graph.nodes):
        if node.op != "call_module":
            continue
        layer = module.get_submodule(str(node.target))
        if id(layer) in called and next(layer.parameters(), None) is not None:
            node.target = another_call(str(node.target), number)
            module.add_submodule(node.target, copy.deepcopy(layer))
        called.add(id(layer))


def part_tensors(module: fx.GraphModule) -> None:
    """Give nodes that read a tensor of a layer a copy if the layer is also called, in place.

    The weight of an int8 layer is a method.
    """
    called = {id(called_module(module, node)) for node in module.graph.nodes if node.op == "call_module"}
    for node in module.graph.nodes:
        owner, _, _ = str(node.target).rpartition(".")
        if node.op != "get_attr" or not owner or id(module.get_submodule(owner)) not in called:
            continue
        value: torch.Tensor = attribute(module, str(node.target))
        node.target = free_name(module, f"{node.name}_beside")
        if isinstance(value, nn.Parameter):
            module.register_parameter(node.target, nn.Parameter(value.detach().clone(), value.requires_grad))
        else:
            module.register_buffer(node.target, value.detach().clone())


def part_parameters(module: nn.Module) -> None:
    """Give each layer its own parameters, in place."""
    known: set[int] = set()
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in known:
                setattr(layer, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
            known.add(id(parameter))
