"""Files of weights as other people's scripts leave them: which weights are taken, and what is said of the rest."""

from __future__ import annotations

import argparse
import copy
import pickle
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from optimize.models.checkpoint import Checkpoint, read_checkpoint
from optimize.models.model_names import resolve_model
from optimize.models.module_source import module_source
from optimize.models.weight_matching import load_into
from serve.runtime.errors import UserError
from tests.narrow import layer
from tests.optimize.models.test_checkpoint import Net, assert_same, weights


def loaded(
    content: Any, folder: Path, network: nn.Module | None = None, **how: Any
) -> tuple[nn.Module, tuple[str, ...]]:
    torch.save(content, folder / "net.pt")
    checkpoint = read_checkpoint(folder / "net.pt", **how)
    network = network or Net()
    return network, (*checkpoint.notes, *load_into(network, checkpoint, folder / "net.pt"))


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(NAMES | st.just(0), min_size=1, max_size=4))
@example(places=["optim"])
def test_weights_are_found_under_any_names_and_in_lists(tmp_path, places):
    content: Any = weights(4)
    for place in places:
        content = [content, 3] if place == 0 else {place: content, "epoch": 3}
    network, _ = loaded(content, tmp_path)
    assert_same(network.state_dict(), weights(4))


@pytest.mark.parametrize(
    "content", [{"model_state": weights(4)}, {"G": {"ema_net": weights(4)}}, [weights(4), {"lr": 1}]]
)
def test_an_unusual_place_is_said(tmp_path, content):
    network, notes = loaded(content, tmp_path)
    assert_same(network.state_dict(), weights(4))
    assert len(notes) == 1
    assert notes[0].startswith("the weights are in '")


@pytest.mark.parametrize(
    "beside",
    [
        {"optimizer": {"state": {"conv.weight": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}},
        {"opt": {"state": {"conv.weight": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}},
        {"optim_momentum": {f"{number}.weight": torch.ones(1) for number in range(40)}},
    ],
)
def test_the_state_of_an_optimizer_is_never_taken_for_weights(tmp_path, beside):
    network, _ = loaded(beside | {"net_g": weights(4)}, tmp_path)
    assert_same(network.state_dict(), weights(4))


def test_numbers_and_extra_state_among_the_weights_are_left_out_and_said(tmp_path):
    content = weights(4) | {
        "epoch": 3,
        "best": torch.tensor(0.5),
        "conv._extra_state": {"scale": torch.ones(2)},
        "x": None,
    }
    network, notes = loaded(content, tmp_path)
    assert_same(network.state_dict(), weights(4))
    assert notes == ("left out, because they are not tensors: epoch, conv._extra_state, x", "left out: best")


def test_of_two_networks_that_fit_neither_is_guessed_and_both_are_named(tmp_path):
    content = {"generator": weights(1), "critic": weights(2), "scaler": {"scale": torch.ones(1)}}
    with pytest.raises(UserError, match="--weights-key generator or --weights-key critic") as caught:
        loaded(content, tmp_path)
    assert "\n" not in str(caught.value)
    network, _ = loaded(content, tmp_path, weights_key="critic")
    assert_same(network.state_dict(), weights(2))
    with pytest.raises(UserError, match="--weights-key 0 or --weights-key 1"):
        loaded([weights(1), weights(2)], tmp_path)


def test_of_several_networks_the_one_that_fits_is_taken_and_said(tmp_path):
    discriminator = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)).state_dict()
    network, notes = loaded({"net_d": discriminator, "net_g": weights(5)}, tmp_path)
    assert_same(network.state_dict(), weights(5))
    assert notes == ("the weights of 'net_g' are used, the only ones that fit",)
    network, notes = loaded({"params": {"lr": torch.tensor(0.1)}, "net_g": weights(5)}, tmp_path)
    assert_same(network.state_dict(), weights(5))


def test_others_like_the_usual_ones_are_named(tmp_path):
    network, notes = loaded({"state_dict": weights(1), "best": weights(2)}, tmp_path)
    assert_same(network.state_dict(), weights(1))
    assert notes == ("the weights of 'state_dict' are used; --weights-key best selects others",)


