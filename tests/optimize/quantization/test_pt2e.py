"""The second front end of ``ptq``: torchao's PT2E gives the integers that FX gives, or says that it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from optimize.context import Context
from optimize.measure.bench import Bench
from optimize.measure.timing import Timing
from optimize.passes.fuse import Fuse
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import PTQ, Ptq, check
from optimize.quantization.graph.explicit_quantizers import quantizing
from optimize.quantization.lowering.integer_biases import WEIGHTED
from optimize.quantization.lowering.qdq import explicit_form, lower
from optimize.quantization.pt2e import _drop_bounds
from optimize.quantization.targets import target_named
from optimize.run.certification.parity_certificates import reference_origin
from optimize.run.report_rows import measure
from optimize.store.artifact import REFERENCE_FILE, Artifact
from optimize.tracing.folding import fuse_module
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import open_engine
from serve.runtime.errors import UserError
from serve.runtime.model_files.program_file import load_program
from tests.optimize.conftest import SHORT
from tests.optimize.explicit_nets import Int8Linear
from tests.optimize.families import FAMILIES
from tests.optimize.tiny_net import tiny
from tests.optimize.workbench import (
    CPU,
    image_data,
    noise,
    packed_weights,
    parent_of,
    quantizers,
    with_running_statistics,
)

COLOUR32 = Preprocessing(32, (32, 32), mean=(0.5,) * 3, std=(0.25,) * 3)


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao")


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({"target": "tensorrt"}, "no target: tensorrt;"),
        ({"rounding": "adaround"}, "no rounding: adaround;"),
        ({"bias_correction": True, "rounding": "adaround"}, "no rounding: adaround and no bias_correction: true;"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_line_before_anything_is_made(settings: dict[str, Any], lacking: str) -> None:
    with pytest.raises(UserError, match=f"^ptq.front_end: pt2e has {lacking} front_end: fx has$"):
        check(tiny, Ptq(front_end="pt2e", **settings))
    check(tiny, Ptq(front_end="fx", **settings))


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"^ptq\.front_end: pt2e needs torchao, .*install the extra pt2e$"):
        check(tiny, Ptq(front_end="pt2e"))
    check(tiny, Ptq())


@pytest.mark.parametrize("front_end", ["fx", "pt2e"])
def test_another_torchao_makes_what_pt2e_makes_anew_and_nothing_else(
    front_end: str, session: Any, trained: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimize.passes.ptq.installed", lambda: True)  # so it may, and nothing is made here
    monkeypatch.setattr(type(session), "_obtain", lambda self, planned, write, parent: planned.key)

    def key(torchao: str | None) -> str:
        monkeypatch.setattr("optimize.run.session.installed_version", {"torchao": torchao}.get)
        return str(session.apply(trained, Ptq(front_end=front_end)))

    assert (len({key("0.18.0"), key("0.19.0"), key(None)}) == 1) == (front_end == "fx")


def test_another_front_end_is_none() -> None:
    with pytest.raises(UserError, match="front_end"):
        Ptq(front_end="eager")


def context() -> Context:
    return Context(image_data(noise(24, 1), noise(8, 2), 4), COLOUR32, CPU)


def both(module: nn.Module, folder: Path, **settings: Any) -> tuple[Path, Path]:
    """Folders of what the two front ends make of one network."""
    here, parent = context(), parent_of(module, context(), folder / "parent")
    found = []
    for name in ("fx", "pt2e"):
        config = Ptq(front_end=name, images=24, min_sqnr=-99, min_agreement=0, **settings)
        (folder / name).mkdir()
        PTQ.apply(parent, config, here, folder / name)
        found.append(folder / name)
    return found[0], found[1]


def tensors(folder: Path, operator: str, place: int) -> list[torch.Tensor]:
    """What layers' dequantizers of this kind are given at an argument, in the order of the layers."""
    program = load_program(folder / REFERENCE_FILE)
    values = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants
    found = []
    for node in program.graph.nodes:
        if node.target in WEIGHTED and quantizing(node.args[1]) == operator:
            found.append(values[names[node.args[1].args[place].name]])
    assert found
    return found


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize(("build", "layers"), [(models.resnet18, 21), (models.mobilenet_v2, 53)])
def test_torchvisions_networks_have_equal_weights_and_answers_a_step_apart_at_most(
    build: Callable[..., nn.Module], layers: int, torchao: None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = fuse_module(with_running_statistics(build(num_classes=4)), torch.zeros(2, 3, 32, 32))
    fx, pt2e = both(module, tmp_path, observer="minmax")
    for place in (0, 1):  # integers, and their scales
        pairs = list(
            zip(
                *(tensors(folder, "dequantize_per_channel", place) for folder in (fx, pt2e)),
                strict=True,
            )
        )
        assert len(pairs) == layers
        assert all(torch.equal(one, other) for one, other in pairs)
    assert quantizers(fx) == quantizers(pt2e)
    images = context().example(16)
    with torch.no_grad():
        one, other = (load_program(folder / REFERENCE_FILE).module()(images) for folder in (fx, pt2e))
    step = quantizers(fx)[-1][0]
    assert (one - other).abs().max() <= 1.01 * step
    assert one.std() > 2 * step, "they answer"


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("mobilenet_v3", 16), ("shufflenet", 21), ("vit", 14)])
def test_attention_excitation_and_shuffled_channels_become_graphs_that_the_linter_passes(
    name: str, layers: int, torchao: None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    here = context()
    parent = parent_of(fuse_module(with_running_statistics(FAMILIES[name]()), here.example()), here, tmp_path / "p")
    (tmp_path / "pt2e").mkdir()
    config = Ptq(front_end="pt2e", observer="minmax", images=24, min_sqnr=-99, min_agreement=0)
    PTQ.apply(parent, config, here, tmp_path / "pt2e")
    program = load_program(tmp_path / "pt2e" / REFERENCE_FILE)
    found = lower(program, here.example(4), tmp_path / "model.onnx", target_named("auto"))
    assert found.weights == layers
    assert found.activations > layers


@pytest.mark.peers
def test_the_artifact_is_its_own_reference_and_its_graph_is_certified_against_it(
    torchao: None, session: Any, trained: Artifact
) -> None:
    fused = session.apply(trained, Fuse())
    quantized = session.apply(fused.artifact, Ptq(front_end="pt2e"), "ptq-pt2e")
    card = quantized.artifact.card
    assert (card.file, card.format, card.precision) == (REFERENCE_FILE, "exported_program", "int8 in float arithmetic")
    assert card.notes[0].startswith("5 quantized layers, activations 0 to ")
    assert "PT2E has no program for torch's kernels" in card.notes[0]
    graph = session.apply(quantized.artifact, OnnxInt8(), "graph")
    assert graph.artifact.card.target == card.target
    assert reference_origin(quantized.artifact) is None, "there is nothing to compare it with"
    bench = Bench(session.store, session.context, Timing(rounds=1, batch_sizes=(1,), seconds=0.01))
    found = measure([session.baseline(SHORT), fused, quantized, graph], bench, certifying=True)
    rows = {row.name: row for row in found.rows}
    assert rows["ptq-pt2e"].certificate is None
    certificate = rows["graph"].certificate
    assert certificate is not None
    assert {agreement.execution for agreement in certificate.agreements} == {
        "onnxruntime",
        "onnxruntime[optimizations=False]",
        "openvino",
    }
    assert all(agreement.agreement >= 0.99 for agreement in certificate.agreements)
    # what FX makes of the same images: the same integers, so the same answers but for a last step
    other = session.apply(fused.artifact, Ptq(), "ptq-fx").artifact
    assert quantizers(quantized.artifact.folder) == quantizers(other.folder)
    for one, two in zip(packed_weights(quantized.artifact.folder), packed_weights(other.folder), strict=True):
        assert torch.equal(one, two)


@pytest.mark.peers
@pytest.mark.parametrize(
    "settings",
    [
        {"observer": "auto"},
        {"weights": "per-tensor"},
        {"weight_observer": "mse", "observer": "percentile"},
        {"keep_float": ("stem", "head")},
        {"target": "x86", "observer": "moving-average"},
    ],
    ids=str,
)
def test_settings_mean_what_they_mean_to_fx(
    settings: dict[str, Any], torchao: None, session: Any, trained: Artifact
) -> None:
    """Equal integers and ranges; what stays in float is the same."""
    fused = session.apply(trained, Fuse()).artifact
    fx, pt2e = (session.apply(fused, Ptq(front_end=name, images=32, **settings)).artifact for name in ("fx", "pt2e"))
    if settings.get("observer") == "auto":
        chosen = [next(note for note in each.card.notes if note.startswith("observer auto")) for each in (fx, pt2e)]
        assert chosen[0].split(",")[0] == chosen[1].split(",")[0]
    pairs = zip(packed_weights(fx.folder), packed_weights(pt2e.folder), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert quantizers(fx.folder) == quantizers(pt2e.folder)
    said = [next((note for note in each.card.notes if "left in float" in note), "")[:2] for each in (fx, pt2e)]
    assert said == (["2 ", "2 "] if "keep_float" in settings else ["", ""])


@pytest.mark.peers
def test_an_observer_of_one_layer_is_counted_and_changes_its_range_alone(
    torchao: None, session: Any, trained: Artifact
) -> None:
    fused = session.apply(trained, Fuse()).artifact
    plain = session.apply(fused, Ptq(front_end="pt2e", observer="minmax")).artifact
    config = Ptq(front_end="pt2e", observer="minmax", overrides={"expand": {"observer": "percentile"}})
    chosen = session.apply(fused, config).artifact
    assert "observers chosen for single activations: percentile on 1" in chosen.card.notes
    pairs = list(zip(quantizers(plain.folder), quantizers(chosen.folder), strict=True))
    assert sum(one != other for one, other in pairs) == 1


class Bounded(nn.Module):
    """A ReLU6 as `equalize` writes it: the least of a ReLU and a bound of each channel."""

    bounds: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.relu6, self.head = nn.ReLU6(), nn.Linear(8 * 28 * 28, 4)
        self.register_buffer("bounds", torch.linspace(0.1, 0.9, 8).view(8, 1, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        bounded = torch.minimum(torch.relu(self.one(batch)), self.bounds)
        answer: torch.Tensor = self.head(torch.flatten(self.relu6(30 * self.two(bounded)), 1))
        return answer


@pytest.mark.peers
def test_bounds_of_channels_stay_and_one_bound_of_all_is_the_end_of_the_range(torchao: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    here = context()
    (tmp_path / "pt2e").mkdir()
    parent = parent_of(Bounded().eval(), here, tmp_path / "parent")
    PTQ.apply(parent, Ptq(front_end="pt2e", observer="minmax", images=24), here, tmp_path / "pt2e")
    called = [str(node.target) for node in load_program(tmp_path / "pt2e" / REFERENCE_FILE).graph.nodes]
    least = called.index("aten.minimum.default")
    assert called[least - 1] == "aten.relu.default"
    assert called[least + 1].startswith("quantized_decomposed.quantize_per_tensor")
    assert sum(name.startswith(("aten.hardtanh", "aten.relu6")) for name in called) == 1, "a product lies before it"


@pytest.mark.peers
def test_a_relu6_behind_a_layer_is_a_relu_whose_range_ends_there(torchao: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 3)
    with torch.no_grad():
        layer.weight.mul_(30)  # so that the bound is reached
    net = nn.Sequential(layer, nn.ReLU6(), nn.Flatten(), nn.Linear(8 * 30 * 30, 4)).eval()
    fx, pt2e = both(net, tmp_path, observer="minmax")
    assert quantizers(fx) == quantizers(pt2e)
    assert any(scale * (high - zero) == pytest.approx(6, rel=1e-3) for scale, zero, _, high in quantizers(pt2e))
    called = [str(node.target) for node in load_program(pt2e / REFERENCE_FILE).graph.nodes]
    assert not [name for name in called if name.startswith(("aten.hardtanh", "aten.relu6"))]


def test_what_cuts_off_at_zero_and_has_no_upper_end_is_a_relu() -> None:
    class Endless(Int8Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = super().forward(x.clamp(0, float("inf")))
            return answer

    torch.manual_seed(0)
    batch = torch.randn(2, 16)
    form = explicit_form(Endless(16, 4, 0.02, 128), batch)
    expected = form(batch)
    _drop_bounds(form)
    called = [str(node.target) for node in form.graph.nodes]
    assert "aten.relu.default" in called
    assert "aten.clamp.default" not in called
    assert torch.equal(form(batch), expected)


@pytest.mark.peers
@pytest.mark.slow
def test_inductor_compiles_the_program_and_gives_its_answers(torchao: None, session: Any, trained: Artifact) -> None:
    fused = session.apply(trained, Fuse()).artifact
    artifact = session.apply(fused, Ptq(front_end="pt2e", images=32)).artifact
    batch = session.context.example(32)
    with torch.no_grad():
        (expected,) = open_engine(artifact.folder, artifact.card, Execution("exported")).run(batch)
        (found,) = open_engine(artifact.folder, artifact.card, Execution("inductor")).run(batch)
    assert (found.argmax(1) == expected.argmax(1)).float().mean() >= 0.96
    assert (found - expected).abs().max() <= 3 * quantizers(artifact.folder)[-1][0]
