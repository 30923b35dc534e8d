"""Values in a traced module that do not depend on the images: its tensors, and what is computed from them alone."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


class NotConstantError(Exception):
    """A requested value depends on the images."""


def attribute(module: nn.Module, target: str) -> Any:
    """Return the attribute of a module at a dotted path, such as ``layer1.0.conv1.weight``.

    Raises:
        AttributeError: there is no such attribute.
    """
    owner, _, leaf = target.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


def constant_value(module: fx.GraphModule, argument: Any, *, layers: bool = True) -> Any:
    """Return the value of an argument that depends on no image: a node, a literal, or a tuple of these.

    Args:
        module: holds the tensors. Its layers are called in the mode in which they are.
        argument: an argument of a node of the module's graph.
        layers: whether the output of a layer for constant inputs counts as constant.

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
