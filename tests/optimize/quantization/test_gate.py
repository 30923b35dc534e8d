"""Int8 artifacts that are broken fail; healthy ones, small and random too, do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic

from optimize.errors import PassError
from optimize.export.onnx_graph.write import run_onnx
from optimize.passes.dynamic import Dynamic
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import Qat
from optimize.quantization import gate
from optimize.quantization.convert import write_quantized
from optimize.quantization.gate import Gate, check_answers
from optimize.tasks.classification import CLASSIFICATION
from tests.optimize.workbench import noise, noise_context, parent_of
from tests.processor import NEEDS_VNNI


def logits(seed: int = 0, images: int = 32, classes: int = 10) -> torch.Tensor:
    return torch.randn(images, classes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("noise", "decibels"), [(0.1, 20.0), (0.5, 6.0)])
def test_the_note_states_the_ratio_and_the_agreement(noise: float, decibels: float) -> None:
    expected = logits()
    note = check_answers(expected, expected * (1 + noise), Gate(), "these", task=CLASSIFICATION)
    assert note == f"these: SQNR {decibels:.1f} dB, same top-1 on 32 of 32 training images"
    assert check_answers(expected, expected, Gate(), "these", task=CLASSIFICATION) == (
        "these: equal logits, same top-1 on 32 of 32 training images"
    )


@pytest.mark.parametrize(
    "broken",
    [
        logits(1),
        torch.zeros(32, 10),
        -logits(),
        logits().roll(1, 0),
        logits() * 10,
        torch.full((32, 10), float("nan")),
        logits().masked_fill(torch.eye(32, 10, dtype=torch.bool), float("inf")),
    ],
    ids=["other", "zero", "negated", "of other images", "too large", "nan", "infinite"],
)
def test_answers_that_have_nothing_to_do_with_the_parents_fail(broken: torch.Tensor) -> None:
    with pytest.raises(PassError, match=r"this is broken|not finite"):
        check_answers(logits(), broken, Gate(), "these", task=CLASSIFICATION)


def test_few_equal_classes_fail_though_the_logits_are_near() -> None:
    """A constant that all classes share says nothing, and is most of the signal."""
    with pytest.raises(PassError, match=r"SQNR 3\d\.\d dB, same top-1 on \d of 32 .*min_agreement 0.3"):
        check_answers(100 + logits(0), 100 + logits(1), Gate(), "these", task=CLASSIFICATION)


def test_silence_for_silence_is_healthy_and_noise_for_silence_is_not() -> None:
    silence = torch.zeros(32, 10)
    check_answers(silence, silence, Gate(), "these", task=CLASSIFICATION)
    with pytest.raises(PassError, match=r"broken"):
        check_answers(silence, logits(), Gate(), "these", task=CLASSIFICATION)


@pytest.mark.parametrize("seed", range(4))
def test_small_random_networks_are_healthy(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 144, 4)
    ).eval()
    context = noise_context()
    product = PTQ.apply(parent_of(module, context, tmp_path / "parent"), Ptq(images=32), context, tmp_path)
    assert product.notes[-1].startswith("int8 against float arithmetic: SQNR")


def test_a_stage_whose_int8_lost_the_network_fails(session, trained, monkeypatch) -> None:
    monkeypatch.setattr(
        "optimize.quantization.static.calibrate",
        lambda prepared, context, images: prepared(torch.full((2, 1, 16, 16), 1e-3)),
    )
    with pytest.raises(PassError, match=r"int8 against float arithmetic: .* this is broken"):
        session.apply(trained, Ptq(images=33))


def test_dynamic_layers_that_lost_the_network_fail(session, trained, monkeypatch) -> None:
    original = quantize_dynamic

    def losing(module, recipe):
        module.head.weight.data.neg_()
        return original(module, recipe)

    monkeypatch.setattr("optimize.passes.dynamic.quantize_dynamic", losing)
    with pytest.raises(PassError, match=r"int8 linear layers against float arithmetic: .* this is broken"):
        session.apply(trained, Dynamic(per_channel=False))  # which no other test has in the store already


def test_a_qat_stage_is_checked_against_its_own_arithmetic(session, trained, monkeypatch) -> None:
    original = write_quantized

    def losing(prepared, *rest):
        product = original(prepared, *rest)
        for parameter in prepared.parameters():
            parameter.data.neg_()
        return product

    monkeypatch.setattr("optimize.passes.qat.write_quantized", losing)
    with pytest.raises(PassError, match=r"int8 against float arithmetic: .* this is broken"):
        session.apply(trained, Qat(epochs=1, freeze_observers_at=1, images=33, augment=False))


@pytest.mark.skipif("x86" not in torch.backends.quantized.supported_engines, reason="no x86 quantized kernels")
@NEEDS_VNNI
def test_kernels_that_saturate_are_noticed(tmp_path: Path, monkeypatch) -> None:
    from tests.optimize.quantization.test_int8_kernels import depthwise

    def saturating() -> None:
        monkeypatch.setattr(torch.backends.quantized, "engine", "x86")

    module, context = depthwise(128, 1), noise_context(train=noise(64, 1, 200, 256))
    for parameter in module.get_submodule("2").parameters():  # all products of one sign, each near the largest
        parameter.data.fill_(0.1)
    parent = parent_of(module, context, tmp_path / "parent")
    settings = Ptq(observer="minmax", min_agreement=0.0)
    PTQ.apply(parent, settings, context, tmp_path)
    monkeypatch.setattr(gate, "use_int8_kernels", saturating)
    with pytest.raises(PassError, match=r"kernels compute wrong results for these integers"):
        PTQ.apply(parent, settings, context, tmp_path)


def test_an_onnx_graph_that_computes_something_else_than_its_parent_fails(session, made, monkeypatch) -> None:
    original = run_onnx
    monkeypatch.setattr(
        "optimize.passes.onnx_int8.run_onnx", lambda path, images, **how: original(path, images.flip(0), **how)
    )
    with pytest.raises(PassError, match=r"ONNX Runtime against exact arithmetic: .* this is broken"):
        session.apply(made("ptq"), OnnxInt8(max_size_ratio=0.31))


def test_the_user_can_ask_for_more(session, trained) -> None:
    with pytest.raises(PassError, match=r"min_sqnr is 90 dB"):
        session.apply(trained, Ptq(min_sqnr=90.0))
