"""Whose turn it is at a device: a GPU has one thread at a time, of all models that a process has there.

Each model has a thread of its own (`engine_thread`), and a second model, or a new version of one that is opened beside
the old, is a second thread on the same GPU. They run a batch, or warm up and capture a CUDA graph, in turns. What takes
long when a model is opened and launches little, such as compiling, takes no turn: the others answer meanwhile.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch

_turns: dict[int, AbstractContextManager[object]] = {}
_making = threading.Lock()


def turn_at(device: torch.device) -> AbstractContextManager[object]:
    """What a thread enters before it runs or captures anything on a device, and leaves when the answers are there.

    It may be entered again by the thread that is in it.

    Args:
        device: on CUDA, all who ask for a device get the same; on the CPU each who asks gets one of its own, because
            models there have threads of their own.
    """
    if device.type != "cuda":
        return threading.RLock()
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else current
    with _making:
        return _turns.setdefault(index, threading.RLock())
