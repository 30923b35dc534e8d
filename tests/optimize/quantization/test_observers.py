"""Each observer's range against one computed here, in numpy, from the values themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping
from torch.ao.quantization.observer import PerChannelMinMaxObserver
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import Qat
from optimize.quantization.ranges import (
    OBSERVERS,
    CountingObserver,
    EntropyObserver,
    MseObserver,
    PercentileObserver,
)
from optimize.quantization.targets import target_named
from serve.runtime.errors import UserError
from tests.optimize.quantization.test_choices import noise_with_outliers, outliers
from tests.optimize.workbench import noise_context, parent_of, quantizers


def values(kind: str) -> np.ndarray:
    """A hundred thousand activations with a long tail: of both signs, of a ReLU, and all negative."""
    drawn = np.random.default_rng(0).standard_t(4, 100_000).astype(np.float32)
    return {"signed": drawn, "relu": np.maximum(drawn, 0), "negative": -np.abs(drawn) - 1}[kind]


KINDS = ("signed", "relu", "negative")


def seeing(kind: type[CountingObserver], seen: np.ndarray, batches: int = 4, **more: Any) -> CountingObserver:
    observer = kind(**{"dtype": torch.quint8, "quant_min": 0, "quant_max": 255, **more})
    for batch in np.array_split(seen, batches):
        observer(torch.from_numpy(batch))
    return observer


def width(seen: np.ndarray, bins: int) -> float:
    """Of a bin, where ``bins`` of them reach to the next power of two."""
    return float(2.0 ** np.ceil(np.log2(np.abs(seen).max())) / bins)


@pytest.mark.parametrize("kind", KINDS)
def test_percentile_ends_where_the_values_do(kind: str) -> None:
    seen = values(kind)
    low, high = (float(end) for end in seeing(PercentileObserver, seen).range())
    assert low == pytest.approx(np.quantile(seen, 0.0001), abs=width(seen, 8192))
    assert high == pytest.approx(np.quantile(seen, 0.9999), abs=width(seen, 8192))
    assert high < seen.max() or kind == "negative"


def quantization_error(seen: np.ndarray, low: float, high: float, levels: int = 255) -> float:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / levels
    zero = round(-low / scale)
    integers = np.clip(np.rint(seen.astype(np.float64) / scale) + zero, 0, levels)
    return float(np.mean(((integers - zero) * scale - seen) ** 2))


@pytest.mark.parametrize("levels", [255, 127])
@pytest.mark.parametrize("kind", KINDS)
def test_mse_is_as_good_as_the_best_of_a_search_over_all_pairs_of_ends(kind: str, levels: int) -> None:
    seen = values(kind)[::10]
    low, high = (float(end) for end in seeing(MseObserver, seen, quant_max=levels).range())
    found = quantization_error(seen, low, high, levels)
    tried = [
        quantization_error(seen, low, high, levels)
        for low in np.linspace(min(seen.min(), 0.0), 0.0, 25)
        for high in np.linspace(0.0, max(seen.max(), 0.0), 25)
        if high > low
    ]
    assert found <= min(tried) * 1.01
    assert found < quantization_error(seen, seen.min(), seen.max(), levels)


def test_each_name_finds_the_range_that_it_says() -> None:
    seen = values("signed")
    batches = np.array_split(seen, 4)
    ends: dict[str, tuple[float, float]] = {}
    for name in OBSERVERS:
        observer: Any = target_named("x86-vnni").observer(name)
        for batch in batches:
            observer(torch.from_numpy(batch))
            if name == "moving-average":
                observer.end_batch()
        if name == "moving-average":
            observer.settle()
        scale, zero = (float(part) for part in observer.calculate_qparams())
        ends[name] = (-zero * scale, (255 - zero) * scale)
    expected = {
        "minmax": (seen.min(), seen.max()),
        "moving-average": tuple(np.mean([(batch.min(), batch.max()) for batch in batches], axis=0)),
        "percentile": tuple(np.quantile(seen, (0.0001, 0.9999))),
    }
    for wanted, (low, high) in expected.items():
        assert ends[wanted] == pytest.approx((low, high), abs=float(high - low) / 255), wanted
    low, high = ends["entropy"]
    assert -low == pytest.approx(high, rel=0.02), "a threshold of magnitude"
    errors = {name: quantization_error(seen, *found) for name, found in ends.items()}
    assert errors["mse"] <= 1.01 * min(errors.values())
    assert errors["histogram"] <= 1.2 * errors["mse"]
    assert len({round(error, 9) for error in errors.values()}) == len(OBSERVERS)


def published_threshold(magnitudes: np.ndarray, levels: int) -> int:
    """Number of bins that are kept, by the loop of the slides, and with the bin of 0 filled as its neighbour."""
    bins = magnitudes.astype(np.float64)
    bins[0] = bins[1]
    divergences = {}
    for i in range(levels, len(bins) + 1):
        p = bins[:i].copy()
        p[i - 1] += bins[i:].sum()
        q = np.zeros(i)
        for level in range(levels):
            inside = [j for j in range(i) if j * levels // i == level] if i < 200 else None
            first, last = -(-level * i // levels), -(-(level + 1) * i // levels)
            assert inside is None or inside == list(range(first, last))
            part = bins[first:last]
            if (part > 0).any():
                q[first:last][part > 0] = part.sum() / (part > 0).sum()
        p, q = p / p.sum(), q / q.sum()
        if (q[p > 0] > 0).all():
            divergences[i] = np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0]))
    return min(divergences, key=lambda i: divergences[i])


@pytest.mark.parametrize(
    ("kind", "ranges", "levels"),
    [
        ("signed", {}, 128),
        ("relu", {}, 256),
        ("relu", {"quant_max": 127}, 128),
        (
            "relu",
            {"dtype": torch.qint8, "quant_min": -127, "quant_max": 127, "qscheme": torch.per_tensor_symmetric},
            128,
        ),
    ],
)
def test_entropy_is_the_published_search(kind: str, ranges: dict[str, Any], levels: int) -> None:
    seen = values(kind)
    seen *= 16.5 / np.abs(seen).max()  # little more than half of the bins are in use: the loop is slow
    step = width(seen, 2048)
    magnitudes = np.bincount((np.abs(seen) / step).astype(int))
    threshold = published_threshold(magnitudes, levels) * step
    low, high = (float(end) for end in seeing(EntropyObserver, seen, **ranges).range())
    assert high == pytest.approx(threshold, rel=1e-6)
    assert low == pytest.approx(-threshold if kind == "signed" else 0.0, rel=1e-6)
    assert threshold < 0.9 * np.abs(seen).max()


@settings(max_examples=30)
@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=30), st.randoms())
def test_counts_do_not_depend_on_order_and_none_is_lost(seen: list[float], chance) -> None:
    observers = []
    for _ in range(2):
        observer = CountingObserver(dtype=torch.quint8)
        for value in seen:
            observer(torch.tensor([value]))
        observers.append(observer)
        chance.shuffle(seen)
    assert torch.equal(observers[0].counts, observers[1].counts)
    assert int(observers[0].counts.sum()) == len(seen)
    assert float(observers[0].min_val) == min(seen)
    assert float(observers[0].max_val) == max(seen)


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_of_zeros_makes_no_bin_coarser(first: bool) -> None:
    seen = values("relu") / 10_000
    zeros = np.zeros(1000, np.float32)
    observer = seeing(PercentileObserver, np.concatenate([zeros, seen] if first else [seen, zeros]), batches=101)
    assert observer.exponent is not None
    assert 2.0**observer.exponent / 8192 == width(seen, 8192)
    assert observer.range() == seeing(PercentileObserver, np.append(seen, zeros), batches=1).range()
    assert int(observer.counts.sum()) == len(seen) + 1000


def test_more_zeros_are_counted_than_float32_has_whole_numbers_for() -> None:
    """VGG's first layer gives 32 images a hundred million values; torch counts those of a thread in float32."""
    zeros = (1 << 24) * torch.get_num_threads() + 1000
    observer = seeing(PercentileObserver, np.append(np.zeros(zeros, np.float32), np.float32(1)), batches=1)
    assert int(observer.counts.sum()) == zeros + 1
    assert observer.counts.min() >= 0


