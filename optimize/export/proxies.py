"""What of torch takes no proxies, made to take them while a network is traced.

Torch's parser of arguments (2.11 to 2.14) takes for sizes what is in a tuple, or behind an integer, and says of
``torch.zeros(x.shape[0], 1, 8, 8)`` that ``zeros() takes 1 positional argument but 4 were given``. What
`torch.jit.script` has made of a function takes tensors alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

#: What is given sizes one by one: by itself, and of a tensor that is no proxy, as a buffer is.
_FUNCTIONS = ("zeros", "ones", "empty")
_METHODS = ("expand", "new_zeros", "new_ones", "new_empty")


@contextmanager
def taken_by_torch() -> Iterator[None]:
    """While a network is traced, give torch sizes in a tuple, and call scripted functions as they were written."""
    with ExitStack() as undone:
        for name in _FUNCTIONS:
            original = getattr(torch, name)
            setattr(torch, name, _sizes_together(original, before=0))
            undone.callback(setattr, torch, name, original)
        for name in _METHODS:  # of a class of C++, which torch's own, in Python, inherits from
            setattr(torch.Tensor, name, _sizes_together(getattr(torch.Tensor, name), before=1))
            undone.callback(delattr, torch.Tensor, name)
        scripted: Any = torch.jit.ScriptFunction
        undone.callback(setattr, scripted, "__call__", scripted.__call__)
        scripted.__call__ = _as_written(scripted.__call__)
        yield


def _sizes_together(original: Callable[..., Any], before: int) -> Callable[..., Any]:
    """A call whose sizes begin behind so many arguments; of `ShapedTracer` a proxy among them is one size, not all."""

    @functools.wraps(original)
    def called(*args: Any, **settings: Any) -> Any:
        sizes = args[before:]
        if sizes and isinstance(sizes[0], fx.Proxy):
            args = (*args[:before], sizes)
        return original(*args, **settings)

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
