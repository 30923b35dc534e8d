"""One small network of each of torchvision's families through the passes that rewrite graphs.

Their weights are drawn so that images still differ at the end (`benchmarks.zoo.weights`): in a network with the
library's own random weights they differ by less than the quantization noise, and int8 answers mean nothing.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, convert_fx
from torchvision import models

from benchmarks.zoo.agreement import agreements, compared
from benchmarks.zoo.names import family
from benchmarks.zoo.record import CLEAR_DB, Agreement, Signal
from benchmarks.zoo.weights import fit_head, initialise
from optimize.context import Context
from optimize.data.loading import loader
from optimize.data.pixels import decoded
from optimize.data.records import ImageData
from optimize.data.splits import subset
from optimize.models.model_names import resolve_model
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import resolve
from optimize.quantization.lowering.narrow_ranges import clamp_packed
from optimize.quantization.observers import settle_weights
from optimize.quantization.static import calibrating, observing
from optimize.quantization.targets import target_named
from optimize.run.session import Session
from optimize.store.objects import Store
from optimize.tracing.folding import fuse_module
from serve.runtime.card.card import Preprocessing
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.images.image_preprocessing import normalise
from tests.optimize.families import FAMILIES, build, side
from tests.optimize.workbench import CPU, parent_of
from tests.processor import VNNI, WIDEST

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


#: Those that go the whole way here, a few seconds each; all go it at full size in ``make zoo``.
WHOLE = ("convnext", "vit")


def context_of(name: str, digits: ImageData) -> Context:
    return Context(digits, Preprocessing(side(name), (side(name), side(name))), CPU)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_its_answers_in_integers_and_in_torchs_kernels(name: str, digits: ImageData) -> None:
    """In this process, without files and engines."""
    context, config = context_of(name, digits), Ptq(images=32)
    module, signal = drawn(name, context)
    example = context.example()
    fused = fuse_module(module, example)
    prepared = observing(lambda: fused, config, resolve(lambda: module, config), example)("histogram")
    calibrate(prepared, context, calibrating(config, context))
    settle_weights(prepared, example)
    backend = target_named("auto").backend_config()
    use_int8_kernels()
    packed = convert_fx(copy.deepcopy(prepared), backend_config=backend)
    reference = _convert_to_reference_decomposed_fx(copy.deepcopy(prepared), backend_config=backend)
    assert clamp_packed(packed, reference.graph, example) == 0
    pixels = decoded(subset(digits.val, 32), context.preprocessing)
    inputs = normalise(pixels, context.preprocessing, CPU, torch.float32)
    with torch.no_grad():
        expected, folded, meant, found = (each(inputs) for each in (module, fused, reference, packed))
    torch.testing.assert_close(folded, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    assert (compared("integers", "float", expected, meant).sqnr_db or np.inf) > least(signal)
    assert (compared("kernels", "integers", meant, found).sqnr_db or np.inf) > 12.0
    left = sum(parameter.numel() for parameter in packed.parameters())
    weights = sum(parameter.numel() for parameter in module.parameters())
    assert left / weights <= 0.06 + LARGER.get(name, 0.0)  # with a quarter of the rest: 0.3, and what it may have more


@pytest.mark.parametrize("name", WHOLE)
def test_a_family_keeps_its_answers_through_fuse_ptq_and_int8_onnx(
    name: str, digits: ImageData, tmp_path: Path
) -> None:
    context = context_of(name, digits)
    module, signal = drawn(name, context)
    (tmp_path / "code.py").write_text(CODE.format(name=name))
    session = Session(Store(tmp_path / "store"), resolve_model(f"{tmp_path / 'code.py'}:network"), context)
    fused = parent_of(fuse_module(module, context.example()), context, tmp_path / "fuse")
    quantized = session.apply(fused, Ptq(images=32)).artifact
    graph = session.apply(quantized, OnnxInt8()).artifact
    found = agreements(graph, module, decoded(subset(digits.val, 32), context.preprocessing))
    engines = {"torchscript", "onnxruntime", "openvino"}
    assert {each.engine for each in found} == {"reference program", "onnxruntime, node by node", *engines}
    assert worst(found, "float") > least(signal), found
    assert worst(found, "integers") > 12.0, found
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert graph.path.stat().st_size <= (0.3 + LARGER.get(name, 0.0)) * weights + (256 << 10)


def drawn(name: str, context: Context) -> tuple[nn.Module, Signal]:
    """The small network of a family, its head fitted to the digits, and what rounding leaves of it."""

    def batches(split, count: int):
        for images, labels in loader(split, context.preprocessing, batch_size=32, device=CPU, limit=count):
            yield normalise(images, context.preprocessing, CPU, torch.float32), labels

    module = build(name)
    shown, judged = (lambda: batches(context.data.train, 128)), (lambda: batches(context.data.val, 32))
    initialise(module, next(batches(context.data.train, 32))[0], widest=WIDEST)
    signal = fit_head(module, shown, judged, widest=WIDEST)
    if VNNI:
        assert signal.rounding_db > 9.0  # of what the head reads at most an eighth is what 8 bits cannot hold
    elif signal.rounding_db < CLEAR_DB:
        pytest.skip(f"random weights keep their signal {signal.rounding_db:.1f} dB above the rounding of 7-bit weights")
    assert signal.top1 > 0.2  # guessing is right on a tenth
    return module, signal


def least(signal: Signal) -> float:
    """The SQNR in dB that int8 must keep: with 4 dB for what `Signal` does not round, such as sums, 6 at most."""
    return min(6.0, signal.rounding_db - 4.0)


def worst(found: tuple[Agreement, ...], reference: str) -> float:
    """The lowest SQNR in dB against it."""
    return min(each.sqnr_db or np.inf for each in found if each.reference == reference)
