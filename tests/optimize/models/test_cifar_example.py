"""The example of a user's own model: its structure, and the accuracy of weights that were trained elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from optimize.data.formats.base import open_data
from optimize.data.loading import loader
from optimize.models.checkpoint import read_checkpoint
from optimize.models.model_names import resolve_model
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.weight_matching import load_into
from serve.runtime.images import image_preprocessing

ROOT = Path(__file__).parents[3]
EXAMPLE = f"{ROOT / 'examples' / 'cifar_resnet.py'}:resnet20"
SHARED = ROOT.parent / "shared" / "data"


def test_resnet20_has_the_papers_parameter_count():
    # Table 6 gives 0.27 M. By hand: convolutions 432 + 6*2304 + 4608+9216*5 + 18432+36864*5 = 267,984 ...
    convolutions = 3 * 16 * 9 + 6 * 16 * 16 * 9 + (16 * 32 + 5 * 32 * 32) * 9 + (32 * 64 + 5 * 64 * 64) * 9
    # ... and two numbers a channel for BatchNorm, and the head.
    expected = convolutions + 2 * (7 * 16 + 6 * 32 + 6 * 64) + 64 * 10 + 10
    model = resolve_model(EXAMPLE).build(10)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 269_722


def test_the_shortcut_subsamples_and_pads_channels_with_zeros():
    model = resolve_model(EXAMPLE).build(10)
    images_ = torch.randn(2, 16, 8, 8)
    out = model.get_submodule("layer2.0.shortcut")(images_)
    assert out.shape == (2, 32, 4, 4)
    assert torch.equal(out[:, 8:24], images_[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_it_traces_with_fx_and_exports_to_onnx_with_any_batch(tmp_path):
    torch.manual_seed(0)
    model = resolve_model(EXAMPLE).build(7).eval()
    traced = torch.fx.symbolic_trace(model)
    batch = torch.randn(2, 3, 32, 32)
    torch.onnx.export(
        traced, (batch,), str(tmp_path / "net.onnx"), dynamo=True, dynamic_shapes=({0: torch.export.Dim("N")},)
    )
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    five = torch.randn(5, 3, 32, 32)
    (output,) = session.run(None, {session.get_inputs()[0].name: five.numpy()})
    np.testing.assert_allclose(output, model(five).detach().numpy(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the CIFAR-10 files and the checkpoint are not here")
def test_the_published_checkpoint_reaches_81_percent_on_the_re_encoded_test_images(tmp_path):
    subprocess.run(["tar", "-xzf", SHARED / "cifar10-jpeg.tar.gz", "-C", tmp_path, "test"], check=True)
    (test,) = tmp_path.rglob("test")
    data = open_data(f"imagefolder:{test}")
    source = resolve_model(EXAMPLE)
    model = source.build(len(data.classes)).eval()
    load_into(model, read_checkpoint(SHARED / "cifar10-resnet20.th"), SHARED / "cifar10-resnet20.th")
    preprocessing = choose_preprocessing(source, data).preprocessing
    right = seen = 0
    with torch.inference_mode():
        for split in (data.train, data.val):  # without a train/ beside it, test/ is split; all of it counts
            for batch, labels in loader(split, preprocessing, batch_size=256, device=torch.device("cpu")):
                logits = model(image_preprocessing.normalise(batch, preprocessing, torch.device("cpu"), torch.float32))
                right += int((logits.argmax(1) == labels).sum())
                seen += len(labels)
    assert seen == 10_000
    assert right / seen == pytest.approx(0.810, abs=0.001)
