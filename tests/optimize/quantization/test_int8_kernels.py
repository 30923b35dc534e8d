"""torch's int8 kernels, as selected here, against exact arithmetic: no product of bytes is lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao.nn.quantized import Conv2d as PackedConv2d
from torch.nn import functional

from optimize.context import Context
from optimize.models.model_names import resolve_model
from optimize.passes.fuse import Fuse
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.targets import x86_target
from optimize.run.session import Session
from optimize.store.artifact import REFERENCE_FILE, Artifact
from optimize.store.objects import Store
from optimize.training.config import TrainingConfig
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.images.image_preprocessing import normalise
from tests.optimize.workbench import CPU, GREY16, TINY_NET, noise_context, parent_of, quantizers, run

NEEDS_X86 = pytest.mark.skipif(
    "x86" not in torch.backends.quantized.supported_engines, reason="torch has no x86 quantized kernels here"
)


def steps_off(channels: int, groups: int, stride: int, kernel: int = 3) -> torch.Tensor:
    """How many output steps a packed convolution is off, over random integers of the target's whole range."""
    generator = torch.Generator().manual_seed(channels + groups)
    most, levels = x86_target().weight_max, x86_target().activation_max
    weight = torch.randint(
        -most, most + 1, (channels, channels // groups, kernel, kernel), generator=generator
    ).double()
    pixels = torch.randint(0, levels + 1, (2, channels, 9, 9), generator=generator).double()
    sums = functional.conv2d(pixels, weight, padding=kernel // 2, groups=groups, stride=stride)
    low, high = sums.min().item(), sums.max().item()
    step = (high - low) / 255
    zero_point = round(-low / step)
    expected = (torch.round(sums / step) + zero_point).clamp(0, 255)

    use_int8_kernels()
    layer = PackedConv2d(channels, channels, kernel, padding=kernel // 2, groups=groups, stride=stride)
    scales, zeros = torch.ones(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.int64)
    layer.set_weight_bias(
        torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8), torch.zeros(channels)
    )
    layer.scale, layer.zero_point = step, zero_point
    found = layer(torch.quantize_per_tensor(pixels.float(), 1.0, 0, torch.quint8))
    return (found.int_repr().double() - expected).abs()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("channels", "groups"),
    [
        *((channels, channels) for channels in (64, 96, 100, 101, 102, 104, 128, 192, 256, 384, 512)),  # depthwise
        *((channels, groups) for channels in (64, 128, 256, 512) for groups in (2, 4, 32)),
        *((channels, channels // 2) for channels in (128, 256, 512)),
    ],
)
def test_grouped_convolutions_lose_no_product(channels: int, groups: int, stride: int) -> None:
    off = steps_off(channels, groups, stride)
    assert off.max() <= 1
    assert (off > 0).double().mean() < 1e-3, "ties of the last rounding only"


@pytest.mark.parametrize("kernel", [5, 7])
def test_wide_depthwise_kernels_lose_no_product(kernel: int) -> None:
    off = steps_off(128, 128, 1, kernel)
    assert off.max() <= 1
    assert (off > 0).double().mean() < 1e-3


def depthwise(channels: int, stride: int) -> nn.Module:
    """Each channel of the depthwise convolution sees the image over the whole range of its integers."""
    torch.manual_seed(channels)
    first = nn.Conv2d(1, channels, 1)
    for parameter in first.parameters():
        nn.init.ones_(parameter)
    last = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)
    return nn.Sequential(first, nn.ReLU(), last, nn.Flatten()).eval()


def packed_and_reference(folder: Path, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the file that is served, and of the same integers in float arithmetic."""
    use_int8_kernels()
    with torch.no_grad():
        return (
            torch.jit.load(str(folder / "model.pt"))(batch),
            torch.export.load(folder / REFERENCE_FILE).module()(batch),
        )


@pytest.mark.parametrize(("channels", "stride"), [(104, 1), (256, 2)])
@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_a_wide_depthwise_network_is_served_as_it_was_calibrated(
    name: str, channels: int, stride: int, tmp_path: Path
) -> None:
    context = noise_context()
    parent = parent_of(depthwise(channels, stride), context, tmp_path / "parent")
    if name == "ptq":
        PTQ.apply(parent, Ptq(observer="minmax"), context, tmp_path)
    else:
        QAT.apply(parent, Qat(epochs=1, freeze_observers_at=1, images=32), context, tmp_path)
    served, meant = packed_and_reference(tmp_path, context.example(32))
    step = quantizers(tmp_path)[-1][0]
    off = ((served - meant) / step).abs()
    assert off.max() <= 2.01, "a tie of the first rounding and one of the last"
    assert off.mean() < 0.02
    assert meant.unique().numel() > 100


def test_a_trained_wide_depthwise_network_classifies_in_int8_as_it_did(digits_context: Context, tmp_path: Path) -> None:
    session = Session(Store(tmp_path), resolve_model(f"{TINY_NET}:wide_depthwise"), digits_context)
    training = TrainingConfig(epochs=4, batch_size=32, learning_rate=0.1, augment=False)
    baseline = session.baseline(training).artifact
    quantized = session.apply(session.apply(baseline, Fuse()).artifact, Ptq()).artifact
    graph = session.apply(quantized, OnnxInt8(input="float")).artifact

    batches = [*digits_context.evaluation(64, CPU)]
    pixels, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    images = normalise(pixels, GREY16, CPU, torch.float32)

    def points(artifact: Artifact) -> float:
        return 100 * (run(artifact, images).argmax(1) == labels).double().mean().item()

    assert points(baseline) > 90
    assert abs(points(quantized) - points(baseline)) <= 1
    assert abs(points(quantized) - points(graph)) <= 0.5


@NEEDS_X86
def test_a_file_that_was_written_under_another_engine_is_packed_for_the_one_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = noise_context()
    parent = parent_of(depthwise(128, 1), context, tmp_path / "parent")
    PTQ.apply(parent, Ptq(observer="minmax"), context, tmp_path)
    batch = context.example(16)
    served, _ = packed_and_reference(tmp_path, batch)
    monkeypatch.setattr(torch.backends.quantized, "engine", "x86")
    other = torch.jit.load(str(tmp_path / "model.pt"))
    torch.jit.save(other, str(tmp_path / "other.pt"))
    use_int8_kernels()
    with torch.no_grad():
        assert torch.equal(torch.jit.load(str(tmp_path / "other.pt"))(batch), served)
