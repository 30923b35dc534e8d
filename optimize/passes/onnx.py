"""``onnx``: the float32 graph with a dynamic batch, checked by ``onnx.checker`` and against its parent."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field

from optimize.context import Context
from optimize.export.onnx_graph.pixel_input import INPUT_TYPES, TakesPixels, entered, graph_input
from optimize.export.onnx_graph.write import check_against, export_onnx
from optimize.passes.base import Pass, register
from optimize.store.artifact import Artifact, Product

#: Number of training images on which answers are compared.
_IMAGES = 8


class Onnx(TakesPixels):
    """Settings of ``onnx``."""

    tolerance: float = Field(
        default=1e-3,
        gt=0,
        description="largest allowed difference of any logit to the parent's, relative to the parent's largest logit",
    )


def _apply(parent: Artifact, config: Onnx, context: Context, folder: Path) -> Product:
    module, given = parent.module(), graph_input(context, config.input, _IMAGES)
    path = folder / "model.onnx"
    whole = entered(module, config.input, context.preprocessing)
    export_onnx(whole, given, path, outputs=parent.card.outputs)
    with torch.no_grad():
        expected = module(context.example(_IMAGES))
    check_against(path, given, expected, config.tolerance)
    return Product(path.name, "onnx", parent.card.precision, input_dtype=INPUT_TYPES[config.input])


ONNX = register(
    Pass(
        name="onnx",
        summary="float32 ONNX graph with a dynamic batch",
        config=Onnx,
        accepts=frozenset({"module"}),
        yields="onnx",
        apply=_apply,
        libraries=("torch", "onnx", "onnxscript"),
    )
)
