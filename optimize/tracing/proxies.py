"""What of torch takes no proxies, made to take them while a network is traced.

Torch's parser of arguments (2.11 to 2.14) takes for sizes what is in a tuple, or behind an integer, and says of
``torch.zeros(x.shape[0], 1, 8, 8)`` that ``zeros() takes 1 positional argument but 4 were given``. What
`torch.jit.script` has made of a function takes tensors alone.
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

#: What is given sizes one by one: by itself, and of a tensor that is no proxy, as a buffer is.
_FUNCTIONS = ("zeros", "ones", "empty")
METHODS = ("expand", "new_zeros", "new_ones", "new_empty")
# What forwards keep tensors in.
_HOLD = (dict, list, deque, set, tuple)


@contextmanager
def taken_by_torch() -> Iterator[None]:
    """While a network is traced, give torch what it takes: sizes in a tuple, types, scripted functions as written."""
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
    """While a network is traced, have it hear of proxies that they are tensors, and C code that they are none.

    C code believes ``__class__``, and reads the memory of what says that it is a tensor: a function with a gradient of
    its own does (`torch.autograd.Function`), and ends the process by SIGSEGV. So a proxy says what it stands for where
    a program asks in Python, `SpokenFor.stands_for`. What is no tensor C code hands on to the function's ``forward``,
    and its gradient is not in the graph, which says how to compute and not how to train.
    """
    with ExitStack() as undone:
        _put(undone, builtins, "isinstance", _is_what_it_stands_for(builtins.isinstance))
        for name in ("mark_dirty", "mark_non_differentiable"):
            _put(undone, FunctionCtx, name, _of_no_proxies(getattr(FunctionCtx, name)))
        yield


@contextmanager
def without_proxies(module: nn.Module) -> Iterator[None]:
    """Put back behind the block what a forward has kept proxies in the place of, as ConViT keeps its places.

    In attributes, in buffers, and in lists and dictionaries of them. What else it has changed stays: torch.fx keeps
    tensors that it makes in the module.
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
    """What can be written into, of a value that is put together: itself, and what is in it."""
    if not issubclass(type(value), _HOLD) or id(value) in seen:  # of a proxy, `isinstance` is not to be asked
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield value
    for part in list(value.values() if isinstance(value, dict) else value):
        yield from _containers(part, seen)


def _has_proxy(value: Any, within: tuple[int, ...] = ()) -> bool:
    """Whether a value is a proxy, or is put together of such."""
    if issubclass(type(value), fx.Proxy):
        return True
    if not issubclass(type(value), _HOLD) or id(value) in within:
        return False
    parts = list(value.values() if isinstance(value, dict) else value)
    return any(_has_proxy(part, (*within, id(value))) for part in parts)


class SpokenFor(fx.Proxy):
    """A proxy that is told by another class than its own where a forward asks."""

    def stands_for(self, asks: str) -> type:
        """The class that it says it has.

        Args:
            asks: the name of the module that asks.
        """
        raise NotImplementedError

    @property  # type: ignore[misc]  # of all objects it can be written
    def __class__(self) -> type:
        """What it stands for where it is asked by name or matched, and what it is to who is called, which is C code."""
        asks = sys._getframe(1)
        if dis.opname[asks.f_code.co_code[asks.f_lasti]] in ("LOAD_ATTR", "MATCH_CLASS"):
            return self.stands_for(asks.f_globals.get("__name__", ""))
        return type(self)


def _is_what_it_stands_for(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """``isinstance`` of what a proxy stands for, too; torch's functions of gradients hear what C code does.

    They have their own ``apply`` (torch 2.11 to 2.13) call C code for each tensor among its arguments.
    """

    def called(value: Any, kinds: Any, /) -> bool:
        if (found := original(value, kinds)) or not issubclass(type(value), SpokenFor):
            return found
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return not asks.startswith("torch._functorch.") and issubclass(value.stands_for(asks), kinds)

    return called


def _of_no_proxies(original: Callable[..., None]) -> Callable[..., None]:
    """What a function notes of tensors that it gives or was given; C code takes no other notes."""

    @functools.wraps(original)
    def called(context: FunctionCtx, *tensors: Any) -> None:
        original(context, *(tensor for tensor in tensors if not isinstance(tensor, fx.Proxy)))

    return called


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
