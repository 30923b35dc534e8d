"""What of torch takes no proxies, made to take them while a network is traced.

Torch's parser of arguments (2.11 to 2.14) takes for sizes what is in a tuple, or behind an integer, and says of
``torch.zeros(x.shape[0], 1, 8, 8)`` that ``zeros() takes 1 positional argument but 4 were given``. What
`torch.jit.script` has made of a function takes tensors alone. A function with a gradient of its own takes whatever says
that it is a tensor for one, reads its memory, and ends the process by SIGSEGV.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import fx
from torch.autograd.function import Function, FunctionCtx

Kind = TypeVar("Kind")

#: What is given sizes one by one: by itself, and of a tensor that is no proxy, as a buffer is.
_FUNCTIONS = ("zeros", "ones", "empty")
METHODS = ("expand", "new_zeros", "new_ones", "new_empty")


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


def of_proxies(owner: type[Function], given: tuple[Any, ...]) -> bool:
    """Whether a function is called while a network is traced."""
    return any(isinstance(each, fx.Proxy) for each in given)


@contextmanager
def own_gradients_taken(taken: Callable[[type[Function], tuple[Any, ...]], bool] = of_proxies) -> Iterator[None]:
    """Within the block, a `torch.autograd.Function` of proxies, or as ``taken`` says, is what its ``forward`` does.

    Its gradient is not in the graph, which says how to compute and not how to train. An ``apply`` that is kept by
    another name is an object of its own, which C code made and which cannot be told to do anything else: each is
    replaced.
    """
    applied = vars(Function)["apply"]  # of a class: it is asked for whose it is to be
    with ExitStack() as undone:
        for value, put in _kept():
            undone.callback(put, value)
            put(functools.partial(_apply, taken, applied, value.__self__))

        def called(owner: type[Function], *args: Any, **named: Any) -> Any:
            return _apply(taken, applied, owner, *args, **named)

        _put(undone, Function, "apply", classmethod(called))
        yield


def _kept() -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Each ``apply`` of a function that is not torch's that is kept anywhere, and what puts another in its place there.

    The garbage collector knows where, but for what is frozen: modules' names, layers and their classes, closures,
    `functools.partial`, defaults, tables of activations.
    """
    functions = [function for function in _below(Function) if not is_torchs(function)]
    values = [value for value in (gc.get_referrers(*functions) if functions else ()) if _is_apply(value)]
    for holder in gc.get_referrers(*values) if values else ():
        if holder is not values:
            yield from _held(holder)


def _held(holder: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """As `_kept`, of one that refers to an ``apply``."""
    if isinstance(holder, types.CellType):
        yield holder.cell_contents, functools.partial(setattr, holder, "cell_contents")
    elif isinstance(holder, functools.partial):
        if _is_apply(holder.func):
            yield holder.func, functools.partial(_set_function, holder)
    elif isinstance(holder, tuple):
        for function in _referring(holder, types.FunctionType):
            for place, value in enumerate(holder):
                if function.__defaults__ is holder and _is_apply(value):
                    yield value, functools.partial(_set_default, function, place)
    elif isinstance(holder, dict) and "__module__" in holder and (kinds := _referring(holder, type)):
        for name in [name for name, value in holder.items() if _is_apply(value)]:  # a class remembers what it has
            yield holder[name], functools.partial(setattr, kinds[0], name)
    else:
        names = holder if isinstance(holder, dict | list) else getattr(holder, "__dict__", {})
        for name, value in [*(enumerate(names) if isinstance(names, list) else names.items())]:
            if _is_apply(value):
                yield value, functools.partial(names.__setitem__, name)


def _referring(held: Any, kind: type[Kind]) -> list[Kind]:
    return [holder for holder in gc.get_referrers(held) if isinstance(holder, kind)]


def _set_function(called: functools.partial[Any], function: Any) -> None:
    called.__setstate__((function, called.args, called.keywords, vars(called)))  # type: ignore[attr-defined]


def _set_default(function: types.FunctionType, place: int, value: Any) -> None:
    defaults = function.__defaults__ or ()
    function.__defaults__ = (*defaults[:place], value, *defaults[place + 1 :])


def is_torchs(function: type[Function]) -> bool:
    """Whether a function is of torch's own, as that of activation checkpointing."""
    return function.__module__.startswith("torch.")


def _below(kind: type[Function]) -> Iterator[type[Function]]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


def _is_apply(value: Any) -> bool:
    if not isinstance(value, types.BuiltinMethodType | types.MethodType) or value.__name__ != "apply":
        return False
    return isinstance(value.__self__, type) and issubclass(value.__self__, Function)


def _apply(taken: Any, applied: Any, owner: Any, *args: Any, **named: Any) -> Any:
    """What a class of functions makes of its arguments: where it is taken what its ``forward`` makes of them."""
    if not taken(owner, (*args, *named.values())):
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
