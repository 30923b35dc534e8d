"""Algorithms that repeat themselves bit for bit, where the settings ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from serve.runtime.errors import UserError, one_line


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch take deterministic algorithms only, and what it took before afterwards; nothing if not ``wanted``.

    Raises:
        UserError: an operation of the network has none on this device.
    """
    if not wanted:
        yield
        return
    # Read by cuBLAS when it is first used; without it a product of matrices is refused (torch 2.14, CUDA 10.2 on).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        raise UserError(f"deterministic: {one_line(error)}; train without it") from None
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
