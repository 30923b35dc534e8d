"""What an archive knows an answer to: written and read alike, packed, asked for when it is loaded."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.archive.archive_file import check_archive, instructions_in
from serve.archive.verification import Policy
from serve.asgi.process.model_loader import load
from serve.asgi.process.serving_plan import Wanted
from serve.runtime.card.card import read_card, write_card
from serve.runtime.card.known_answer import KNOWN_FILE, KnownAnswer, parse_known, read_known
from serve.runtime.errors import CardError
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.staging import stage
from serve.torchserve.state import ServedModel
from tests.serve import artifacts

NUMBERS = st.none() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
FACTS = st.dictionaries(
    st.text("abc_", max_size=5).map("fact-{}".format), NUMBERS | st.lists(NUMBERS, max_size=3), max_size=4
)


@given(st.binary(min_size=1), FACTS)
def test_what_is_written_is_read(image: bytes, facts: dict[str, object]) -> None:
    known = KnownAnswer(image, "classification", "openvino", facts)
    assert parse_known(known.text, Path(KNOWN_FILE)) == known


@given(st.text(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_what_is_something_else_is_refused_in_one_line(document: str) -> None:
    with pytest.raises(CardError, match=KNOWN_FILE):
        parse_known(document, Path(KNOWN_FILE))


@pytest.mark.parametrize(
    "change", [{"image": ""}, {"image": "&"}, {"task": ""}, {"task": 1}, {"execution": None}, {"schema": 1}]
)
def test_a_field_that_is_wrong_is_refused(change: dict[str, object]) -> None:
    body = json.loads(KnownAnswer(b"x", "classification", "openvino", {}).text)
    assert parse_known(json.dumps(body), Path(KNOWN_FILE)).facts == {}
    with pytest.raises(CardError):
        parse_known(json.dumps(body | change), Path(KNOWN_FILE))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.know(artifacts.torchscript(tmp_path_factory.mktemp("known") / "script"))


def test_an_archive_takes_it_along_and_is_asked_for_it(artifact: Path, tmp_path: Path) -> None:
    archive = build_archive(artifact, tmp_path / "tiny.mar", model_name="tiny")
    assert KNOWN_FILE in check_archive(archive).packed
    served = load(Wanted("tiny", "1.0", archive), gpu=None, queue=None, policy=Policy())
    served.service.close()
    assert "the answer to the known image matches the one of torchscript" in served.checked[-1]
    assert served.unchecked == ""


def test_where_nothing_is_known_that_is_said_and_may_be_refused(artifact: Path, tmp_path: Path) -> None:
    known = build_archive(artifact, tmp_path / "known.mar", model_name="known")
    (tmp_path / "folder").mkdir()
    for path in artifact.iterdir():
        if path.name != KNOWN_FILE:
            (tmp_path / "folder" / path.name).write_bytes(path.read_bytes())
    unknown = build_archive(tmp_path / "folder", tmp_path / "unknown.mar", model_name="unknown")
    assert instructions_in(known).known == read_known(artifact)
    assert instructions_in(unknown).known is None
    served = load(Wanted("tiny", "1.0", unknown), gpu=None, queue=None, policy=Policy())
    served.service.close()
    assert served.unchecked == "its archive has no known.json"
    assert served.checked[-1] == "known answer not checked: its archive has no known.json"
    strict, model = Policy(known=True), ServedModel("tiny", "run", "tiny")
    message = re.escape(f"{unknown}: cannot be checked before serving (its archive has no known.json)")
    with pytest.raises(CardError, match=message):
        load(Wanted("tiny", "1.0", unknown), gpu=None, queue=None, policy=strict)
    for pack in (None, lambda _, path: path.write_bytes(unknown.read_bytes())):  # as it is, or packed otherwise
        with pytest.raises(CardError, match=message):
            stage(tmp_path / "staged", model, unknown, pack, strict)
    assert stage(tmp_path / "staged", model, known, None, strict) == instructions_in(known)


def test_an_archive_that_answers_otherwise_is_not_served(artifact: Path, tmp_path: Path) -> None:
    card = read_card(artifact)
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in artifact.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    # Whole by every hash, and yet the wrong way to prepare an image.
    write_card(
        changed, dataclasses.replace(card, preprocessing=dataclasses.replace(card.preprocessing, std=(9.0,) * 3))
    )
    archive = build_archive(changed, tmp_path / "tiny.mar", model_name="tiny")
    with pytest.raises(CardError, match="answer to its known image differs from the one measured with torchscript"):
        load(Wanted("tiny", "1.0", archive), gpu=None, queue=None, policy=Policy())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("classification", "2 logits for 5 classes"),
        ("other", "the known answer is one of other, and the artifact's task is classification"),
    ],
)
def test_one_of_another_artifact_is_not_packed(artifact: Path, tmp_path: Path, task: str, message: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in artifact.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / KNOWN_FILE).write_text(KnownAnswer(b"x", task, "any", {"logits": [1.0, 2.0]}).text)
    with pytest.raises(CardError, match=message):
        build_archive(other, tmp_path / "tiny.mar", model_name="tiny")
