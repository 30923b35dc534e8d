"""``onnx-half``: an FP16 ONNX graph, for ONNX Runtime on CUDA; inputs and outputs in FP32 or FP16 by choice."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from optimize.context import Context
from optimize.export.half import check_half
from optimize.export.onnx import check_against, export_onnx
from optimize.passes.base import Pass, register
from optimize.store.artifact import Artifact, Product
from serve.config import Config

#: Training images whose answers must be finite.
_IMAGES = 8


class OnnxHalf(Config):
    """Settings of ``onnx-half``."""

    io: Literal["float32", "float16"] = Field(
        default="float32",
        description="dtype of the graph's input and output; with float32 the graph casts, and clients do not change",
    )
    tolerance: float = Field(
        default=0.05,
        gt=0,
        description="largest allowed difference of any logit to the float32 parent's, relative to its largest logit",
    )


class _FloatEnds(nn.Module):
    """A half-precision module that takes and gives float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(batch.half()).float()
        return logits


def _apply(parent: Artifact, config: OnnxHalf, context: Context, folder: Path) -> Product:
    module, example = parent.module(), context.example(8)
    # ONNX Runtime's CPU provider computes FP16 graphs in FP32: what overflows on CUDA would not be seen below.
    check_half(module, torch.float16, context.example(_IMAGES))
    half = parent.module().half()
    path = folder / "model.onnx"
    if config.io == "float32":
        export_onnx(_FloatEnds(half).eval(), example, path)
    else:
        export_onnx(half, example.half(), path)
    check_against(path, module, example, config.tolerance)
    return Product(path.name, "onnx", precision="float16", input_dtype=config.io)


ONNX_HALF = register(
    Pass(
        name="onnx-half",
        summary="FP16 ONNX graph, FP32 or FP16 at its ends",
        config=OnnxHalf,
        accepts=frozenset({"module"}),
        yields="onnx-half",
        apply=_apply,
        libraries=("torch", "onnx", "onnxscript"),
    )
)
