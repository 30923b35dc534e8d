"""``onnx-half``: an FP16 ONNX graph for ONNX Runtime on CUDA. It takes pixels, FP32 or FP16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from optimize.context import Context
from optimize.export.half import check_half
from optimize.export.onnx_graph.pixel_input import INPUT_TYPES, GraphInput, entered, graph_input
from optimize.export.onnx_graph.write import check_against, export_onnx
from optimize.passes.base import Pass, register
from optimize.quantization.rewrites.computed_weights import store_weights
from optimize.store.artifact import Artifact, Product
from serve.common.config import Config
from serve.runtime.outputs import Answer

#: Number of training images whose answers must be finite, and are compared.
_IMAGES = 8


class OnnxHalf(Config):
    """Settings of ``onnx-half``."""

    io: Literal["float32", "float16"] = Field(
        default="float32",
        description="dtype of the graph's output, and of its input if that is float; with float32 the graph casts, "
        "so clients need no change",
    )
    input: GraphInput = Field(
        default_factory=lambda others: "float" if others.get("io") == "float16" else "uint8",
        description="input of the graph: uint8 (raw pixels, which the graph normalizes) or float (normalized pixels "
        "of dtype io); by default uint8, and float if io is float16",
    )
    tolerance: float = Field(
        default=0.05,
        gt=0,
        description="largest allowed difference of any logit to the float32 parent's, relative to its largest logit",
    )

    @model_validator(mode="after")
    def _one_input(self) -> OnnxHalf:
        if self.io == "float16" and self.input == "uint8":
            raise ValueError(
                "io=float16 needs input=float; with input=uint8 the graph reads pixels and returns float32"
            )
        return self


class _FloatEnds(nn.Module):
    """A half-precision module that takes and gives float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor) -> Answer:
        answer: Answer = self.module(batch.half())
        return answer.float() if isinstance(answer, torch.Tensor) else tuple(output.float() for output in answer)


def _apply(parent: Artifact, config: OnnxHalf, context: Context, folder: Path) -> Product:
    module, example, outputs = parent.module(), context.example(_IMAGES), parent.card.outputs
    store_weights(module)
    # ONNX Runtime's CPU provider computes FP16 graphs in FP32. The check below would miss an overflow on CUDA.
    check_half(module, torch.float16, example)
    half = copy.deepcopy(module).half()
    path = folder / "model.onnx"
    given = graph_input(context, config.input, _IMAGES)
    if config.io == "float32":
        export_onnx(entered(_FloatEnds(half).eval(), config.input, context.preprocessing), given, path, outputs=outputs)
    else:
        export_onnx(half, given.half(), path, outputs=outputs)
    with torch.no_grad():
        expected = module(example)
    check_against(path, given, expected, config.tolerance, half=True)
    taken = "float16" if config.io == "float16" else INPUT_TYPES[config.input]
    return Product(path.name, "onnx", precision="float16", input_dtype=taken)


ONNX_HALF = register(
    Pass(
        name="onnx-half",
        summary="FP16 ONNX graph of pixels, FP32 or FP16",
        config=OnnxHalf,
        accepts=frozenset({"module"}),
        yields="onnx-half",
        apply=_apply,
        libraries=("torch", "onnx", "onnxscript"),
    )
)
