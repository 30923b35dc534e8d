"""Measures the machine's peaks in the profiling process: products of large matrices, and copies of memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

import torch

from optimize.profiling.base import Reader
from optimize.profiling.profile_records import Peak
from serve.runtime.errors import one_line

#: Sides of the matrices. The faster product counts: small ones fit into caches, large ones fill vectors.
_SIDES: Final = (512, 1536)
#: Bytes that are copied: more than caches hold.
_COPIED: Final = 256 << 20
_SECONDS: Final = 0.4
_FEWEST: Final = 5
#: The dtypes of torch's matrix products.
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def peak(precision: str, reader: Reader, threads: int) -> Peak:
    """Measure the most MACs a second in a precision: with `torch.mm`, and in int8 with the engine's own matrix product.

    Args:
        precision: precision of the arithmetic.
        reader: reader of the profiled engine.
        threads: the execution's number of threads.
    """
    product, by = reader.int8_product, f"{reader.name}'s own product"
    if precision in _DTYPES:
        product, by = functools.partial(_product, _DTYPES[precision]), "torch.mm"
    elif precision != "int8" or product is None:
        why = f"{reader.name} has no product of {precision} matrices to compare with"
        return Peak(precision=precision, macs_per_s=None, how=why)
    torch.set_num_threads(threads)
    try:
        rates = {side: side**3 / fastest(product(side, threads)) for side in _SIDES}
    except Exception as error:  # noqa: BLE001 - an engine may refuse in any way
        return Peak(precision=precision, macs_per_s=None, how=f"{reader.name} cannot multiply: {one_line(error)}")
    side = max(rates, key=lambda side: rates[side])
    return Peak(precision=precision, macs_per_s=rates[side], how=f"{by} of {side} × {side} matrices")


def _product(dtype: torch.dtype, side: int, threads: int) -> Callable[[], object]:
    """Return a call that multiplies two square matrices with torch's threads."""
    a, b = (torch.rand(side, side).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def copy_rate(threads: int) -> float:
    """Return the bytes a second that a copy reads and writes together, beyond the caches."""
    torch.set_num_threads(threads)
    source, target = torch.ones(_COPIED, dtype=torch.uint8), torch.zeros(_COPIED, dtype=torch.uint8)
    return 2 * _COPIED / fastest(lambda: target.copy_(source))


def fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest call. A peak is the best value, whatever disturbs other calls."""
    call()
    best, until, count = float("inf"), time.perf_counter() + _SECONDS, 0
    while count < _FEWEST or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
        count += 1
    return best
