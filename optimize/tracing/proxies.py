"""Patches that let torch's functions take proxies while a network is traced.

Torch's argument parser (2.11 to 2.14) accepts proxies as sizes only in a tuple or behind an integer. It answers
``torch.zeros(x.shape[0], 1, 8, 8)`` with ``zeros() takes 1 positional argument but 4 were given``. A function that
`torch.jit.script` compiled takes only tensors.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import FunctionCtx

#: Functions and methods that take sizes one by one. The methods may be called on tensors that are no proxies, such as
#: buffers.
_FUNCTIONS = ("zeros", "ones", "empty")
METHODS = ("expand", "new_zeros", "new_ones", "new_empty")
# Containers in which a forward may keep tensors.
_HOLD = (dict, list, deque, set, tuple)


@contextmanager
def taken_by_torch() -> Iterator[None]:
    """Let torch take proxies within the block: as sizes, as types, and as arguments of scripted functions."""
    with ExitStack() as undone:
        for name in _FUNCTIONS:
            _put(undone, torch, name, _sizes_together(getattr(torch, name), before=0))
        for name in METHODS:
            _put(undone, torch.Tensor, name, _sizes_together(getattr(torch.Tensor, name), before=1))
        _put(undone, torch.Tensor, "type", _type_of(torch.Tensor.type))
        _put(undone, torch, "finfo", _ends_of(torch.finfo))
        _put(undone, torch.jit.ScriptFunction, "__call__", _as_written(torch.jit.ScriptFunction.__call__))
        yield


@contextmanager
def taken_for_tensors() -> Iterator[None]:
    """Within the block, Python code sees proxies as tensors, and C code does not.

    C code trusts ``__class__`` and reads the memory of any object that claims to be a tensor. `torch.autograd.Function`
    is such C code, and the process ends by SIGSEGV. So a proxy names the class that it stands for
    (`SpokenFor.stands_for`) only where a program asks in Python. C code passes other objects on to the function's
    ``forward``. The gradient of such a function is not in the graph, which describes inference and not training.
    """
    with ExitStack() as undone:
        _put(undone, builtins, "isinstance", _is_what_it_stands_for(builtins.isinstance))
        for name in ("mark_dirty", "mark_non_differentiable"):
            _put(undone, FunctionCtx, name, _of_no_proxies(getattr(FunctionCtx, name)))
        yield


@contextmanager
def without_proxies(module: nn.Module) -> Iterator[None]:
    """Remove the proxies that a forward stored in the module, after the block. ConViT stores its positions that way.

    This restores attributes and buffers, and lists and dictionaries in them. All other changes stay, because torch.fx
    keeps tensors that it creates in the module.
    """
    kept = [
        (held, dict(held) if isinstance(held, dict) else list(held))
        for held in _containers([vars(layer) for layer in module.modules()], set())
    ]
    try:
        yield
    finally:
        for held, before in kept:
            if isinstance(held, dict):
                for name in [name for name, value in held.items() if _has_proxy(value)]:
                    if name in before:
                        held[name] = before[name]
                    else:
                        del held[name]
            elif _has_proxy(held):
                held.clear()
                (held.update if isinstance(held, set) else held.extend)(before)


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the mutable containers of a nested value, itself included."""
    if not issubclass(type(value), _HOLD) or id(value) in seen:  # `isinstance` must not be asked about a proxy
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield value
    for part in list(value.values() if isinstance(value, dict) else value):
        yield from _containers(part, seen)


def _has_proxy(value: Any, within: tuple[int, ...] = ()) -> bool:
    """Tell whether a value is a proxy or contains one."""
    if issubclass(type(value), fx.Proxy):
        return True
    if not issubclass(type(value), _HOLD) or id(value) in within:
        return False
    parts = list(value.values() if isinstance(value, dict) else value)
    return any(_has_proxy(part, (*within, id(value))) for part in parts)


class SpokenFor(fx.Proxy):
    """A proxy that names another class than its own where a forward asks for its class."""

    def stands_for(self, asks: str) -> type:
        """Return the class that the proxy claims to have.

        Args:
            asks: name of the module that asks.
        """
        raise NotImplementedError

    @property  # type: ignore[misc]  # of all objects it can be written
    def __class__(self) -> type:
        """The class it stands for if Python code asks by name or by a match, and its real class for C code."""
        asks = sys._getframe(1)
        if dis.opname[asks.f_code.co_code[asks.f_lasti]] in ("LOAD_ATTR", "MATCH_CLASS"):
            return self.stands_for(asks.f_globals.get("__name__", ""))
        return type(self)


def _is_what_it_stands_for(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return an ``isinstance`` that also knows the class for which a proxy stands.

    Torch's functions with gradients get the same answer as C code. Their own ``apply`` (torch 2.11 to 2.13) calls C
    code for each tensor among its arguments.
    """

    def called(value: Any, kinds: Any, /) -> bool:
        if (found := original(value, kinds)) or not issubclass(type(value), SpokenFor):
            return found
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return not asks.startswith("torch._functorch.") and issubclass(value.stands_for(asks), kinds)

    return called


def _of_no_proxies(original: Callable[..., None]) -> Callable[..., None]:
    """Return a function that ignores proxies, for the notes on tensors that C code takes from a gradient function."""

    @functools.wraps(original)
    def called(context: FunctionCtx, *tensors: Any) -> None:
        original(context, *(tensor for tensor in tensors if not isinstance(tensor, fx.Proxy)))

    return called


def _put(undone: ExitStack, owner: Any, name: str, other: Any) -> None:
    """Replace an attribute of a module or a class, own or inherited, until the stack is undone."""
    if name in vars(owner):
        undone.callback(setattr, owner, name, vars(owner)[name])
    else:
        undone.callback(delattr, owner, name)
    setattr(owner, name, other)


def _sizes_together(original: Callable[..., Any], before: int) -> Callable[..., Any]:
    """Return a call that collects the sizes behind ``before`` arguments in a tuple.

    With `ShapedTracer` a proxy among them is one size, and not all of them.
    """

    @functools.wraps(original)
    def called(*args: Any, **settings: Any) -> Any:
        sizes = args[before:]
        if sizes and isinstance(sizes[0], fx.Proxy):
            args = (*args[:before], sizes)
        return original(*args, **settings)

    return called


def _type_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Tensor.type`` with ``table.type(x.dtype)`` done as ``table.to(x.dtype)``."""

    @functools.wraps(original)
    def called(tensor: torch.Tensor, *asked: Any, **settings: Any) -> Any:
        return tensor.to(*asked) if asked and isinstance(asked[0], fx.Proxy) else original(tensor, *asked, **settings)

    return called


def _ends_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.finfo`` that also takes the dtype of a proxy."""

    def called(*asked: Any) -> Any:
        return original(*(kind.root.found_dtype if isinstance(kind, fx.proxy.Attribute) else kind for kind in asked))

    return called


def _as_written(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scripted function's call that runs the original function for proxies.

    It reads the attribute that torch.compile also reads.
    """

    @functools.wraps(original)
    def called(function: Any, *args: Any, **settings: Any) -> Any:
        written = getattr(function, "_torchdynamo_inline", None)
        if written is not None and any(isinstance(given, fx.Proxy) for given in (*args, *settings.values())):
            return written(*args, **settings)
        return original(function, *args, **settings)

    return called
