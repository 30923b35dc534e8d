"""One small network of each of torchvision's families through the passes that rewrite graphs.

Their weights are drawn so that images still differ at the end (`benchmarks.zoo.weights`): in a network with the
library's own random weights they differ by less than the quantization noise, and int8 answers mean nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models

from benchmarks.zoo.agreement import agreements
from benchmarks.zoo.names import family
from benchmarks.zoo.record import Agreement
from benchmarks.zoo.weights import fit_head, initialise
from optimize.context import Context
from optimize.data.loading import loader
from optimize.data.pixels import decoded
from optimize.data.records import ImageData
from optimize.data.splits import subset
from optimize.models.checkpoint import read_checkpoint
from optimize.models.resolve import resolve_model
from optimize.passes.fuse import Fuse
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.quantization.targets import TargetName
from optimize.run.session import Session
from optimize.store.objects import Store
from serve.runtime.card import Preprocessing
from serve.runtime.images import normalise

from .families import FAMILIES, build, side
from .workbench import CPU

CODE = """
from tests.optimize.families import FAMILIES

def network(num_classes):
    return FAMILIES[{name!r}]()
"""
#: More than this is left in float by torch.ao, or is no weight of a layer: the share of such bytes in small networks.
LARGER = {"swin": 0.1, "swin_v2": 0.1, "maxvit": 0.1, "convnext": 0.05}


def test_the_families_are_those_of_all_of_torchvisions_classifiers() -> None:
    names = models.list_models(module=models)
    alike = {"wide_resnet": "resnet", "efficientnet_v2": "efficientnet", "shufflenet_v": "shufflenet"}
    found = {alike.get(family(name), family(name)) for name in names}
    assert len(names) == 80
    assert found == set(FAMILIES)


#: Of the others the longest take ten seconds and more.
QUICK = ("convnext", "resnet", "vit")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_keeps_its_answers_through_fuse_ptq_and_int8_onnx(name: str, digits) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest would keep gigabytes
        keeps_its_answers(name, "auto", digits, Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext", "mobilenet_v3", "resnet", "swin_v2", "vit"])
def test_a_family_keeps_its_answers_in_tensorrts_integers(name: str, digits) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keeps_its_answers(name, "tensorrt", digits, Path(folder))


def keeps_its_answers(name: str, target: TargetName, digits: ImageData, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE.format(name=name))
    source = resolve_model(f"{tmp_path / 'code.py'}:network")
    preprocessing = Preprocessing(side(name), (side(name), side(name)))
    context = Context(digits, preprocessing, CPU)
    module = drawn(name, context)
    torch.save(module.state_dict(), tmp_path / "weights.pth")
    session = Session(Store(tmp_path / "store"), source, context)
    base = session.baseline(checkpoint=read_checkpoint(tmp_path / "weights.pth")).artifact
    fused = session.apply(base, Fuse()).artifact
    pixels = decoded(subset(digits.val, 32), preprocessing)
    inputs = normalise(pixels, preprocessing, CPU, torch.float32)
    with torch.no_grad():
        expected, folded = module(inputs), fused.module()(inputs)
    torch.testing.assert_close(folded, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    quantized = session.apply(fused, Ptq(images=32, target=target)).artifact
    graph = session.apply(quantized, OnnxInt8()).artifact
    found = agreements(graph, module, pixels)
    engines = {"torchscript", "onnxruntime", "openvino"} if target == "auto" else set()
    assert {each.engine for each in found} == {"reference program", "onnxruntime, node by node", *engines}
    assert worst(found, "float") > 6.0, found
    assert worst(found, "integers") > 12.0, found
    assert graph.path.stat().st_size <= (0.3 + LARGER.get(name, 0.0)) * weights + (256 << 10)


def drawn(name: str, context: Context) -> nn.Module:
    """The small network of a family, its head fitted to the digits."""

    def batches(split, count: int):
        for images, labels in loader(split, context.preprocessing, batch_size=32, device=CPU, limit=count):
            yield normalise(images, context.preprocessing, CPU, torch.float32), labels

    module = build(name)
    initialise(module, next(batches(context.data.train, 32))[0])
    signal = fit_head(module, lambda: batches(context.data.train, 192), lambda: batches(context.data.val, 64))
    assert signal.rounding_db > 10.0  # of what the head reads at most a tenth is what 8 bits cannot hold
    assert signal.top1 > 0.2  # guessing is right on a tenth
    return module


def worst(found: tuple[Agreement, ...], reference: str) -> float:
    """The lowest SQNR in dB against it."""
    return min(each.sqnr_db or np.inf for each in found if each.reference == reference)
