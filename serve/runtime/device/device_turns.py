"""Turns at a device: on a GPU, one thread of the process runs at a time.

Each model has a thread of its own (`engine_thread`). A second model, or a new version beside the old, is a second
thread on the same GPU. They take turns to run a batch, or to warm up and capture a CUDA graph. Long work that launches
little, for example compiling, needs no turn, so that other models can answer meanwhile.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch

_turns: dict[int, AbstractContextManager[object]] = {}
_making = threading.Lock()


def turn_at(device: torch.device) -> AbstractContextManager[object]:
    """Return the lock that a thread holds while it runs or captures anything on a device.

    The thread may enter it again.

    Args:
        device: on CUDA, all callers for a device get the same lock. On the CPU each gets its own, because models there
            have their own threads.
    """
    if device.type != "cuda":
        return threading.RLock()
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else current
    with _making:
        return _turns.setdefault(index, threading.RLock())
