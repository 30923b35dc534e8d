"""What a page says of the machine that it was made on."""

from __future__ import annotations

import datetime
import os
import platform

import torch

from optimize.measure.machine import machine, versions


def here(*libraries: str, isa: bool = True) -> str:
    """The processor, its cores, Python, and those of the libraries that are installed, in words.

    Args:
        libraries: distributions, such as ``torch``, in the order of the words.
        isa: tell the processor's instruction sets, too.
    """
    found, known = machine(torch.device("cpu")), versions()
    sets = f" ({', '.join(found['isa'])})" if isa else ""
    installed = ", ".join(f"{name} {known[name]}" for name in libraries if name in known)
    return f"{found['cpu']}{sets}, {found['cores']} cores, Python {platform.python_version()}, {installed}"


def begun() -> str:
    """The day, and how busy the machine is before anything is begun on it, in words."""
    return f"{datetime.date.today().isoformat()}, with {os.getloadavg()[0]:.1f} processes running when it began"
