"""``half``: weights and arithmetic in 16 bits, FP16 for CUDA or bfloat16 where the hardware has it.

The artifact names its real precision. An FP16 program can be built on any machine, but runs on CUDA only. CPUs without
FP16 arithmetic would convert back and forth and be slower than FP32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.export.half import check_half
from optimize.export.program import write_program
from optimize.passes.base import Pass, register
from optimize.quantization.rewrites.computed_weights import store_weights
from optimize.store.artifact import Artifact, Product
from serve.common.config import Config

#: Number of training images whose answers must be finite.
_IMAGES = 8


class Half(Config):
    """Settings of ``half``."""

    dtype: Literal["float16", "bfloat16"] = Field(
        default="float16",
        description="float16: 10 bits of mantissa, up to 65504, for CUDA; "
        "bfloat16: 7 bits of mantissa and FP32's range, for CPUs with AVX-512 BF16 or AMX and for CUDA",
    )


def _apply(parent: Artifact, config: Half, context: Context, folder: Path) -> Product:
    module = parent.module()
    if config.dtype == "bfloat16" and context.device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        raise NotApplicableError("bfloat16 needs a CPU with AVX-512 BF16, or CUDA; this machine has neither")
    dtype = getattr(torch, config.dtype)
    store_weights(module)
    check_half(module, dtype, context.example(_IMAGES))
    file, file_format = write_program(module.to(dtype), context.example().to(dtype), folder)
    return Product(
        file,
        file_format,
        precision=config.dtype,
        device="cuda" if config.dtype == "float16" else "any",
        input_dtype=config.dtype,
    )


HALF = register(
    Pass(
        name="half",
        summary="16-bit weights and arithmetic: FP16 for CUDA, bfloat16 for CPUs that have it",
        config=Half,
        accepts=frozenset({"module"}),
        yields="half",
        apply=_apply,
        reads_device=True,  # a CPU may lack bfloat16
    )
)
