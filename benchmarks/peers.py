"""What others make of the same network, as passes: NNCF, ONNX Runtime's static quantization, torchao's PT2E.

Passes, so that their artifacts are measured by the very code that measures ours. Importing this module registers them.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import fx

from optimize.context import Context
from optimize.data.sources import Selected
from optimize.data.splits import part, subset
from optimize.errors import NotApplicableError
from optimize.passes.base import Pass, register
from optimize.store.artifact import Artifact, Product
from optimize.tracing.trace import trace
from serve.common.config import Config
from serve.runtime.device.cpu_integers import VNNI_X86
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from serve.runtime.model_files.program_file import save_program


class Nncf(Config):
    """Settings of ``nncf``."""

    images: int = Field(default=256, ge=1, description="calibration images, those that ptq gets")


class OrtStatic(Config):
    """Settings of ``ort-static``."""

    images: int = Field(default=256, ge=1, description="calibration images, those that ptq gets")


class NncfAccuracy(Nncf):
    """Settings of ``nncf-accuracy``."""

    judged: int = Field(
        default=1024, ge=1, description="training images that it judges accuracy by, at most: none that calibrates"
    )
    max_drop: float = Field(
        default=0.005, gt=0, description="loss of accuracy on them that it may leave, as a fraction"
    )


class Pt2e(Config):
    """Settings of ``pt2e``."""

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
    return Product("model.xml", "openvino", precision="int8", device="cpu", ending=parent.card.ending)


def judging(context: Context, config: NncfAccuracy) -> Context:
    """A context whose `calibration` gives training images to judge by, none of which ranges were found on.

    Raises:
        NotApplicableError: there are no others.
    """
    train = context.data.train
    calibrating = subset(train, config.images, context.seed).sources
    if not isinstance(calibrating, Selected) or len(calibrating) >= len(train):
        raise NotApplicableError(f"all {len(train)} training images calibrate, and none is left to judge by")
    rows = train.sources.rows if isinstance(train.sources, Selected) else np.arange(len(train))
    left = part(train, np.flatnonzero(~np.isin(rows, calibrating.rows)))
    return dataclasses.replace(context, data=dataclasses.replace(context.data, train=left))


def _nncf_accuracy(parent: Artifact, config: NncfAccuracy, context: Context, folder: Path) -> Product:
    import nncf
    import openvino

    _require_floats(parent)
    model = openvino.Core().read_model(str(parent.path))
    other = judging(context, config)
    labels = torch.cat([labels for _, labels in other.calibration(config.judged)]).tolist()
    judged = list(zip(_inputs(other, config.judged), labels, strict=True))

    def share_right(compiled: Any, items: Iterable[tuple[NDArray[np.float32], int]]) -> tuple[float, None]:
        right = [int(np.argmax(compiled(image)[0])) == label for image, label in items]
        return sum(right) / len(right), None

    quantized = nncf.quantize_with_accuracy_control(
        model,
        nncf.Dataset(list(_inputs(context, config.images))),
        nncf.Dataset(judged, lambda item: item[0]),
        validation_fn=share_right,
        max_drop=config.max_drop,
        drop_type=nncf.DropType.ABSOLUTE,
        preset=nncf.QuantizationPreset.PERFORMANCE,
        subset_size=config.images,
    )
    openvino.save_model(quantized, folder / "model.xml", compress_to_fp16=False)
    (folder / "model.bin").rename(folder / "model.xml.bin")
    return Product("model.xml", "openvino", precision="int8", device="cpu", ending=parent.card.ending)


def _pt2e(parent: Artifact, config: Pt2e, context: Context, folder: Path) -> Product:
    try:
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    except ImportError as error:
        raise NotApplicableError(f"torchao is not installed: {error}") from None
    example = context.example()
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    traced = torch.export.export(_each_call_alone(trace(parent.module())), (example,), dynamic_shapes=dynamic).module()
    # As torchao's tutorial for x86 has it: uint8 activations from a histogram, int8 weights per channel.
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(traced, quantizer)
    with torch.no_grad():
        for batch, _ in context.calibration(config.images):
            prepared(normalise(batch, context.preprocessing, torch.device("cpu"), torch.float32))
    converted = convert_pt2e(prepared)
    _drop_unread(converted)
    save_program(torch.export.export(converted, (example,), dynamic_shapes=dynamic), folder / "model.pt2")
    return Product("model.pt2", "exported_program", precision="int8", device="cpu", target=VNNI_X86)


def _drop_unread(module: fx.GraphModule) -> None:
    """Take away the float weights that torchao (0.18) keeps beside their integers: no engine needs them in the file."""
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name, _ in list(module.named_parameters()):
        if name not in read:
            path, _, own = name.rpartition(".")
            delattr(module.get_submodule(path), own)


def _each_call_alone(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with a module of its own for every call: its quantizer refuses those that are called twice.

    It matches by source partitions, which hold all calls of a module (torchao 0.18: "Input partition has more than one
    output node", on each block of torchvision's ResNets). What tracing noted of a call goes, for torch.export (2.14)
    would go by that: it names the module that was called, and not its copy.
    """
    called: set[str] = set()
    for number, node in enumerate(module.graph.nodes):
        node.meta.pop("nn_module_stack", None)
        if node.op == "call_module" and str(node.target) in called:
            name = f"{node.target}_again_{number}"
            module.add_submodule(name, copy.deepcopy(module.get_submodule(str(node.target))))
            node.target = name
        called.add(str(node.target))
    module.recompile()
    return module


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
        name="nncf-accuracy",
        summary="NNCF's quantization with accuracy control, for OpenVINO",
        config=NncfAccuracy,
        accepts=frozenset({"onnx"}),
        yields="onnx-int8",
        apply=_nncf_accuracy,
        libraries=("nncf", "openvino"),
        data="calibration",
    )
)
register(
    Pass(
        name="pt2e",
        summary="torchao's PT2E quantization, for torch's Inductor",
        config=Pt2e,
        accepts=frozenset({"module"}),
        yields="quantized",
        apply=_pt2e,
        libraries=("torch", "torchao"),
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
