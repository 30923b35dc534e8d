"""Which integers this machine's CPU sums without saturating, and what an artifact was built for."""

from __future__ import annotations

import platform
from typing import Final

import torch

#: Integers of an artifact that any x86 CPU computes: activations of 7 bits, 0 to 127.
ANY_X86: Final = "x86"

#: Integers of an artifact that only CPUs with VNNI compute: activations of 8 bits, 0 to 255.
VNNI_X86: Final = "x86-vnni"

#: Integers of an artifact that TensorRT computes: symmetric, -128 to 127 with zero-point 0 (weights from -127), and
#: biases in float.
TENSORRT: Final = "tensorrt"


def has_vnni() -> bool:
    """Whether products of bytes are summed in 32 bits here (AVX512-VNNI, which CPUs with AMX have too).

    The narrower AVX-VNNI alone does not count: torch's kernels (2.11 to 2.14) do not look for it.
    """
    return torch.cpu._is_vnni_supported()


def saturates(target: str | None) -> str | None:
    """Why this machine's CPU cannot compute the integers of a target; None if it can.

    Without VNNI, x86 kernels (fbgemm's, oneDNN's, ONNX Runtime's) add pairs of products in 16 bits: two of 255 times
    127 do not fit. Other processors than x86 have no such instruction.

    Args:
        target: of an artifact; None for floats.
    """
    if target != VNNI_X86 or has_vnni() or platform.machine() not in ("x86_64", "AMD64", "i686"):
        return None
    return (
        f"it was built for CPUs with VNNI ({VNNI_X86}, activations 0 to 255); this CPU has none, and its 16-bit sums "
        f"would saturate: build it on such a CPU, or anywhere with target: {ANY_X86} (activations 0 to 127)"
    )
