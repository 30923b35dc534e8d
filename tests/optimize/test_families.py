"""torchvision's families, with random weights, through the passes that rewrite graphs.

Of those whose logits keep a signal under random weights: in a random MobileNet or GoogLeNet the images differ by
less than the quantization noise, and their int8 answers mean nothing before they are trained.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from optimize.context import Context
from optimize.data.pixels import decoded
from optimize.data.splits import subset
from optimize.models.checkpoint import read_checkpoint
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.resolve import resolve_model
from optimize.passes.fuse import Fuse
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.run.session import Session
from optimize.store.objects import Store
from serve.runtime.images import normalise

from .workbench import CPU

#: torchvision's own blocks in fewer and narrower stages.
CONVNEXT = """
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

PREPROCESSING = {"resize": 64, "crop": [64, 64]}

def small_convnext(num_classes):
    stages = [CNBlockConfig(48, 96, 2), CNBlockConfig(96, 192, 2), CNBlockConfig(192, None, 2)]
    return ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=num_classes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "small_convnext"])
def test_a_family_keeps_its_answers_through_fuse_ptq_and_int8_onnx(name: str, digits, tmp_path: Path) -> None:
    (tmp_path / "convnext.py").write_text(CONVNEXT)
    source = resolve_model(f"{tmp_path / 'convnext.py'}:{name}" if name == "small_convnext" else name)
    preprocessing = choose_preprocessing(source, digits).preprocessing
    context = Context(digits, preprocessing, CPU)
    pixels = decoded(subset(digits.val, 24), preprocessing)
    inputs = normalise(pixels, preprocessing, CPU, torch.float32)
    torch.manual_seed(0)
    module = source.build(10, preprocessing.crop[0])
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0  # one pass gives the running statistics of real images, as a trained network has
    with torch.no_grad():
        module.train()(inputs)
        expected = module.eval()(inputs)
    torch.save(module.state_dict(), tmp_path / "weights.pth")

    session = Session(Store(tmp_path / "store"), source, context)
    base = session.baseline(checkpoint=read_checkpoint(tmp_path / "weights.pth")).artifact
    fused = session.apply(base, Fuse()).artifact
    quantized = session.apply(fused, Ptq(images=32)).artifact
    graph = session.apply(quantized, OnnxInt8()).artifact

    with torch.no_grad():
        folded = fused.module()(inputs)
        packed = torch.jit.load(str(quantized.path))(inputs)
    (exported,) = onnxruntime.InferenceSession(str(graph.path)).run(None, {"input": pixels.numpy()})
    torch.testing.assert_close(folded, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    centred = (expected - expected.mean(0)).flatten().numpy()
    for int8 in (packed.numpy(), exported):
        assert np.corrcoef(centred, (int8 - int8.mean(0)).flatten())[0, 1] > 0.9
    weights = sum(parameter.numel() * 4 for parameter in module.parameters())
    assert graph.path.stat().st_size <= 0.3 * weights
