"""The parity certificate in a card: written, read back, refused where it is none; and shown by a server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from serve.runtime.card.card import load_card, read_card, write_card
from serve.runtime.card.certificate import Agreement, Certificate
from serve.runtime.errors import CardError
from serve.runtime.service.predictor import Predictor
from tests.serve import artifacts

AGREEMENT = Agreement(
    "openvino", {"top1_agreement": 0.9975}, 41.5, 0.125, 2.0, delta=0.0, low=-0.004, high=0.004, gained=1, lost=1
)
CERTIFICATE = Certificate(
    reference="a" * 64,
    step=0.0625,
    images=800,
    logits_of=512,
    data="b" * 64,
    agreements=(AGREEMENT, dataclasses.replace(AGREEMENT, execution="onnxruntime", sqnr_db=None, steps=None)),
    absent={"torchscript": "it is not installed"},
    cpu="any",
    versions={"openvino": "1.0"},
    key="c" * 64,
)
#: An agreement as in JSON, where its shares are beside the other fields.
TOLD = CERTIFICATE.to_json()["agreements"][0]


def test_a_card_keeps_it_and_the_endpoint_tells_it(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "onnx")
    write_card(folder, dataclasses.replace(read_card(folder), certificate=CERTIFICATE))
    card = load_card(folder)
    assert card.certificate == CERTIFICATE
    told = Predictor(folder).describe()["certificate"]
    assert json.loads(json.dumps(told)) == json.loads(json.dumps(CERTIFICATE.to_json()))
    assert told["agreements"][0]["top1_agreement"] == 0.9975


def test_a_card_without_one_says_so(tmp_path: Path) -> None:
    assert Predictor(artifacts.onnx(tmp_path / "onnx")).describe()["certificate"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1.0),
        ("step", float("nan")),
        ("images", 0),
        ("logits_of", 801),
        ("logits_of", True),
        ("agreements", {}),
        ("agreements", [{}]),
        ("agreements", [{**TOLD, "top1_agreement": 1.5}]),
        ("agreements", [{**TOLD, "low": 0.1}]),
        ("agreements", [{**TOLD, "unknown": 2}]),
        ("agreements", [{name: value for name, value in TOLD.items() if name != "top1_agreement"}]),
        ("agreements", [3]),
        ("absent", ["openvino"]),
        ("versions", {"openvino": 1}),
        ("other", 1),
    ],
)
def test_what_is_none_is_refused(field: str, value: object) -> None:
    body: dict[str, Any] = {**CERTIFICATE.to_json(), field: value}
    with pytest.raises(CardError, match="certificate"):
        Certificate.from_json(body)


@pytest.mark.parametrize("body", [None, 3, [], "text", {}])
def test_other_values_are_refused(body: object) -> None:
    with pytest.raises(CardError, match="certificate"):
        Certificate.from_json(body)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"agreements": {"top1_agreement": 0.995}}, True),
        ({"agreements": {"top1_agreement": 0.9949}}, False),
        ({"delta": 0.01, "low": 0.001, "high": 0.02}, False),
        ({"delta": -0.01, "low": -0.02, "high": -0.001}, False),
        ({"delta": -0.01, "low": -0.02, "high": 0.0}, True),
    ],
)
def test_it_holds_where_all_agree_and_no_interval_excludes_equality(changes: dict[str, Any], *, holds: bool) -> None:
    changed = dataclasses.replace(AGREEMENT, **changes)
    assert changed.holds is holds
    assert dataclasses.replace(CERTIFICATE, agreements=(AGREEMENT, changed)).holds is holds
    assert not dataclasses.replace(CERTIFICATE, agreements=()).holds
