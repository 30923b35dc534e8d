"""Observers that are not the project's: by class, and by the name that a distribution gives them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.ao.quantization.observer import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)

import optimize as opt
from optimize.context import Context
from optimize.passes.ptq import PTQ
from optimize.passes.qat import QAT
from tests.optimize.passes.test_notebook_passes import ran
from tests.optimize.workbench import noise_context, parent_of, quantizers
from tests.programs import Programs
from tests.test_extension import code_of, install, said


class Half(MinMaxObserver):
    """Half of all that was seen, or another share."""

    def __init__(self, share: float = 0.5, **settings: Any) -> None:
        super().__init__(**settings)
        self.share = share

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        qparams: tuple[torch.Tensor, torch.Tensor] = self._calculate_qparams(
            self.share * self.min_val, self.share * self.max_val
        )
        return qparams


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 144, 4)).eval()


def scales(folder: Path, **settings: Any) -> list[float]:
    """Of each activation, as `ptq` finds it with these settings."""
    context = noise_context()
    PTQ.apply(parent_of(network(), context, folder / "parent"), opt.Ptq(images=32, **settings), context, folder)
    return list(dict.fromkeys(scale for scale, *_ in quantizers(folder)))


@pytest.mark.parametrize("own", [Half, Half.with_args(), functools.partial(Half, share=0.5)])
def test_a_class_finds_the_ranges(own: Any, tmp_path: Path) -> None:
    whole, half = (scales(tmp_path / name, observer=each) for name, each in (("whole", "minmax"), ("half", own)))
    assert half == pytest.approx([scale / 2 for scale in whole], rel=0.01)


def test_its_settings_count_and_a_single_layer_may_have_it(tmp_path: Path) -> None:
    whole = scales(tmp_path / "whole", observer="minmax")
    third = scales(tmp_path / "third", observer=Half.with_args(share=0.75).with_args(share=1 / 3))
    assert third == pytest.approx([scale / 3 for scale in whole], rel=0.01)
    second = scales(tmp_path / "second", observer="minmax", overrides={"1": {"observer": Half}})
    first, of_1, of_2, of_4 = whole[0], whole[1], whole[2], whole[3]
    assert second == pytest.approx([first, of_1, of_2 / 2, of_2, of_4], rel=0.01), "what is flattened has its own"


def test_qat_starts_from_its_ranges(tmp_path: Path) -> None:
    found: list[list[float]] = []
    for observer in ("minmax", Half):
        context: Context = noise_context()
        folder = tmp_path / str(len(found))
        settings: dict[str, Any] = {"epochs": 1, "freeze_observers_at": 0, "images": 32, "learning_rate": 1e-9}
        parent = parent_of(network(), context, folder / "parent")
        QAT.apply(parent, opt.Qat(observer=observer, augment=False, **settings), context, folder)
        found.append(list(dict.fromkeys(scale for scale, *_ in quantizers(folder))))
    assert found[1] == pytest.approx([scale / 2 for scale in found[0]], rel=0.01)


def test_one_that_the_project_has_is_the_projects() -> None:
    assert opt.Ptq(observer=MinMaxObserver) == opt.Ptq(observer="minmax")
    assert opt.Ptq(observer=HistogramObserver).observer == "histogram"


CELL = """
from torch.ao.quantization.observer import MinMaxObserver
SHARE = 0.5
class Clip(MinMaxObserver):
    def calculate_qparams(self): return self._calculate_qparams(SHARE * self.min_val, SHARE * self.max_val)
"""


def written(cell: str) -> str:
    """How settings are written down, in keys and cards, with the observer that a cell defines."""
    name: str = opt.Ptq(observer=ran(cell)["Clip"]).model_dump(mode="json")["observer"]
    return name


def test_it_is_written_down_by_its_name_and_its_code() -> None:
    first = written(CELL)
    assert first.startswith("Clip@")
    assert written(CELL + "# run again\nOTHER = 1\n") == first
    assert written(CELL.replace("SHARE = 0.5", "SHARE = 0.25")) != first
    inside = opt.Ptq(overrides={"head": {"observer": Half.with_args(share=0.1 + 0.2)}}).model_dump(mode="json")
    assert inside["overrides"]["head"]["observer"].startswith("Half(share=0.3)@")


def test_what_was_written_is_read_again() -> None:
    for settings in (opt.Ptq(observer=Half), opt.Qat(overrides={"head": {"observer": Half.with_args(share=0.3)}})):
        assert type(settings)(**settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Half(), r"must be an observer's class, or Half.with_args\(…\), not an instance"),
        (PerChannelMinMaxObserver, "the class PerChannelMinMaxObserver gives 2 scales, but an activation needs one"),
        (PlaceholderObserver, "the class PlaceholderObserver cannot observe an activation: Exception: "),
        (Half.with_args(sahre=0.5), r"the class Half\(sahre=0.5\) cannot observe an activation: TypeError: .*'sahre'"),
        (functools.partial(Half, 0.5), "an observer must be a class that derives"),
        (FakeQuantize, "an observer must be a class that derives"),
        (nn.ReLU, "an observer must be a class that derives"),
        (3, "an observer must be a class that derives"),
        (None, "an observer must be a class that derives"),
        ("minmaks", r"unknown \(did you mean minmax\?\); must be one of minmax, .*, mse, auto, or an observer's class"),
        ("Half@000000000000", "unknown"),
    ],
)  # fmt: skip
def test_what_is_no_observer_of_activations_is_refused_in_one_line(given: Any, told: str) -> None:
    with pytest.raises(opt.UserError, match=rf"^Ptq: observer: {told}") as caught:
        opt.Ptq(observer=given)
    assert len(str(caught.value).splitlines()) == 1


NAMED = """
import optimize as opt
from optimize.quantization.targets import target_named
import torch
settings = opt.Ptq(observer="clip", overrides={"head": {"observer": "clip"}})
written = settings.model_dump(mode="json")
assert opt.Ptq(**written) == settings
observer = target_named("x86-vnni").observer(settings.observer)
observer(torch.tensor([[0.0, 10.0]]))
print("scale", float(observer.calculate_qparams()[0]) * 255)
print("written", written["observer"])
try:
    opt.Ptq(observer="clap")
except opt.UserError as error:
    print(error)
"""


def test_a_distribution_adds_one_by_name(tmp_path: Path, programs: Programs) -> None:
    there = install(
        tmp_path, "clip_observer", "optimize.observers", code_of("How to add an observer", "docs/guides/extend.md")
    )
    scale, first, refusal = said(programs.run("-c", NAMED, environment=there)).splitlines()
    assert float(scale.split()[1]) == pytest.approx(9.0)
    assert first.split()[1].startswith("clip@")
    assert "unknown (did you mean clip?)" in refusal
    module = tmp_path / "clip_observer.py"
    module.write_text(module.read_text().replace("= 0.9", "= 0.8"))
    assert said(programs.run("-c", NAMED, environment=there)).splitlines()[1] != first


def test_a_distributions_observer_that_is_none_is_named_in_one_line(tmp_path: Path, programs: Programs) -> None:
    code = code_of("How to add an observer", "docs/guides/extend.md").replace("(MinMaxObserver)", "")
    there = install(tmp_path, "no_observer", "optimize.observers", code)
    refusal = "import optimize as opt\ntry: opt.Ptq(observer='clip')\nexcept opt.UserError as error: print(error)"
    told = said(programs.run("-c", refusal, environment=there)).splitlines()
    derived = "an observer must be a class that derives from torch.ao.quantization.ObserverBase"
    assert told == [f"the observer 'no_observer' of no_observer cannot be imported: ValueError: {derived}"]
