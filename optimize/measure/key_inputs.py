"""The inputs that all measurements share: the machine, its libraries, and the code that measures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimize.measure.machine import machine, versions
from optimize.measure.processes import environment
from optimize.store.sources import code_of
from serve.runtime.card.execution import Execution


def surroundings(*executions: Execution, makers: Sequence[Callable[..., Any]]) -> dict[str, Any]:
    """Return the inputs that all keys of measurements share. ``makers`` are the functions that measure."""
    return {**timing_here(*executions), "code": _code(frozenset(makers))}


def timing_here(*executions: Execution) -> dict[str, Any]:
    """Return what a time depends on besides the timed program: the machine, the processes' environment, libraries."""
    device = next((e.device for e in executions if e.device_type == "cuda"), "cpu")
    found = machine(torch.device(device))
    return {
        "environment": environment(),
        "machine": {name: found[name] for name in ("cpu", "isa", "cores", "quota", "threads", "memory_bytes", "gpu")},
        "libraries": versions(),
    }


@functools.cache
def _code(makers: frozenset[Callable[..., Any]]) -> str:
    return code_of(*makers)
