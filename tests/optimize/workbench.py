"""What the tests of the passes make their inputs with: images, parents without a session, and a look into results."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from optimize.context import Context
from optimize.data.records import ImageData, Split
from optimize.data.targets import Labels
from optimize.export.onnx_graph.write import run_onnx
from optimize.export.program import write_weights
from optimize.listener import Silent
from optimize.passes.base import Pass
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.quantization.targets import TargetName
from optimize.store.artifact import REFERENCE_FILE, WEIGHTS_FILE, Artifact
from serve.common.config import Config
from serve.runtime.card.card import Card, Preprocessing, sha256_file, write_card
from serve.runtime.device.cpu_integers import TENSORRT
from serve.runtime.engines.base import open_engine, preferred
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program
from tests.narrow import AnyModule

CPU = torch.device("cpu")
GREY16 = Preprocessing(16, (16, 16), mean=(0.5,), std=(0.25,))
TINY_NET = Path(__file__).with_name("tiny_net.py")

Given = ParamSpec("Given")
Noted = TypeVar("Noted")
Answer = TypeVar("Answer")


def noting(
    notes: list[Noted], function: Callable[Given, Answer], note: Callable[Given, Noted]
) -> Callable[Given, Answer]:
    """``function``, and before each call ``note`` of its arguments is added to ``notes``."""

    def noted(*args: Given.args, **options: Given.kwargs) -> Answer:
        notes.append(note(*args, **options))
        return function(*args, **options)

    return noted


class OtherRun(Silent):
    """Another run on this machine, as a listener: it measures until it hears that somebody waits for it."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._held: int | None = None
        self.waited_for = False

    def measure(self) -> None:
        self._held = os.open(self._lock, os.O_RDWR)
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def said(self, message: str) -> None:
        if message == "another run is measuring on this machine; waiting for it to end":
            assert self._held is not None
            self.waited_for = True
            os.close(self._held)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def noise(count: int, seed: int = 0, low: int = 0, high: int = 256, classes: int = 4) -> Split:
    """Grey 16x16 noise with values in ``[low, high)``; the labels take turns."""
    pixels = np.random.default_rng(seed).integers(low, high, (count, 16, 16))
    return Split(tuple(png(image) for image in pixels), Labels(torch.arange(count) % classes))


def image_data(train: Split, val: Split, classes: int = 4) -> ImageData:
    return ImageData("noise", "classification", tuple("abcdefghij"[:classes]), train, val, "shift", (16, 16))


def noise_context(seed: int = 0, *, train: Split | None = None, val: Split | None = None) -> Context:
    data = image_data(train or noise(64, 1, 40, 200), val or noise(8, 2, 40, 200))
    return Context(data, GREY16, CPU, seed=seed)


def parent_of(module: nn.Module, context: Context, folder: Path, outputs: tuple[str, ...] = ("logits",)) -> Artifact:
    """An artifact of ``module``'s weights as they are, without the file of a program."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(module, folder)
    card = Card(
        name="baseline",
        model="test",
        task="classification",
        format="exported_program",
        file=WEIGHTS_FILE,
        precision="float32",
        input_dtype="float32",
        device="any",
        preprocessing=context.preprocessing,
        classes=context.data.classes,
        files={WEIGHTS_FILE: sha256_file(folder / WEIGHTS_FILE)},
        outputs=outputs,
    )
    return Artifact("baseline", "module", "0" * 64, folder, card, build_module=lambda: copy.deepcopy(module))


def applied(entry: Pass[Any], config: Config, parent: Artifact, context: Context, folder: Path) -> Artifact:
    """The artifact that a pass makes in a folder of its name, with its card beside it, without a session."""
    folder.mkdir(parents=True)
    product = entry.apply(parent, config, context, folder)
    card = dataclasses.replace(
        parent.card,
        name=folder.name,
        format=product.format,
        file=product.file,
        precision=product.precision,
        input_dtype=product.input_dtype,
        device=product.device,
        target=product.target,
        files={path.name: sha256_file(path) for path in folder.iterdir()},
    )
    write_card(folder, card)
    return Artifact(folder.name, entry.yields, "1" * 64, folder, card, parent)


def with_running_statistics(module: AnyModule, *shape: int, seed: int = 0) -> AnyModule:
    """Give the batch norms statistics and affine parameters far from their initial 0 and 1; in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for tensor, low, high in (
                (layer.running_mean, -1.0, 1.0),
                (layer.running_var, 0.5, 2.0),
                (layer.weight, 0.5, 1.5),
                (layer.bias, -0.5, 0.5),
            ):
                if tensor is not None:
                    tensor.data.uniform_(low, high, generator=generator)
    return module.eval()


