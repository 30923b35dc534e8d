"""Reads the operator translations of torch's exporter once per process instead of once per export."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

_lock = threading.RLock()


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Let each ``torch.onnx.export`` in the block start with a copy of the translations that the first one read.

    With every export torch (2.11 to 2.14) reads and parses the sources of onnxscript's library, some 500 functions.
    That takes half a second of the 0.8 s that a small network needs. The result depends only on the version of the
    operators. One thread exports at a time.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with _lock:
        read = _reading()
        own = ONNXRegistry.__dict__["from_torchlib"]

        def copied(**options: int) -> ONNXRegistry:
            registry = copy.copy(read(**options))
            # A copy for this export, which may add to it.
            registry.functions = {operator: list(found) for operator, found in registry.functions.items()}
            return registry

        ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            ONNXRegistry.from_torchlib = own  # type: ignore[method-assign]


@functools.cache
def _reading() -> Callable[..., ONNXRegistry]:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return functools.cache(ONNXRegistry.from_torchlib)
