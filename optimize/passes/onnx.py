"""``onnx``: the float32 graph, with a dynamic batch, checked by ``onnx.checker`` and against its parent."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from optimize.context import Context
from optimize.export.onnx import check_against, export_onnx
from optimize.passes.base import Pass, register
from optimize.store.artifact import Artifact, Product
from serve.config import Config


class Onnx(Config):
    """Settings of ``onnx``."""

    tolerance: float = Field(
        default=1e-3,
        gt=0,
        description="largest allowed difference of any logit to the parent's, relative to the parent's largest logit",
    )


def _apply(parent: Artifact, config: Onnx, context: Context, folder: Path) -> Product:
    module, example = parent.module(), context.example(8)
    path = folder / "model.onnx"
    export_onnx(module, example, path)
    check_against(path, module, example, config.tolerance)
    return Product(path.name, "onnx", parent.card.precision)


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
