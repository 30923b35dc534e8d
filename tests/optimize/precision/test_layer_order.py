"""The order in which layers are tried: what each does alone in int8, simulated with the settings that ptq obeys."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import fx, nn

from optimize.context import Context
from optimize.models.model_names import resolve_model
from optimize.passes.ptq import PTQ, Ptq
from optimize.precision import quantizable_layers
from optimize.precision.quantizable_layers import ranks
from optimize.quantization import observer_trials
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import resolve
from optimize.quantization.ranges import OBSERVERS
from optimize.quantization.simulate import each_alone, weighted
from optimize.quantization.static import calibrating, observing
from optimize.quantization.targets import Target
from optimize.run.session import Session
from optimize.store.objects import Store
from serve.runtime.images.image_preprocessing import normalise
from tests.optimize.workbench import CPU, TINY_NET, noise_context, noting, parent_of


class Net(nn.Module):
    """Three layers, whose biases are 0; behind the first a ReLU6, behind the second a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.clip = nn.ReLU6()
        self.deep = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.head = nn.Linear(4096, 4, bias=False)
        assert self.stem.bias is not None
        nn.init.zeros_(self.stem.bias)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.deep(self.clip(self.stem(batch))))
        logits: torch.Tensor = self.head(torch.flatten(x, 1))
        return logits


def network() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def opened(folder: Path, context: Context | None = None) -> Session:
    return Session(Store(folder / "store"), resolve_model(f"{TINY_NET}:tiny"), context or noise_context())


#: Ranges are found on the very images that judge, so that nothing is beyond one and all that is lost is rounding: noise
#: of a twelfth of a squared step, 12 · 255² / k² below a signal whose range is k times its root mean square (41 dB for
#: k = 8). Of fewer images there are so few logits that their range cuts those of others.
JUDGES = 64


def ranked(module: nn.Module, config: Ptq, folder: Path) -> dict[str, float]:
    session = opened(folder)
    found, key = ranks(session, parent_of(module, session.context, folder / "parent"), config)
    assert session.store.open(key) is not None
    return found


def weights(prepared: fx.GraphModule) -> dict[str, torch.Tensor]:
    return {name: cast("torch.Tensor", layer.weight).detach().clone() for name, layer in weighted(prepared).items()}


def with_a_dead_outlier() -> Net:
    """A channel of the first layer with 300 times the weights of the others, which its bias keeps at 0 for ever.

    In float it changes nothing, nor with a scale of its own. With one scale for all channels every other weight of the
    layer is below half a step, so that there is nothing left behind it.
    """
    module = network()
    with torch.no_grad():
        module.stem.weight[0] = 300 * module.stem.weight.abs().max()
        assert module.stem.bias is not None
        module.stem.bias[0] = -1e6
    return module


def test_one_scale_for_all_channels_is_simulated_as_such(tmp_path: Path) -> None:
    plain = Ptq(images=JUDGES, observer="minmax")
    channels = ranked(with_a_dead_outlier(), plain, tmp_path)
    assert list(channels) == ["stem", "deep", "head"]
    assert min(channels.values()) > 30
    whole = ranked(with_a_dead_outlier(), plain.model_copy(update={"weights": "per-tensor"}), tmp_path)
    assert whole["stem"] == pytest.approx(0, abs=1e-6), "logits of 0 are as far off as the logits are large"
    assert min(whole, key=lambda name: whole[name]) == "stem"


def test_a_layer_alone_has_the_others_as_they_are_even_where_weights_are_cut_to_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, module = noise_context(), network()
    config = Ptq(images=16, observer="minmax", weights="per-tensor", weight_observer="percentile")
    chosen, example = resolve(network, config), context.example()
    prepared = observing(lambda: module, config, chosen, example)("minmax")
    plain = observing(lambda: module, Ptq(), chosen, example)("minmax")
    calibrate(prepared, context, calibrating(config, context))
    own = weights(plain)
    assert torch.equal(own["head"], module.head.weight)
    cut = weights(prepared)["head"].abs().max()
    assert cut < own["head"].abs().max(), "of 16,384 weights one in 10,000 lies beyond the range"
    for name, alone in each_alone(prepared, plain):
        assert [other for other, weight in weights(alone).items() if not torch.equal(weight, own[other])] == [name]
    used: list[torch.Tensor] = []
    noted = noting(used, each_alone, lambda prepared, plain: weights(plain)["head"])
    monkeypatch.setattr(quantizable_layers, "each_alone", noted)
    ranked(module, config, tmp_path)
    assert torch.equal(used[0], own["head"]), "nor is the order of such"


