"""Layers that the user keeps in float or calibrates in another way: what patterns cover, and what they change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from optimize.data.records import Split
from optimize.data.targets import Labels
from optimize.errors import NotApplicableError
from optimize.listener import Silent
from optimize.passes.fuse import Fuse
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.choices import check_choices, resolve
from optimize.quantization.convert import trace_calls
from optimize.quantization.graph.repeated_calls import called_layer
from optimize.run.job import Job
from optimize.run.pipeline import run as run_recipe
from serve.runtime.errors import UserError
from tests.optimize.tiny_net import tiny
from tests.optimize.workbench import TINY_NET, noise_context, packed_in_torchscript, parent_of, png, quantizers

SHORT_QAT = {"epochs": 1, "freeze_observers_at": 0, "images": 64, "augment": False}


def kinds(path: Path) -> list[str]:
    """Operators of a TorchScript file."""
    return [node.kind() for node in torch.jit.load(str(path)).inlined_graph.nodes()]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (("head",), {"head"}),
        (("stem",), {"stem"}),
        (("stem.0", "head"), {"stem.0", "head"}),
        (("*.0",), {"stem.0", "depthwise.0", "expand.0", "residual.0"}),
        (("Linear",), {"head"}),
        (("Batch*",), {"stem.1", "depthwise.1", "expand.1", "residual.1"}),
    ],
)
def test_a_pattern_is_a_name_or_a_class(patterns: tuple[str, ...], kept: set[str]) -> None:
    chosen = resolve(tiny, Ptq(keep_float=patterns))
    assert chosen.kept == kept
    check_choices(tiny, Ptq(keep_float=patterns))


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        twice: torch.Tensor = self.shared(torch.relu(self.shared(batch)))
        return twice


def test_each_call_of_a_layer_has_a_name_of_its_own_by_which_the_layer_is_known() -> None:
    names = [
        str(node.target)
        for node in trace_calls(Twice().eval(), torch.zeros(2, 3)).graph.nodes
        if node.op == "call_module"
    ]
    assert len(set(names)) == 2
    assert [called_layer(name) for name in names] == ["shared", "shared"]
    assert called_layer("shared_call") == "shared_call"


def test_what_lies_beneath_and_a_second_call_are_covered() -> None:
    chosen = resolve(tiny, Ptq(keep_float=("stem",), overrides={"depthwise": {"observer": "minmax"}}))
    assert chosen.in_float("stem.0")
    assert chosen.in_float("stem.0_call7")
    assert not chosen.in_float("stems.0")
    assert chosen.observer("depthwise.0.convolution") == "minmax"
    assert chosen.observer("depthwise2") is None


def test_of_several_overrides_the_nearest_name_and_then_the_last_holds() -> None:
    overrides = {"*.0": {"observer": "minmax"}, "stem": {"observer": "histogram"}, "Conv2d": {"observer": "histogram"}}
    chosen = resolve(tiny, Ptq(overrides=overrides))
    assert chosen.observer("stem.2") == "histogram"
    assert chosen.observer("expand.0") == "histogram"
    assert resolve(tiny, Ptq(overrides=dict(reversed(overrides.items())))).observer("expand.0") == "minmax"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (Ptq(keep_float=("haed",)), r"ptq\.keep_float: the model has no module .* is 'haed' \(did you mean head"),
        (Qat(keep_float=("head", "Liner")), r"qat\.keep_float: .* is 'Liner' \(did you mean Linear"),
        (Ptq(overrides={"stem.9": {"observer": "minmax"}}), r"ptq\.overrides: .* 'stem\.9' \(did you mean stem"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(config, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        check_choices(tiny, config)


def test_all_patterns_that_match_nothing_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        check_choices(tiny, Ptq(keep_float=("haed", "head", "Liner"), overrides={"stem.9": {"observer": "minmax"}}))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "ptq.keep_float",
        "ptq.keep_float",
        "ptq.overrides",
    ]


def test_nothing_chosen_builds_no_model() -> None:
    def build() -> nn.Module:
        raise AssertionError("not needed")

    check_choices(build, Ptq())
    assert not resolve(build, Ptq()).kept


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [({"head": {"observr": "minmax"}}, "observr"), ({"head": {"observer": "max"}}, "max"), ({"head": 3}, "3")],
)
def test_an_override_that_says_nothing_known_is_refused(overrides, complaint) -> None:
    with pytest.raises(UserError, match=f"overrides: .*{complaint}"):
        Ptq(overrides=overrides)


@pytest.mark.parametrize("parents", [(), ("fuse",)], ids=["float", "fused"])
@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_layers_that_are_kept_stay_in_float_and_are_named(name, parents, session, trained) -> None:
    parent = session.apply(trained, Fuse()).artifact if parents else trained
    config = Ptq(keep_float=("head", "stem")) if name == "ptq" else Qat(keep_float=("head", "stem"), **SHORT_QAT)
    artifact = session.apply(parent, config).artifact
    operators = kinds(artifact.path)
    assert sum(kind.startswith("quantized::conv2d") for kind in operators) == 3
    assert "quantized::linear" not in operators
    assert artifact.card.notes[0].startswith("3 quantized layers")
    (note,) = [note for note in artifact.card.notes if "left in float" in note]
    assert note.startswith("2 layers left in float: stem.0")
    assert "head (Linear)" in note
    graph = session.apply(artifact, OnnxInt8(max_size_ratio=1.0)).artifact
    assert graph.card.notes[0].startswith("3 int8 weights")


def test_with_all_kept_there_is_nothing_to_quantize(session, trained) -> None:
    with pytest.raises(NotApplicableError, match="no layer that it can quantize"):
        session.apply(trained, Ptq(keep_float=("*",)))


def outliers() -> nn.Module:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4 * 100, 4)).eval()


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_an_override_changes_the_range_of_its_layer_and_no_other(name, tmp_path: Path) -> None:
    ranges = {}
    for label, overrides in {"plain": {}, "chosen": {"1": {"observer": "minmax"}}}.items():
        folder = tmp_path / label
        context = noise_context(train=noise_with_outliers())
        parent = parent_of(outliers(), context, folder / "parent")
        if name == "ptq":
            product = PTQ.apply(parent, Ptq(observer="moving-average", overrides=overrides), context, folder)
        else:
            settings = {**SHORT_QAT, "learning_rate": 1e-9, "images": 128, "batch_size": 32}
            product = QAT.apply(parent, Qat(overrides=overrides, **settings), context, folder)
        ranges[label] = list(dict.fromkeys(scale for scale, *_ in quantizers(folder)))
        assert any("minmax on 1" in note for note in product.notes) == bool(overrides)
    plain, chosen = ranges["plain"], ranges["chosen"]
    assert len(plain) == len(chosen) == 5
    changed = [not np.isclose(a, b, rtol=1e-3) for a, b in zip(plain, chosen, strict=True)]
    assert changed == [False, False, True, False, False]
    assert chosen[2] > 1.05 * plain[2], "the largest of all is more than the mean of each batch's largest"


def noise_with_outliers() -> Split:
    """Four batches, one of which has far larger contrast."""
    generator = np.random.default_rng(0)
    pixels = [generator.integers(0 if n % 37 == 0 else 120, 256 if n % 37 == 0 else 136, (16, 16)) for n in range(128)]
    return Split(tuple(png(image) for image in pixels), Labels(torch.arange(128) % 4))


@pytest.mark.parametrize("observer", ["minmax", "histogram", "moving-average"])
def test_qat_starts_from_the_ranges_that_were_asked_for(observer, session, trained) -> None:
    """Frozen from the start, and with weights that hardly move, they are those of ptq."""
    config = {**SHORT_QAT, "learning_rate": 1e-9, "freeze_norms_at": 0}
    started = session.apply(trained, Qat(observer=observer, **config)).artifact
    calibrated = session.apply(trained, Ptq(observer=observer, images=64)).artifact
    expected, found = quantizers(calibrated.folder), quantizers(started.folder)
    assert len(expected) == len(found)
    for (scale, zero_point, *_), (other, other_zero, *_) in zip(expected, found, strict=True):
        assert other == pytest.approx(scale, rel=0.02)
        assert abs(zero_point - other_zero) <= 1


def test_a_recipe_that_names_a_layer_wrongly_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "stages:\n  - pass: fuse\n  - pass: ptq\n    config:\n      keep_float: [haed]\n"
        "      overrides: {stem: {observer: minmax}}\n  - pass: qat\n    from: fuse\n    config: {keep_float: [stm]}\n"
    )
    job = Job(model=f"{TINY_NET}:tiny", recipe=recipe, store=tmp_path / "store", image_size=16)
    with pytest.raises(UserError) as caught:
        run_recipe(job, Silent())
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{recipe}:3: ptq.keep_float: ")
    assert "'haed' (did you mean head" in first
    assert second.startswith(f"{recipe}:7: qat.keep_float: ")
    assert "'stm' (did you mean stem" in second
    assert not list((tmp_path / "store").rglob("card.json"))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            Ptq(overrides={"dropout": {"weights": "per-tensor", "weight_observer": "mse"}}),
            "ptq.overrides: 'dropout' has no quantized weights, and so no weight_observer and no weights",
        ),
        (
            Ptq(keep_float=("stem", "head"), overrides={"Linear": {"observer": "minmax"}}),
            "ptq.overrides: 'Linear' stays in float because of keep_float: settings of int8 have no effect there",
        ),
    ],
)
def test_an_override_that_would_change_nothing_is_refused(config: Ptq, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        check_choices(tiny, config)
    assert str(caught.value) == complaint


def test_an_override_of_which_a_part_stays_in_float_holds_for_the_rest() -> None:
    check_choices(tiny, Ptq(keep_float=("stem",), overrides={"Conv2d": {"weights": "per-tensor"}}))
    check_choices(tiny, Ptq(overrides={"pool": {"observer": "minmax"}}))


def test_weights_of_single_layers_are_no_setting_of_qat() -> None:
    with pytest.raises(UserError, match="overrides: 'head': weights: only ptq has this setting; qat uses one scale"):
        Qat(overrides={"head": {"weights": "per-tensor"}})


def test_single_layers_have_one_scale_or_a_shorter_range_and_the_others_do_not(session, trained) -> None:
    fused = session.apply(trained, Fuse()).artifact
    overrides = {"residual": {"weights": "per-tensor"}, "Linear": {"weight_observer": "mse"}}
    plain, chosen = (session.apply(fused, Ptq(overrides=own)).artifact for own in ({}, overrides))
    assert "weights of single layers: mse on 1, per-tensor on 1" in chosen.card.notes
    pairs = zip(packed_in_torchscript(plain.path), packed_in_torchscript(chosen.path), strict=True)
    same, scales = [], []
    for (one, one_scales), (other, other_scales) in pairs:
        same.append(torch.equal(one, other) and torch.equal(one_scales, other_scales))
        scales.append(other_scales)
    assert same == [True, True, True, False, False], "stem, depthwise, expand; residual, head"
    assert len(scales[3]) == 32
    assert len(scales[3].unique()) == 1
    assert len(scales[4].unique()) > 1
