"""Describes the machine and the libraries of a measurement, and resolves a run's device."""

from __future__ import annotations

import functools
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from serve.runtime.card.execution import Execution
from serve.runtime.device.cores import quota
from serve.runtime.engines.base import engines
from serve.runtime.errors import UserError

_LIBRARIES = ("torch", "torchvision", "onnx", "onnxscript", "numpy", "pillow")
_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimddp")


def resolve_device(wanted: str) -> torch.device:
    """Resolve ``auto`` (CUDA if there is a device), ``cpu``, ``cuda`` or ``cuda:N`` to a device.

    Raises:
        UserError: another word, or CUDA on a machine without it.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        raise UserError(f"unknown device {wanted!r}: use auto, cpu, cuda or cuda:N")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {wanted} is not available: this machine has {torch.cuda.device_count()} CUDA devices; use cpu "
            "or auto"
        )
    return device


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on, of Python and of this project."""
    found = {"python": platform.python_version(), "optimize": project_version()}
    of_engines = [name for engine in engines().values() for name in engine.libraries]
    for name in dict.fromkeys([*_LIBRARIES, *of_engines]):
        if (version := installed_version(name)) is not None:
            found[name] = version
    return found


@functools.cache
def installed_version(name: str) -> str | None:
    """Return the version of a distribution. None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def project_version() -> str:
    """Return this project's version. ``source`` if it runs without being installed."""
    try:
        return metadata.version("optimize-and-serve")
    except metadata.PackageNotFoundError:
        return "source"


def measured_devices(wanted: str, device: torch.device) -> tuple[str, ...]:
    """Return the devices to measure on: ``auto`` (every device of the machine), or a list such as ``cpu,cuda``.

    Args:
        wanted: the user's text.
        device: the run's device. ``auto`` takes it if there are several GPUs.

    Raises:
        UserError: another word, a repeated device, or CUDA on a machine without it.
    """
    if wanted == "auto":
        gpu = str(device) if device.type == "cuda" else "cuda"
        return ("cpu", gpu) if torch.cuda.is_available() else ("cpu",)
    words = [word.strip() for word in wanted.split(",")]
    if len(set(words)) < len(words) or not set(words) - {"auto", ""} == set(words):
        raise UserError(f"devices to measure on must be auto, or a list such as cpu,cuda, found {wanted!r}")
    return tuple(str(resolve_device(word)) for word in words)


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine for readers of a time: processor, cores, memory, instruction sets, GPU and its driver."""
    model, flags = _cpu()
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "quota": quota(),
        "threads": Execution("any").cores,
        "memory_bytes": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "isa": [name for name in _ISA if name in flags],
        "gpu": _gpu(device) if device.type == "cuda" else None,
    }


def _cpu() -> tuple[str, frozenset[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    names = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return (
        names[1].strip() if names else platform.machine(),
        frozenset(flags[1].split()) if flags else frozenset(),
    )


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "capability": f"{properties.major}.{properties.minor}",
    }
