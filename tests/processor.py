"""What this machine's processor computes, as tests expect it: asked of torch, and of nothing of the project."""

from __future__ import annotations

from typing import Final

import pytest
import torch

VNNI: Final[bool] = torch.cpu._is_vnni_supported()
BF16: Final[bool] = torch.cpu._is_avx512_bf16_supported()

#: Largest integer of a weight that is built for this machine: without VNNI two products of it and 255 are added in 16
#: bits.
WIDEST: Final = 127 if VNNI else 63

NEEDS_VNNI = pytest.mark.skipif(not VNNI, reason="needs weights of 8 bits, which this CPU has no VNNI for")
NEEDS_BF16 = pytest.mark.skipif(not BF16, reason="this CPU has no AVX-512 BF16")
