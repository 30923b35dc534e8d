"""Networks that nobody has written down yet are lowered to int8, and lose what rounding their layers alone loses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from optimize.context import Context
from optimize.data.records import Split
from optimize.data.targets import Labels
from optimize.export.onnx_graph.write import run_onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.quantization.targets import TargetName
from optimize.store.artifact import REFERENCE_FILE
from optimize.tracing.folding import fuse_module
from serve.runtime.card.card import Preprocessing
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program
from serve.runtime.model_files.script_file import load_script
from tests.optimize.networks import CLASSES, SIDE, Spec, networks
from tests.optimize.workbench import CPU, image_data, png, through_int8

#: A network takes seconds, most of them to export it: a usual run has time for few, and a search for a tenth of others.
EXAMPLES = 2 if settings().derandomize else settings().max_examples // 10

#: How many dB a graph may stay below a network of which each tensor is rounded once; see `rounded`. Of 46 that were
#: drawn (22 for x86), five were more than 1 dB below, and the lowest 4.9: too few to say how far the rarest come.
#: Without the border that is written out a graph was 18 dB below, without the range that is given to a gate 20.
MARGIN = 8.0


def pictures(count: int, seed: int) -> Split:
    """Waves with a disc before them, and some noise: in noise alone all images look alike to a network."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    made = []
    for _ in range(count):
        across, along, phase, height = (draw.uniform(*ends, 3) for ends in ((-12, 12), (-12, 12), (0, 6), (20, 90)))
        image = draw.uniform(70, 180, 3) + height * np.sin(across * x[..., None] + along * y[..., None] + phase)
        (left, top), radius = draw.uniform(0.2, 0.8, 2), draw.uniform(0.1, 0.35)
        image[(x - left) ** 2 + (y - top) ** 2 < radius**2] = draw.uniform(0, 255, 3)
        made.append(png((image + draw.normal(0, 15, image.shape)).clip(0, 255)))
    return Split(tuple(made), Labels(torch.arange(count) % CLASSES))


@functools.cache
def seen() -> Context:
    preprocessing = Preprocessing(SIDE, (SIDE, SIDE), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return Context(image_data(pictures(64, 1), pictures(8, 2), CLASSES), preprocessing, CPU, seed=0)


@dataclasses.dataclass(frozen=True)
class Answers:
    """Of a network in float, of its integers as torch computes them literally and packed, and of its ONNX graph.

    Of the graph literally, and, where it is for CPUs, as ONNX Runtime and OpenVINO rewrite it.
    """

    float: Tensor
    meant: Tensor
    packed: Tensor | None
    rewritten: dict[str, Tensor]
    graph: Tensor
    alone: Tensor
    three: Tensor


def answers(module: nn.Module, target: TargetName, *, fuse: bool) -> Answers:
    """Lower a network as the passes do, with min-max ranges and no floor, and ask what each form answers."""
    images = seen().example(32)
    floors: dict[str, Any] = {"min_sqnr": -999.0, "min_agreement": 0.0}
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        expected, folder = module(images), Path(name)
        before = fuse_module(copy.deepcopy(module), images[:4]) if fuse else module
        config = Ptq(observer="minmax", target=target, **floors)
        quantized, path = through_int8(before, folder, config, OnnxInt8(input="float", **floors), seen())
        meant = load_program(quantized / REFERENCE_FILE).module()(images)
        packed, rewritten = None, {}
        if target == ANY_X86:
            use_int8_kernels()
            packed = load_script(quantized / "model.pt", CPU)(images)
            (openvino,) = compile_bytes(path.read_bytes(), 1)(images.numpy()).values()
            rewritten = {"ONNX Runtime": run_onnx(path, images), "OpenVINO": torch.from_numpy(openvino)}
        graph, alone, three = (run_onnx(path, images[:count], literal=True) for count in (32, 1, 3))
    return Answers(expected, meant, packed, rewritten, graph, alone, three)


class EachRounded(TorchFunctionMode):
    """Rounds what each function of torch gives, to integers between its least and its greatest number."""

    def __init__(self, target: TargetName) -> None:
        super().__init__()
        self.symmetric, self.levels = target == TENSORRT, 254 if target == TENSORRT else 127

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        if isinstance(answer, Tensor) and answer.is_floating_point() and answer.dim() > 1 and not answer._is_view():
            answer.copy_(self.rounded(answer))
        return answer

    def rounded(self, x: Tensor) -> Tensor:
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        if self.symmetric:
            low, high = -max(-low, high), max(-low, high)
        scale = (high - low) / self.levels or 1.0
        return (x / scale).round() * scale


def rounded(module: nn.Module, target: TargetName) -> Tensor:
    """The answers where the weights of layers, and all that is computed, are rounded to integers of the target.

    The ends are those of the images that are asked; nothing is fused or left in float, which is all that is simple.
    """
    images, module = seen().example(32), copy.deepcopy(module)
    each = EachRounded(target)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("weight") and weight.dim() > 1:  # of layers, and no norm's
                scales = weight.flatten(1).abs().amax(1).reshape(-1, *[1] * (weight.dim() - 1)) / 127
                weight.copy_((weight / scales).round() * scales)
        images = each.rounded(images)
        with each:
            return module(images)


def above_noise(expected: Tensor, found: Tensor, other: Tensor | None = None) -> float:
    """How far what tells the images of ``expected`` apart stands out of what ``found`` differs from ``other``, in dB.

    ``other`` is ``expected``, unless it is given.
    """
    signal = (expected.double() - expected.double().mean(0)).square().mean()
    return float(10 * torch.log10(signal / (found.double() - (expected if other is None else other)).square().mean()))


@pytest.mark.timeout(60 * EXAMPLES)
@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
@settings(max_examples=EXAMPLES)
@given(spec=networks(), fuse=st.booleans())
def test_a_network_loses_what_rounding_loses_and_no_more(target: TargetName, spec: Spec, fuse: bool) -> None:
    module = spec.build(seen().example(32))
    with torch.no_grad():
        expected = module(seen().example(32))
    bound = above_noise(expected, rounded(module, target)) - MARGIN
    assume(bound > 0)  # else nothing of the answer need be left, or it was divided by what is rounded to zero
    found = answers(module, target, fuse=fuse)
    assert above_noise(expected, found.graph) > bound, "the ONNX graph"
    assert above_noise(expected, found.meant) > bound, "what the integers mean"
    if target == ANY_X86:
        assert found.packed is not None
        assert above_noise(expected, found.packed) > bound, "torch's kernels"
    for engine, answer in found.rewritten.items():
        assert above_noise(expected, answer) > bound, engine
    for few in (found.alone, found.three):
        # Sums in another order may end on the other side of a tie, and be rounded the other way.
        assert above_noise(expected, few, found.graph[: len(few)]) > bound, "a batch of another size"