def run(artifact: Artifact, batch: torch.Tensor) -> torch.Tensor:
    """Logits of the artifact's file in the runtime's engine on the CPU."""
    with torch.no_grad():
        return open_engine(artifact.folder, artifact.card, preferred(artifact.card, "cpu")).run(batch)[0]


def quantizers(folder: Path) -> list[tuple[float, int, int, int]]:
    """``(scale, zero point, low, high)`` of each activation quantizer of a ptq or qat artifact, in graph order."""
    found = [cast("tuple[float, int, int, int]", node.args[1:5]) for node in _nodes(folder, "quantize_per_tensor")]
    assert found  # or whatever is said of all of them would hold
    return found


def packed_weights(folder: Path) -> list[torch.Tensor]:
    """The int8 weights of a ptq or qat artifact's reference program, in graph order."""
    program = load_program(folder / REFERENCE_FILE)
    tensors = {**program.state_dict, **program.constants}
    found = [tensor for name, tensor in tensors.items() if "weight_int8" in name]
    assert found
    return found


def packed_in_torchscript(path: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each packed weight of torch's own int8 program: integers and scales."""
    use_int8_kernels()
    found = []
    for node in torch.jit.load(str(path)).inlined_graph.nodes():
        if node.kind().startswith(("quantized::conv", "quantized::linear")):
            constant = list(node.inputs())[1].node()
            weight, _ = _unpack(constant)
            found.append((weight.int_repr(), weight.q_per_channel_scales().float()))
    assert found
    return found


def packed_biases(path: Path) -> list[torch.Tensor]:
    """The bias of each layer of torch's own int8 program that has one."""
    use_int8_kernels()
    nodes = torch.jit.load(str(path)).inlined_graph.nodes()
    layers = [node for node in nodes if node.kind().startswith(("quantized::conv", "quantized::linear"))]
    biases = [_unpack(list(node.inputs())[1].node())[1] for node in layers]
    return [bias for bias in biases if bias is not None]


def _unpack(constant: torch._C.Node) -> tuple[torch.Tensor, torch.Tensor | None]:
    packed = constant.output().toIValue()
    unpack = (
        torch.ops.quantized.conv2d_unpack
        if "Conv" in str(constant.output().type())
        else torch.ops.quantized.linear_unpack
    )
    return unpack(packed)


def _nodes(folder: Path, operator: str) -> Iterator[torch.fx.Node]:

    for node in load_program(folder / REFERENCE_FILE).graph.nodes:
        if getattr(node.target, "_schema", None) is not None and node.target._schema.name.endswith(f"::{operator}"):
            yield node


def through_int8(module: nn.Module, folder: Path, config: Ptq, graph: OnnxInt8, context: Context) -> tuple[Path, Path]:
    """``ptq`` and then ``onnx-int8``; returns the folder of the first, ``ptq``, and the file of the second."""
    quantized = applied(PTQ, config, parent_of(module, context, folder / "parent"), context, folder / "ptq")
    return quantized.folder, applied(ONNX_INT8, graph, quantized, context, folder / "onnx").path


def lowered(module: nn.Module, folder: Path, target: TargetName = "auto") -> tuple[Path, Path]:
    """`through_int8` with min-max ranges, of grey noise, for images in floats."""
    return through_int8(module, folder, Ptq(observer="minmax", target=target), OnnxInt8(input="float"), noise_context())


def decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    """How far a signal stands out of what was made of it."""
    noise = (found.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def is_meant(module: nn.Module, folder: Path, target: TargetName, above: float) -> None:
    """Assert that the int8 graph of a network answers as the network does, to so many decibels."""
    _, path = lowered(module.eval(), folder, target)
    batch = noise_context().example(32)
    with torch.no_grad():
        expected = module(batch)
    # No CPU computes TensorRT's integers: those without VNNI would saturate.
    found = decibels(expected, run_onnx(path, batch, literal=target == TENSORRT))
    assert found > above, f"{found:.1f} dB"


class Between(nn.Module):
    """Two convolutions, and what is done between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.between(3 * self.first(x))).mean((2, 3)))


@contextmanager
def of_seven_bits() -> Iterator[None]:
    """Activations have ranges narrower than their type, as those of layers of few bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optimize.quantization.targets._UNSIGNED_MAX", 127)
        yield