def test_a_relu6_is_one_where_the_layer_before_it_is_in_float(tmp_path: Path) -> None:
    module = network()
    with torch.no_grad():
        module.stem.weight.mul_(50)
    context = noise_context()
    images = normalise(context.pixels(16), context.preprocessing, CPU, torch.float32)
    with torch.no_grad():
        assert module.stem(images).max() > 30, "without its bound it would give other logits altogether"
    assert min(ranked(module, Ptq(images=JUDGES, observer="minmax"), tmp_path).values()) > 30


def test_the_settings_own_seed_draws_the_images_that_ranges_are_found_on(tmp_path: Path) -> None:
    usual = Ptq(images=8, observer="minmax")
    found = {seed: ranked(network(), usual.model_copy(update={"seed": seed}), tmp_path) for seed in (None, 0, 1)}
    assert found[None] == found[0], "the session's is 0"
    assert found[None] != found[1]


def test_auto_is_simulated_as_what_ptq_comes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two of six, which takes a third of the time; not the usual one, so that it cannot be chosen by a guess.
    monkeypatch.setattr(observer_trials, "OBSERVERS", {name: OBSERVERS[name] for name in ("percentile", "minmax")})
    config = Ptq(images=16, observer="auto", min_sqnr=-99.0, min_agreement=0.0)
    session = opened(tmp_path)
    parent = parent_of(network(), session.context, tmp_path / "parent")
    (tmp_path / "made").mkdir()
    product = PTQ.apply(parent, config, session.context, tmp_path / "made")
    (said,) = [note for note in product.notes if note.startswith("observer auto: ")]
    chosen = said.removeprefix("observer auto: ").partition(",")[0]
    usual = Ptq().observer
    assert chosen in {"percentile", "minmax"} - {usual}
    found = {
        name: ranks(session, parent, config.model_copy(update={"observer": name}))[0]
        for name in ("auto", chosen, usual)
    }
    assert found["auto"] == found[chosen] != found[usual]


def test_ptq_and_the_order_watch_one_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ``ptq`` learns to obey the order obeys, too: both ask one function."""
    asked: list[Ptq] = []
    noted = noting(asked, observing, lambda module, config, *_: config)
    monkeypatch.setattr("optimize.passes.ptq.observing", noted)
    monkeypatch.setattr(quantizable_layers, "observing", noted)
    config = Ptq(images=16, observer="minmax", min_sqnr=-99.0, min_agreement=0.0)
    session = opened(tmp_path)
    parent = parent_of(network(), session.context, tmp_path / "parent")
    (tmp_path / "made").mkdir()
    PTQ.apply(parent, config, session.context, tmp_path / "made")
    ranks(session, parent, config)
    assert asked[:2] == [config, config]


def test_where_the_machines_integers_are_others_the_order_is_found_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(tmp_path)
    parent = parent_of(network(), session.context, tmp_path / "parent")
    found = set()
    for name, most in (("x86", 127), ("x86-vnni", 255)):
        target = Target(name, activation_max=most)
        monkeypatch.setattr("optimize.quantization.targets.x86_target", lambda target=target: target)
        monkeypatch.setattr(quantizable_layers, "x86_target", lambda target=target: target)
        found.add(ranks(session, parent, Ptq(images=16, observer="minmax"))[1])
    assert len(found) == 2


def test_the_order_is_of_what_the_parent_holds_and_not_of_what_it_was_made_from(tmp_path: Path) -> None:
    """Another machine's training gives other weights under the same key."""
    session = opened(tmp_path)
    config = Ptq(images=16, observer="minmax")
    parents = [
        parent_of(module, session.context, tmp_path / name)
        for name, module in (("usual", network()), ("outlier", with_a_dead_outlier()))
    ]
    assert parents[0].key == parents[1].key
    assert len({ranks(session, parent, config)[1] for parent in parents}) == 2
