"""Settings say what they are and what is wrong with them."""

from __future__ import annotations

import os
import pydoc
import re
from typing import Literal

import pytest
from pydantic import Field
from torch import nn

import optimize as opt
from optimize.arguments import step_name
from optimize.passes.base import passes
from serve.common.config import Config
from serve.common.options import ServingOptions
from serve.runtime.errors import UserError


class Paint(Config):
    """Settings of a brush."""

    colour: Literal["red", "green"] = Field(default="red", description="what is seen")
    width: int = Field(default=3, ge=1, description="of the brush, mm")


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"^Paint: color: unknown \(did you mean colour\?\); known: colour, width$"):
        Paint(color="red")


def test_all_wrong_settings_are_said_at_once_with_their_values() -> None:
    with pytest.raises(UserError) as caught:
        Paint(colour="blue", width=0)
    assert "'red' or 'green' (it is 'blue')" in str(caught.value)
    assert "greater than or equal to 1 (it is 0)" in str(caught.value)


@pytest.mark.parametrize("field", ["width", "rate", "limit"])
def test_true_is_no_number(field: str) -> None:
    class Brush(Paint):
        rate: float = Field(default=0.5, description="of drying, mm/s")
        limit: int | None = Field(default=None, description="the most strokes")
        wet: bool = Field(default=False, description="whether it is")

    with pytest.raises(UserError, match=f"^Brush: {field}: input should be a number \\(it is True\\)$"):
        Brush(**{field: True})
    assert Brush(**{field: 1}) == Brush(**{field: "1"})  # as YAML gives 1e-3, and a command line all
    assert Brush(wet=True).wet


@pytest.mark.parametrize(
    "kind", [Paint, opt.Training, opt.Timing, ServingOptions, *(p.config for p in passes().values())]
)
def test_help_shows_each_setting_with_its_meaning_in_a_screenful(kind: type[Config]) -> None:
    text = pydoc.render_doc(kind, renderer=pydoc.plaintext)  # type: ignore[attr-defined]  # typeshed has not got it
    assert len(text.splitlines()) <= 60
    squeezed = " ".join(text.replace("|", " ").split())
    usual_training = {name: field.description for name, field in opt.Training.model_fields.items()}
    for name, field in kind.model_fields.items():
        assert f"{name}: " in text
        assert field.description, f"{kind.__name__}.{name} has no description"
        told = " ".join(field.description.replace("|", " ").split()) in squeezed
        inherited = kind is not opt.Training and field.description == usual_training.get(name)
        assert told or (inherited and "see opt.Training for their descriptions" in squeezed)
        assert f" = {getattr(kind(), name)!r}".replace("|", " ") in squeezed


@pytest.mark.parametrize(("epochs", "freezes"), [(1, 1), (2, 2), (5, 2)])
def test_a_default_adapts_to_the_settings_that_are_given(epochs: int, freezes: int) -> None:
    assert opt.Qat(epochs=epochs).freeze_observers_at == freezes


def test_settings_are_refused_by_the_name_that_users_know() -> None:
    with pytest.raises(UserError, match=r"^Training: epoch: unknown \(did you mean epochs"):
        opt.Training(epoch=3)
    with pytest.raises(UserError, match=r"^Qat: epoch: unknown \(did you mean epochs"):
        opt.Qat(epoch=3)


def test_a_name_that_the_package_has_not_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'restor' \(did you mean restore\b"):
        opt.restor  # noqa: B018
    assert not hasattr(opt, "__wrapped__")


@pytest.mark.parametrize("value", [os, 3, nn.Linear])
def test_what_is_no_model_is_refused_in_one_line_with_what_would_be(value: object) -> None:
    with pytest.raises(UserError, match=r"^model: must be the name of a network .*, not .*") as no:
        opt.load(value)  # type: ignore[arg-type]
    assert "\n" not in str(no.value)
    assert ("give an instance of it: Linear(…)" in str(no.value)) is (value is nn.Linear)


@pytest.mark.parametrize("given", [("Conv2d",), ("features.*.conv", "Linear"), ("layer4.*",) * 20])
def test_a_variants_name_can_be_a_stages(given: tuple[str, ...]) -> None:
    name = step_name(opt.Ptq(keep_float=given, bias_correction=True))
    assert re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", name)
    assert name.startswith("ptq-")
    assert "keepfloat" in name
