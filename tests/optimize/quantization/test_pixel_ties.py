"""Pixels that lie halfway between two integers of the image's quantizer: its range is widened until none does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from optimize.context import Context
from optimize.data.records import Split
from optimize.data.targets import Labels
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.observer_choice import Observer
from optimize.quantization.targets import TargetName
from tests.optimize.workbench import noise_context, parent_of, png, quantizers

PIXELS = torch.arange(256, dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)).eval()


def half_black(count: int) -> Split:
    """Grey noise with a black half: of 7 bits, and a mean of 0.5, black and white are the only ties."""
    pixels = np.random.default_rng(1).integers(0, 256, (count, 16, 16))
    pixels[:, :8] = 0
    return Split(tuple(png(image) for image in pixels), Labels(torch.arange(count) % 4))


def context(mean: float, std: float) -> Context:
    found = noise_context(train=half_black(64))
    return dataclasses.replace(found, preprocessing=dataclasses.replace(found.preprocessing, mean=(mean,), std=(std,)))


def places(folder: Path, mean: float, std: float) -> torch.Tensor:
    """Where the pixels lie on the grid of the image's quantizer, in exact arithmetic."""
    scale, zero_point, _, _ = quantizers(folder)[0]
    return (PIXELS / 255 - mean) / std / scale + zero_point


def distinct(place: torch.Tensor) -> int:
    return len(place.round().unique())


@pytest.mark.parametrize(
    ("observer", "target"), [("moving-average", "auto"), ("percentile", "auto"), ("minmax", "tensorrt")]
)
def test_no_pixel_is_a_tie_and_nearly_each_has_its_own_integer(
    observer: Observer, target: TargetName, tmp_path: Path
) -> None:
    own = context(0.5, 0.5)
    parent = parent_of(network(), own, tmp_path / "parent")
    (tmp_path / "ptq").mkdir()
    PTQ.apply(parent, Ptq(observer=observer, target=target), own, tmp_path / "ptq")
    place = places(tmp_path / "ptq", 0.5, 0.5)
    assert ((place - place.floor() - 0.5).abs() > 1e-3).all()
    assert distinct(place) >= 253
    assert place.min() >= quantizers(tmp_path / "ptq")[0][2] - 0.5
    assert place.max() <= quantizers(tmp_path / "ptq")[0][3] + 0.5


def test_ranges_that_training_moved_are_widened_when_they_are_written(tmp_path: Path) -> None:
    own = context(0.5, 0.5)
    parent = parent_of(network(), own, tmp_path / "parent")
    (tmp_path / "qat").mkdir()
    QAT.apply(parent, Qat(epochs=1, batch_size=32, min_sqnr=-50), own, tmp_path / "qat")
    place = places(tmp_path / "qat", 0.5, 0.5)
    assert ((place - place.floor() - 0.5).abs() > 1e-3).all()


def test_other_ranges_stay_as_they_were_observed(tmp_path: Path) -> None:
    own = context(0.4, 0.4)
    parent = parent_of(network(), own, tmp_path / "parent")
    (tmp_path / "ptq").mkdir()
    PTQ.apply(parent, Ptq(observer="minmax"), own, tmp_path / "ptq")
    scale, _, low, high = quantizers(tmp_path / "ptq")[0]
    assert scale == pytest.approx(1 / 0.4 / (high - low), rel=1e-6)


class NormalisedOnceMore(nn.Module):
    """Two halves of an image, normalised by 0.4 and 0.4, to what 0.5 and 0.5 give: as GoogLeNet does its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x[..., :8] * 0.8 - 0.2, 0.8 * x[..., 8:] + -0.2], 3)
        answer: torch.Tensor = self.layers(x)
        return answer


def test_an_image_that_the_network_normalises_once_more_is_rounded_once_behind_it(tmp_path: Path) -> None:
    own = context(0.4, 0.4)
    parent = parent_of(NormalisedOnceMore().eval(), own, tmp_path / "parent")
    (tmp_path / "ptq").mkdir()
    PTQ.apply(parent, Ptq(observer="minmax"), own, tmp_path / "ptq")
    found = quantizers(tmp_path / "ptq")
    # The image, and what the convolution, the pool and the last layer give.
    assert len(found) == 4
    place = (PIXELS / 255 - 0.5) / 0.5 / found[0][0] + found[0][1]
    assert ((place - place.floor() - 0.5).abs() > 1e-3).all()
