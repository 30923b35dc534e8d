"""What others make of the same float graph, as passes: NNCF for OpenVINO, and ONNX Runtime's static quantization.

Passes, so that their artifacts are measured by the very code that measures ours. Importing this module registers them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from optimize.context import Context
from optimize.passes.base import Pass, register
from optimize.store.artifact import Artifact, Product
from serve.config import Config
from serve.runtime.errors import UserError
from serve.runtime.images import normalise


class Nncf(Config):
    """Settings of ``nncf``."""

    images: int = Field(default=256, ge=1, description="calibration images, those that ptq gets")


class OrtStatic(Config):
    """Settings of ``ort-static``."""

    images: int = Field(default=256, ge=1, description="calibration images, those that ptq gets")


def _inputs(context: Context, images: int) -> Iterator[NDArray[np.float32]]:
    """Calibration images one by one, ``float32 (1, C, H, W)``, normalised."""
    for batch, _ in context.calibration(images):
        floats = normalise(batch, context.preprocessing, torch.device("cpu"), torch.float32)
        yield from (image[None].numpy() for image in floats)


def _require_floats(parent: Artifact) -> None:
    """Refuse a graph that takes pixels: the tools would quantize its normalisation, and calibrate on other numbers."""
    if parent.card.input_dtype != "float32":
        raise UserError(
            f"{parent.name} takes {parent.card.input_dtype}; the peers take a graph of floats (input: float)"
        )


def _nncf(parent: Artifact, config: Nncf, context: Context, folder: Path) -> Product:
    import nncf
    import openvino

    _require_floats(parent)
    model = openvino.Core().read_model(str(parent.path))
    # As NNCF's documentation says for convolutional networks; fast bias correction is its default.
    quantized = nncf.quantize(
        model,
        nncf.Dataset(list(_inputs(context, config.images))),
        preset=nncf.QuantizationPreset.PERFORMANCE,
        subset_size=config.images,
    )
    openvino.save_model(quantized, folder / "model.xml", compress_to_fp16=False)
    (folder / "model.bin").rename(folder / "model.xml.bin")  # as the runtime names what belongs to a model file
    return Product("model.xml", "openvino", precision="int8", device="cpu")


class _Reader:
    """ONNX Runtime's ``CalibrationDataReader``."""

    def __init__(self, name: str, inputs: Iterator[NDArray[np.float32]]) -> None:
        self._feeds = ({name: image} for image in inputs)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def _ort_static(parent: Artifact, config: OrtStatic, context: Context, folder: Path) -> Product:
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    _require_floats(parent)
    with tempfile.TemporaryDirectory() as scratch:
        prepared = Path(scratch) / "prepared.onnx"
        quant_pre_process(str(parent.path), str(prepared))
        name = onnx.load(prepared).graph.input[0].name
        # As its documentation recommends for x86 with VNNI: QDQ, unsigned activations, signed weights per channel.
        quantize_static(
            str(prepared),
            str(folder / "model.onnx"),
            _Reader(name, _inputs(context, config.images)),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
        )
    return Product("model.onnx", "onnx", precision="int8", device="cpu")


register(
    Pass(
        name="nncf",
        summary="NNCF's post-training quantization of the float graph, for OpenVINO",
        config=Nncf,
        accepts=frozenset({"onnx"}),
        yields="onnx-int8",
        apply=_nncf,
        libraries=("nncf", "openvino"),
        data="calibration",
    )
)
register(
    Pass(
        name="ort-static",
        summary="ONNX Runtime's static quantization of the float graph",
        config=OrtStatic,
        accepts=frozenset({"onnx"}),
        yields="onnx-int8",
        apply=_ort_static,
        libraries=("onnxruntime-gpu", "onnxruntime", "onnx"),
        data="calibration",
    )
)
