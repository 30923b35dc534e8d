"""The states of the random generators that a training step may draw from, taken and given back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of torch's, Python's and NumPy's generators, and of the device's; for `restore_random_states`."""
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
    """Go on drawing where `random_states` was taken."""
    torch.set_rng_state(states["torch"])
    version, words, normal = states["python"]
    random.setstate((version, tuple(words), normal))
    name, taken, *rest = states["numpy"]
    np.random.set_state((name, taken.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
