"""What of a traced module depends on no image: the tensors that it holds, and what is computed from them alone."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


class NotConstantError(Exception):
    """What was asked for depends on the images."""


def attribute(module: nn.Module, target: str) -> Any:
    """What a module holds by a dotted path, such as ``layer1.0.conv1.weight``.

    Raises:
        AttributeError: nothing.
    """
    owner, _, leaf = target.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


def constant_value(module: fx.GraphModule, argument: Any, *, layers: bool = True) -> Any:
    """The value of an argument that depends on no image: a node, what stands in the graph, or a tuple of these.

    Args:
        module: holds the tensors; its layers are called as they are, in their mode.
        argument: of one of its graph's nodes.
        layers: whether what a layer gives of constants is one.

    Raises:
        NotConstantError: it depends on the images, or on a layer that does not count.
    """
    if not isinstance(argument, fx.Node):
        return fx.node.map_arg(argument, lambda node: constant_value(module, node, layers=layers))
    if argument.op == "get_attr":
        return attribute(module, str(argument.target))
    if argument.op == "placeholder" or (argument.op == "call_module" and not layers):
        raise NotConstantError
    args, kwargs = (constant_value(module, given, layers=layers) for given in (argument.args, argument.kwargs))
    if argument.op == "call_module":
        return module.get_submodule(str(argument.target))(*args, **kwargs)
    if argument.op == "call_method":
        return getattr(args[0], str(argument.target))(*args[1:], **kwargs)
    assert callable(argument.target)
    return argument.target(*args, **kwargs)