def test_where_nothing_fits_all_places_are_named(tmp_path):
    with pytest.raises(UserError, match=r"with none of a, b: .*8 missing: conv\.weight"):
        loaded({"a": {"x": torch.ones(1)}, "b": {"y": torch.ones(2), "z": torch.ones(1)}}, tmp_path)


class Deep(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(nn.Linear(3, 3) for _ in range(blocks)))
        self.fc = nn.Linear(3, 2)


def test_a_deeper_network_of_the_same_names_does_not_pass_for_the_shallow_one(tmp_path):
    for prefix in ("", "model."):
        state = {prefix + key: value for key, value in Deep(3).state_dict().items()} | {
            "criterion.weight": torch.ones(2)
        }
        with pytest.raises(UserError, match=r"unexpected: .*layer\.2\.weight"):
            loaded(state, tmp_path, Deep(2))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    marks=st.lists(st.sampled_from(["module.", "_orig_mod.", ""]), min_size=3, max_size=3),
    own=st.lists(st.sampled_from(["module.", "_orig_mod.", ""]), min_size=2, max_size=2),
    prefix=st.sampled_from(["", "model.", "net.module."]),
)
def test_wrappers_leave_their_marks_anywhere_in_names_of_either(tmp_path, marks, own, prefix):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Module()
            inner: nn.Module = self.net
            for mark in filter(None, own):
                inner.add_module(mark[:-1], nn.Module())
                inner = inner.get_submodule(mark[:-1])
            inner.conv = nn.Conv2d(1, 2, 1)
            inner.fc = nn.Linear(3, 4)

    saved = {"net.conv.weight": torch.randn(2, 1, 1, 1), "net.conv.bias": torch.randn(2)}
    saved |= {"net.fc.weight": torch.randn(4, 3), "net.fc.bias": torch.randn(4)}
    marked = {
        prefix + marks[0] + "net." + marks[1] + key.removeprefix("net.").replace(".", f".{marks[2]}"): value
        for key, value in saved.items()
    }
    network, _ = loaded(marked, tmp_path, Outer())
    values = list(network.state_dict().values())
    assert all(torch.equal(value, expected) for value, expected in zip(values, saved.values(), strict=True))


def test_wrappers_inside_of_a_network_are_taken_off_and_the_user_s_own_stays_wrapped():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 2)))
    expected = copy.deepcopy(network)
    compiled: Any = torch.compile(network[0])
    network[0] = compiled
    layer(network, "1", nn.Sequential)[1] = nn.DataParallel(layer(network, "1.1", nn.Linear))
    block = layer(network, "1", nn.Sequential)
    block.compile()
    source, checkpoint = module_source(network)
    assert set(checkpoint.state) == set(expected.state_dict())
    built = source.build(2)
    load_into(built, checkpoint, Path("net"))
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(built(images), expected(images))
    layer(network, "1.1", nn.DataParallel)
    assert block._compiled_call_impl is not None


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_weight_norms_of_before_and_their_parametrisation_load_into_each_other(tmp_path):
    old = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    images = torch.randn(5, 3)
    expected = old(images)
    state = {"net." + key: value for key, value in old.state_dict().items()} | {"criterion.weight": torch.ones(2)}
    for content in (old.state_dict(), {"model_state": state}):
        network, _ = loaded(content, tmp_path, copy.deepcopy(new))
        assert torch.allclose(network(images), expected, atol=1e-6)
    state["net.0.weight_g"] = torch.ones(7, 1)
    with pytest.raises(UserError, match="does not fit"):
        loaded(state, tmp_path, copy.deepcopy(new))


