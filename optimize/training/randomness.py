"""States of the random generators that a training step may use, and deterministic algorithms."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from serve.runtime.errors import UserError, one_line


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, Python's, NumPy's and the device's generators, for `restore_random_states`."""
    name, words, place, has_normal, normal = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(np.asarray(words, np.int64)), int(place), int(has_normal), float(normal)],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Continue from the states of `random_states`."""
    torch.set_rng_state(states["torch"])
    version, words, normal = states["python"]
    random.setstate((version, tuple(words), normal))
    name, taken, *rest = states["numpy"]
    np.random.set_state((name, taken.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Restrict torch to deterministic algorithms within the block if ``wanted``, and restore its setting afterwards.

    Raises:
        UserError: an operation of the network has none on this device.
    """
    if not wanted:
        yield
        return
    # cuBLAS reads it at first use. Without it torch refuses matrix products (torch 2.14, CUDA 10.2 on).
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
