"""A card is right in every field, or refused; and nothing outside its folder is read, packed or written."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.runtime.card.card import (
    Ancestor,
    Card,
    Preprocessing,
    load_card,
    parse_card,
    read_card,
    sha256_file,
    write_card,
)
from serve.runtime.errors import CardError
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts
from tests.serve.runtime.card.test_certificate import CERTIFICATE

SHA = "0" * 64
CARD = Card(
    name="onnx-int8",
    model="resnet18",
    task="classification",
    format="onnx",
    file="model.onnx",
    precision="int8",
    input_dtype="float32",
    device="cpu",
    preprocessing=Preprocessing(36, (32, 24), (0.5,), (0.25,), "bicubic"),
    classes=("ant", "bee", "Käfer"),
    files={"model.onnx": SHA, "weights.safetensors": "f" * 64},
    lineage=(Ancestor("baseline", "baseline", {"epochs": 3, "sizes": [1, 2], "nothing": None}, SHA),),
    data={"name": "digits", "train": 3, "share": 0.5},
    versions={"torch": "2.14.1"},
    machine={"cores": 2, "gpu": None},
    notes=("a note",),
    packed={"handler.py": SHA, "serve/runtime/card/card.py": SHA},
    certificate=CERTIFICATE,
)


def body_of(card: Card) -> dict[str, Any]:
    """The card's fields as its file has them."""
    certificate = card.certificate and card.certificate.to_json()
    body: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(card) | {"certificate": certificate}))
    return body