class Renamed(nn.Module):
    """Names its layer otherwise since version 2, as torchvision's MLPBlock does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(3, 2)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version") is None or metadata["version"] < 2:
            for part in ("weight", "bias"):
                if f"{prefix}old.{part}" in state:
                    state[f"{prefix}new.{part}"] = state.pop(f"{prefix}old.{part}")
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("prefix", ["", "module.", "model."])
@pytest.mark.parametrize("version", [None, 1])
def test_a_module_converts_the_names_of_its_own_earlier_versions(tmp_path, prefix, version):
    network = nn.Sequential(Renamed(), nn.Linear(2, 2))
    state = OrderedDict((prefix + key.replace("new", "old"), value * 2) for key, value in network.state_dict().items())
    if version is not None:
        state._metadata = OrderedDict({prefix + "0": {"version": version}, prefix + "1": {"version": 1}})  # type: ignore[attr-defined]
    changed, _ = loaded(state, tmp_path, nn.Sequential(Renamed(), nn.Linear(2, 2)))
    assert torch.equal(layer(changed, "0.new", nn.Linear).weight, layer(network, "0.new", nn.Linear).weight * 2)


def test_what_a_module_keeps_beside_its_tensors_stays_as_it_is_built(tmp_path):
    class Kept(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            assert state == {"calls": 3}

    network = Kept(3, 2)
    changed, notes = loaded(network.state_dict(), tmp_path, Kept(3, 2))
    assert torch.equal(changed.weight, network.weight)  # type: ignore[arg-type]
    assert notes == ("left out, because they are not tensors: _extra_state",)


def code(folder: Path) -> ModuleType:
    (folder / "net.py").write_text(
        "from torch import nn\n\n\nclass Small(nn.Sequential):\n    def __init__(self, num_classes=3):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(4, num_classes))\n"
    )
    home = resolve_model(f"{folder / 'net.py'}:Small").home
    assert home is not None
    return home


@pytest.mark.parametrize("module", ["__main__", "a_script_of_somebody"])
def test_a_pickled_network_finds_its_class_in_the_user_s_model_file(tmp_path, module, monkeypatch):
    home = code(tmp_path)
    foreign = ModuleType(module)
    foreign.Small = type("Small", (nn.Sequential,), {"__module__": module})  # type: ignore[attr-defined]
    network = home.Small()
    with monkeypatch.context() as there:
        there.setitem(__import__("sys").modules, module, foreign)
        network.__class__ = foreign.Small
        torch.save({"model": network, "epoch": 1}, tmp_path / "net.pt")
    with pytest.raises(UserError, match=rf"it needs {module}\.Small, .*path/to/file\.py:FACTORY") as caught:
        read_checkpoint(tmp_path / "net.pt", trust_pickle=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="add --trust-checkpoint"):
        read_checkpoint(tmp_path / "net.pt", home=home)
    assert_same(read_checkpoint(tmp_path / "net.pt", trust_pickle=True, home=home).state, network.state_dict())


class Foreign:
    """Pickles as a path of some system does, of the module that Python keeps them in."""

    def __init__(self, module: str, kind: str) -> None:
        self.module, self.kind = module, kind


class ForeignPickler(pickle._Pickler):
    def save(self, item: Any, *others: Any, **more: Any) -> Any:
        if not isinstance(item, Foreign):
            return super().save(item, *others, **more)  # type: ignore[misc]
        self.write(f"c{item.module}\n{item.kind}\n".encode() + b"(")  # type: ignore[attr-defined]
        self.save("data")
        self.write(b"tR")  # type: ignore[attr-defined]
        return None


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("kind", ["WindowsPath", "PosixPath", "PureWindowsPath"])
def test_paths_of_another_system_among_the_settings_are_read(tmp_path, trust, module, kind):
    settings_of = {"hyper_parameters": argparse.Namespace(root=Foreign(module, kind)), "state_dict": weights(2)}
    pickling = ModuleType("pickling")
    pickling.Pickler = ForeignPickler  # type: ignore[attr-defined]
    torch.save(settings_of, tmp_path / "net.ckpt", pickle_module=pickling)
    assert_same(read_checkpoint(tmp_path / "net.ckpt", trust_pickle=trust).state, weights(2))


def test_a_state_dict_that_is_not_sure_does_not_lose_its_others():
    found = Checkpoint(weights(1), "0" * 64, others={"a": weights(1), "b": weights(2)}, sure=False)
    with pytest.raises(UserError, match="--weights-key a or --weights-key b"):
        load_into(Net(), found, Path("net.pt"))
