"""Which integers this machine's CPU sums without saturating, and what an artifact was built for."""

from __future__ import annotations

import platform
from typing import Final

import torch

#: Integers of an artifact that any x86 CPU computes: activations of 8 bits, weights of 7, −63 to 63; or activations
#: of 7 and weights of 8, as torch's dynamic layers have them.
ANY_X86: Final = "x86"

#: Integers of an artifact that only CPUs with VNNI compute: activations of 8 bits, and weights of 8, −127 to 127.
VNNI_X86: Final = "x86-vnni"

#: Integers of an artifact that TensorRT computes: symmetric, -128 to 127 with zero-point 0 (weights from -127), and
#: biases in float.
TENSORRT: Final = "tensorrt"

#: Of a weight for any x86 CPU: two products of it and 255 fit into 16 bits.
WEIGHT_MAX: Final = 63


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
        f"it was built for CPUs with VNNI ({VNNI_X86}, weights -127 to 127); this CPU has none, and its 16-bit sums "
        f"would saturate: build it on such a CPU, or anywhere with target: {ANY_X86} (weights -63 to 63)"
    )
