"""Which integers this machine's CPU sums without saturation, and which an artifact was built for."""

from __future__ import annotations

import platform
from typing import Final

import torch

#: Integers for any x86 CPU. Activations have 8 bits and weights 7, −63 to 63. Or activations have 7 bits and weights 8,
#: as in torch's dynamic layers.
ANY_X86: Final = "x86"

#: Integers only for CPUs with VNNI: activations of 8 bits, and weights of 8, −127 to 127.
VNNI_X86: Final = "x86-vnni"

#: Integers for TensorRT: symmetric, -128 to 127 with zero-point 0 (weights from -127), and biases in float.
TENSORRT: Final = "tensorrt"

#: Largest weight for any x86 CPU: two products with 255 fit into 16 bits.
WEIGHT_MAX: Final = 63


def has_vnni() -> bool:
    """Whether this CPU sums products of bytes in 32 bits (AVX512-VNNI, which CPUs with AMX have too).

    AVX-VNNI, which is narrower, does not count: torch's kernels (2.11 to 2.14) do not check for it.
    """
    return torch.cpu._is_vnni_supported()


def saturates(target: str | None) -> str | None:
    """Return why this machine's CPU cannot compute the integers of a target. None: it can.

    Without VNNI, x86 kernels (fbgemm's, oneDNN's, ONNX Runtime's) add pairs of products in 16 bits, and two products of
    255 and 127 do not fit. Other processors than x86 have no such instruction.

    Args:
        target: the artifact's target. None for floats.
    """
    if target != VNNI_X86 or has_vnni() or platform.machine() not in ("x86_64", "AMD64", "i686"):
        return None
    return (
        f"it was built for CPUs with VNNI (target {VNNI_X86}, weights -127 to 127), and this CPU has none: its "
        f"16-bit sums would saturate. Build it here, or set target: {ANY_X86} (weights -63 to 63)"
    )