def sealed(body: dict[str, Any]) -> str:
    """The text of a card with a seal that fits, as anybody can make it."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "seal": hashlib.sha256(text.encode()).hexdigest()})


def parsed(body: dict[str, Any]) -> Card:
    return parse_card(sealed(body), Path("card.json"))


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_card(tmp_path, CARD)
    assert read_card(tmp_path) == CARD == parsed(body_of(CARD))
    assert [path.name for path in tmp_path.iterdir()] == ["card.json"]


NAMES_OF_NO_FILE = [
    "",
    ".",
    "..",
    "../model.pt",
    "/etc/passwd",
    "a/b",
    "a\\b",
    ".hidden",
    "a\nb",
    "a b",
    "C:x",
    "card.json",
    "Card.JSON",
    "x" * 300,
    "mödel.pt",
    "a\0b",
]

FAULTS: dict[str, list[Any]] = {
    "name": [None, 1, "a\nb", "x" * 2000, "\ud800", []],
    "model": [None, True, {}],
    "precision": [None, 8],
    "format": ["pickle.x", "ONNX", None, ["onnx"], {}],
    "device": ["tpu", 0, []],
    "target": [8, True, [], "x" * 2000],
    "input_dtype": ["int8", None],
    "file": ["other.onnx", "../model.onnx", None, 3, []],
    "classes": ["abc", [1], [None], {"0": "ant"}, ["\ud800"], 3, None],
    "files": [{}, [], None, {"model.onnx": "0" * 63}, {"model.onnx": "Z" * 64}, {"model.onnx": None}],
    "packed": [{"../x": SHA}, {"/x": SHA}, {"a//b": SHA}, {"model.onnx": SHA}, {"x": 1}, []],
    "lineage": [3, {}, "x", [3], [{}], [{"name": 1, "operation": "x", "config": {}, "key": SHA}]],
    "data": [None, [], "x", {"x": 10**30}],
    "versions": [{"torch": 2}, [], None],
    "machine": [[], None],
    "notes": ["note", [1], None, {}],
    "schema": [0, 1, "2", True, 2.0, None],
    "unknown": [1],
    "preprocessing": [None, [], 3, {}],
}
PREPROCESSING: dict[str, list[Any]] = {
    "resize": [0, -1, 1.5, True, "36", None, 10**9, "letterboxes"],
    "crop": [[32], [32, 24, 3], [32.0, 24], [True, 24], [0, 24], "32", 32, None, [32, 10**9]],
    "mean": [[], [0.5, 0.5], ["0.5"], [None], [True], 0.5, [1e30]],
    "std": [[0], [-1], [], [0.2, 0.2], ["x"], [1e-30]],
    "interpolation": ["lanczos", None, 3, []],
    "other": [1],
}
CASES = [((field,), value) for field, values in FAULTS.items() for value in values] + [
    (("preprocessing", field), value) for field, values in PREPROCESSING.items() for value in values
]


@pytest.mark.parametrize(("path", "value"), CASES, ids=lambda value: ascii(value)[:40])
def test_every_field_is_checked_by_type_and_range(path: tuple[str, ...], value: Any) -> None:
    body = body_of(CARD)
    above = body if len(path) == 1 else body[path[0]]
    above[path[-1]] = value
    with pytest.raises(CardError) as caught:
        parsed(body)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES_OF_NO_FILE, ids=ascii)
def test_a_file_is_a_plain_name_in_the_folder(name: str) -> None:
    changes: list[dict[str, Any]] = [{"files": {name: SHA}, "file": name}, {"files": {**CARD.files, name: SHA}}]
    if name != "a/b":
        changes.append({"packed": {name: SHA}})
    for change in changes:
        with pytest.raises(CardError):
            dataclasses.replace(CARD, **change)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_json_does_not_have_are_refused(constant: str) -> None:
    text = sealed({**body_of(CARD), "data": {"x": 77.5}}).replace("77.5", constant)
    with pytest.raises(CardError):
        parse_card(text, Path("card.json"))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"schema": 1}', '{"a":' * 5000])
def test_what_is_no_card_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(CardError):
        read_card(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(NAMES_OF_NO_FILE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400)
@given(data=st.data())
def test_any_change_of_a_card_gives_an_equal_card_or_a_card_error(data: st.DataObject) -> None:
    body = copy.deepcopy(body_of(CARD))
    for _ in range(data.draw(st.integers(1, 3))):
        above: Any = body
        while True:
            keys = sorted(above) if isinstance(above, dict) else list(range(len(above)))
            key = data.draw(st.sampled_from(keys)) if keys else None
            deeper = key is not None and isinstance(above[key], dict | list) and data.draw(st.booleans())
            if not deeper:
                break
            above = above[key]
        match data.draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace" if key is not None:
                above[key] = data.draw(VALUES)
            case "remove" if key is not None:
                del above[key]
            case "add" if isinstance(above, dict):
                above[data.draw(st.text(max_size=10))] = data.draw(VALUES)
            case _:
                continue
    try:
        card = parsed(body)
    except CardError:
        return
    defaults: dict[str, object] = {
        "target": None,
        "probabilities": "softmax",
        "lineage": [],
        "data": {},
        "versions": {},
        "machine": {},
        "notes": [],
        "packed": {},
        "certificate": None,
        "outputs": ["logits"],
        "ending": [],
    }
    if isinstance(body.get("lineage"), list):
        body["lineage"] = [{"structure": {}, **ancestor} for ancestor in body["lineage"]]
    if isinstance(certificate := body.get("certificate"), dict):
        body["certificate"] = {"absent": {}, "cpu": "", "versions": {}, "key": "", **certificate}
        for agreement in body["certificate"]["agreements"]:
            if agreement.get("others") == []:  # the most usual network has no field for it
                del agreement["others"]
    optional = {
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear",
        "pixel_max": None,
    }
    expected = {**defaults, **body, "preprocessing": {**optional, **body["preprocessing"]}}
    assert body_of(card) == expected
    assert parsed(body_of(card)) == card


# --- links


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return artifacts.torchscript(tmp_path / "artifact")


@pytest.mark.parametrize("name", ["model.pt", "weights.safetensors", "card.json"])
def test_a_link_is_neither_loaded_nor_packed(name: str, artifact: Path, tmp_path: Path) -> None:
    """Even where what it points at has the right bytes: they could change between the check and the use."""
    (artifact / name).rename(tmp_path / "outside")
    (artifact / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CardError, match="is a link"):
        load_card(artifact)
    with pytest.raises(CardError, match="is a link"):
        build_archive(artifact, tmp_path / "x.mar", model_name="x")
    assert not (tmp_path / "x.mar").exists()


def test_a_pipe_is_refused_at_once(artifact: Path) -> None:
    (artifact / "model.pt").unlink()
    os.mkfifo(artifact / "model.pt")
    with pytest.raises(CardError, match="is not a regular file"):
        load_card(artifact)


def test_a_folder_of_an_archive_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.py").write_text("")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.onnx").write_text("")
    (folder / "serve").symlink_to(tmp_path / "outside")
    sha = sha256_file(folder / "model.onnx")
    write_card(folder, dataclasses.replace(CARD, files={"model.onnx": sha}, packed={"serve/x.py": sha}))
    with pytest.raises(CardError, match="serve: is a link"):
        load_card(folder)


def test_a_card_is_not_written_through_a_link(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    folder.mkdir()
    outside.write_text("mine")
    for name in ("card.json", f".card.json.{os.getpid()}"):
        (folder / name).symlink_to(outside)
    write_card(folder, CARD)
    assert outside.read_text() == "mine"
    assert read_card(folder) == CARD


def test_an_artifact_with_hard_links_is_loaded(artifact: Path, tmp_path: Path) -> None:
    """Runs show their artifacts so: the bytes are the folder's own."""
    (tmp_path / "run").mkdir()
    for path in artifact.iterdir():
        os.link(path, tmp_path / "run" / path.name)
    assert load_card(tmp_path / "run") == load_card(artifact)
