"""What of torch takes no proxies, made to take them while a network is traced.

Torch's parser of arguments (2.11 to 2.14) takes for sizes what is in a tuple, or behind an integer, and says of
``torch.zeros(x.shape[0], 1, 8, 8)`` that ``zeros() takes 1 positional argument but 4 were given``. What
`torch.jit.script` has made of a function takes tensors alone. A function with a gradient of its own takes whatever says
that it is a tensor for one, reads its memory, and ends the process by SIGSEGV.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import Function, FunctionCtx

#: What is given sizes one by one: by itself, and of a tensor that is no proxy, as a buffer is.
_FUNCTIONS = ("zeros", "ones", "empty")
_METHODS = ("expand", "new_zeros", "new_ones", "new_empty")


@contextmanager
def taken_by_torch() -> Iterator[None]:
    """While a network is traced, give torch what it takes: sizes in a tuple, types, scripted functions as written."""
    with ExitStack() as undone:
        for name in _FUNCTIONS:
            _put(undone, torch, name, _sizes_together(getattr(torch, name), before=0))
        for name in _METHODS:
            _put(undone, torch.Tensor, name, _sizes_together(getattr(torch.Tensor, name), before=1))
        _put(undone, torch.Tensor, "type", _type_of(torch.Tensor.type))
        _put(undone, torch, "finfo", _ends_of(torch.finfo))
        _put(undone, torch.jit.ScriptFunction, "__call__", _as_written(torch.jit.ScriptFunction.__call__))
        yield


@contextmanager
def own_gradients_taken(root: Any) -> Iterator[None]:
    """While a network is traced, a `torch.autograd.Function` of proxies is what its ``forward`` does.

    Its gradient is not in the graph, which says how to compute and not how to train.

    Args:
        root: the network; an ``apply`` that its layers hold, or that stands where their forwards are written, is found.
    """
    applied = vars(Function)["apply"]  # of a class: it is asked for whose it is to be
    with ExitStack() as undone:
        for names in _namespaces(root):
            for name, value in [*names.items()]:
                if isinstance(value, types.BuiltinMethodType | types.MethodType) and _is_apply(value):
                    undone.callback(names.__setitem__, name, value)
                    names[name] = functools.partial(_apply, applied, value.__self__)

        def called(owner: type[Function], *args: Any, **named: Any) -> Any:
            return _apply(applied, owner, *args, **named)

        _put(undone, Function, "apply", classmethod(called))
        yield


def _namespaces(root: Any) -> Iterator[dict[str, Any]]:
    """What the layers of a network hold by name, and what their forwards know by name."""
    layers = [*root.modules()] if isinstance(root, nn.Module) else []
    yield from map(vars, layers)
    # As they are written: a scripted layer's fails of itself when it is asked for.
    forwards = [inspect.getattr_static(type(layer), "forward") for layer in layers]
    known = [forward.__globals__ for forward in forwards if isinstance(forward, types.FunctionType)]
    yield from {id(names): names for names in known}.values()


def _is_apply(value: Any) -> bool:
    owner = value.__self__
    return value.__name__ == "apply" and isinstance(owner, type) and issubclass(owner, Function)


def _apply(applied: Any, owner: Any, *args: Any, **named: Any) -> Any:
    """What a class of functions makes of its arguments: of proxies what its ``forward`` makes of them."""
    if not any(isinstance(given, fx.Proxy) for given in (*args, *named.values())):
        return applied.__get__(None, owner)(*args, **named)
    if owner.setup_context is not Function.setup_context:
        return owner.forward(*args, **named)
    context: Any = FunctionCtx()
    context.needs_input_grad = (False,) * len(args)
    return owner.forward(context, *args, **named)


def _put(undone: ExitStack, owner: Any, name: str, other: Any) -> None:
    """Put another in the place of what a module or a class has, or inherits, until all is undone."""
    if name in vars(owner):
        undone.callback(setattr, owner, name, vars(owner)[name])
    else:
        undone.callback(delattr, owner, name)
    setattr(owner, name, other)


def _sizes_together(original: Callable[..., Any], before: int) -> Callable[..., Any]:
    """A call whose sizes begin behind so many arguments; of `ShapedTracer` a proxy among them is one size, not all."""

    @functools.wraps(original)
    def called(*args: Any, **settings: Any) -> Any:
        sizes = args[before:]
        if sizes and isinstance(sizes[0], fx.Proxy):
            args = (*args[:before], sizes)
        return original(*args, **settings)

    return called


def _type_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """``table.type(x.dtype)`` as ``table.to(x.dtype)``."""

    @functools.wraps(original)
    def called(tensor: torch.Tensor, *asked: Any, **settings: Any) -> Any:
        return tensor.to(*asked) if asked and isinstance(asked[0], fx.Proxy) else original(tensor, *asked, **settings)

    return called


def _ends_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The ends of a type that a proxy's tensor has."""

    def called(*asked: Any) -> Any:
        return original(*(kind.root.found_dtype if isinstance(kind, fx.proxy.Attribute) else kind for kind in asked))

    return called


def _as_written(original: Callable[..., Any]) -> Callable[..., Any]:
    """A scripted function's call, with proxies that of the function that was scripted, which torch.compile reads."""

    @functools.wraps(original)
    def called(function: Any, *args: Any, **settings: Any) -> Any:
        written = getattr(function, "_torchdynamo_inline", None)
        if written is not None and any(isinstance(given, fx.Proxy) for given in (*args, *settings.values())):
            return written(*args, **settings)
        return original(function, *args, **settings)

    return called