@pytest.mark.parametrize("name", list(OBSERVERS))
@pytest.mark.parametrize("constant", [0.0, 3.0, -3.0])
def test_a_constant_tensor_has_a_scale_all_the_same(name: str, constant: float) -> None:
    kinds: dict[Any, Any] = {**OBSERVERS}
    observer = kinds[name](dtype=torch.quint8, quant_min=0, quant_max=255)
    observer(torch.full((4, 4), constant))
    if hasattr(observer, "end_batch"):
        observer.end_batch()
        observer.settle()
    scale, zero_point = observer.calculate_qparams()
    assert float(scale) > 0
    assert 0 <= int(zero_point) <= 255
    assert (np.clip(round(constant / float(scale)) + int(zero_point), 0, 255) - int(zero_point)) * float(
        scale
    ) == pytest.approx(constant, abs=float(scale))


def test_values_that_are_not_finite_are_left_out() -> None:
    observer = seeing(PercentileObserver, np.array([1.0, np.nan, -2.0, np.inf], np.float32), batches=1)
    assert int(observer.counts.sum()) == 2
    assert float(observer.max_val) == 1.0


@pytest.mark.parametrize("kind", [EntropyObserver, PercentileObserver, MseObserver])
def test_they_are_torchs_observers_in_a_mapping(kind: type[CountingObserver]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    activation = kind.with_args(dtype=torch.quint8, quant_min=0, quant_max=255)
    weight = PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    images = torch.randn(32, 1, 16, 16)
    prepared = prepare_fx(model, QConfigMapping().set_global(QConfig(activation, weight)), (images,))
    prepared(images)
    observer: Any = prepared.get_submodule("activation_post_process_1")
    scale, _ = observer.calculate_qparams()
    converted = convert_fx(prepared)
    assert converted.get_submodule("0").scale == pytest.approx(float(scale))
    with torch.no_grad():
        assert torch.nn.functional.mse_loss(converted(images), model(images)) < 0.01 * model(images).var()


# --- in the passes -----------------------------------------------------------------------------------------------


def scales(tmp_path: Path, **config: object) -> tuple[list[float], tuple[str, ...]]:
    context = noise_context(train=noise_with_outliers())
    # No evaluation image can be seen where there is none.
    context = dataclasses.replace(context, data=dataclasses.replace(context.data, val=None))  # type: ignore[arg-type]
    folder = tmp_path / "-".join(map(str, config.values())).replace("/", "")
    product = PTQ.apply(
        parent_of(outliers(), context, folder / "parent"), Ptq(min_sqnr=-99.0, **config), context, folder
    )
    return [scale for scale, *_ in quantizers(folder)], product.notes


def test_auto_tries_all_on_calibration_images_and_says_what_it_chose(tmp_path: Path) -> None:
    """Its choice is the one with the best figure, and the artifact is what that observer makes."""
    found, notes = scales(tmp_path, observer="auto")
    (note,) = [note for note in notes if note.startswith("observer auto:")]
    chosen = note.removeprefix("observer auto: ").split(",")[0]
    assert all(name in note for name in OBSERVERS)
    figures = [float(word.split()[-1]) for word in note[note.index("(") + 1 : -1].split(", ")]
    best = float(note.split("SQNR of the logits ")[1].split(" dB")[0])
    assert best >= max(figures)
    assert "32 calibration images" in note
    assert found == pytest.approx(scales(tmp_path, observer=chosen)[0])


def test_other_images_are_seen_with_another_seed(tmp_path: Path) -> None:
    ranges = {seed: scales(tmp_path, observer="minmax", images=4, seed=seed)[0] for seed in (0, 1)}
    assert ranges[0] != ranges[1]


def test_the_word_with_an_underscore_is_the_same_setting() -> None:
    assert Ptq(observer="moving_average") == Ptq(observer="moving-average")
    assert Ptq(overrides={"x": {"observer": "moving_average"}}) == Ptq(overrides={"x": {"observer": "moving-average"}})
    with pytest.raises(UserError, match=r"observer.*'kl'"):
        Ptq(observer="kl")
    with pytest.raises(UserError, match="observer"):
        Qat(observer="auto")
