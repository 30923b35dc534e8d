"""``serving.json``: what is written is read back, and what means nothing is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.common.options import ServingOptions
from serve.runtime.card.budget import Budget
from serve.runtime.card.evidence import Evidence, evidence_for
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import SERVING_FILE, Serving, parse_serving, read_serving
from serve.runtime.errors import CardError, UserError
from serve.runtime.service.execution_chain import open_served
from tests.serve import artifacts

WHERE = Path("x/serving.json")

EXECUTIONS = st.builds(
    Execution,
    engine=st.sampled_from(["openvino", "onnxruntime"]),
    device=st.sampled_from(["cpu", "cuda"]),
    threads=st.none() | st.integers(1, 64),
    buckets=st.lists(st.integers(1, 512), unique=True).map(lambda sizes: tuple(sorted(sizes))),
    options=st.dictionaries(st.text("abc_", min_size=1), st.booleans() | st.integers(0, 9) | st.text("xyz")),
)


@given(
    executions=st.lists(EXECUTIONS, min_size=1, max_size=3).map(tuple),
    strict=st.booleans(),
    numbers=st.tuples(*[st.integers(1, 1000)] * 8),
    others=st.fixed_dictionaries(
        {
            "decode_threads": st.none() | st.integers(1, 1024),
            "budget": st.builds(Budget, request_seconds=st.none() | st.floats(0.1, 1e6)),
            "decoder": st.sampled_from(["cpu", "reduced", "some-other"]),
            "evidence": st.lists(
                st.builds(
                    Evidence,
                    EXECUTIONS,
                    st.sampled_from(["top1", "some_other"]),
                    st.just(0.5),
                    st.floats(0, 0.5),
                    st.floats(0.5, 1),
                    st.integers(1, 10**6),
                ),
                max_size=2,
            ).map(tuple),
        }
    ),
)
def test_what_is_written_is_read_back(
    *,
    executions: tuple[Execution, ...],
    strict: bool,
    numbers: tuple[int, ...],
    others: dict[str, Any],
) -> None:
    names = [
        entry.name for entry in dataclasses.fields(Serving) if type(entry.default) is int and entry.name != "schema"
    ]
    assert len(names) == len(numbers)
    given: dict[str, Any] = dict(zip(names, numbers, strict=True))
    record = Serving(executions, strict, **given, **others)
    assert parse_serving(record.text, WHERE) == record
    assert parse_serving(json.dumps(dict(reversed(json.loads(record.text).items()))), WHERE).text == record.text


EVIDENCE = Evidence(Execution("openvino"), "top1", 0.9, 0.8, 0.95, 100).to_json()


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(Serving((Execution("openvino"),)).text) | fields)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "must be a JSON object, found"),
        ("{}", "executions must be a list"),
        (changed(executions=[]), "at least one execution"),
        (changed(executions=["openvino"]), "an execution must be a mapping, found 'openvino'"),
        (changed(executions=[{"engine": "openvino", "thread": 1}]), "unknown field 'thread' .did you mean threads"),
        (changed(executions=[{"engine": "exported", "device": "cuda:1"}]), "must be cpu or cuda, found cuda:1"),
        (changed(worker=2), "unknown field 'worker' .did you mean workers"),
        (changed(workers=0), "workers must be a whole number from 1"),
        (changed(workers=True), "workers must be a whole number"),
        (changed(batch_size=1025), "batch_size must be a whole number from 1 to 1024, found 1025"),
        (changed(k="5"), "k must be a whole number from 1"),
        (changed(decode_threads=0), "decode_threads must be a whole number from 1 to 1024, found 0"),
        (changed(queue_limit=0), "queue_limit must be a whole number from 1"),
        (changed(decoder="../x"), "decoder must be a word of a-z, 0-9 and '-', found '../x'"),
        (changed(decoder=None), "decoder must be a word"),
        (changed(strict=1), "strict must be true or false, found 1"),
        (changed(schema=2), "schema must be a whole number from 1 to 1, found 2"),
        (changed(budget=[]), "budget must be a JSON object"),
        (changed(budget={"pixels": 1}), "budget: unknown field 'pixels'"),
        (changed(budget={"image_pixels": "many"}), "image_pixels must be above 0 and finite, got 'many'"),
        (changed(budget={"image_pixels": None}), "image_pixels must be above 0"),
        (changed(evidence={}), "evidence must be a list"),
        (changed(evidence=[{}]), "evidence must have the fields execution, high, images, low and one score"),
        (changed(evidence=[EVIDENCE | {"top5": 0.9}]), "evidence must have the fields .* and one score"),
        (changed(evidence=[EVIDENCE | {"top1": 1.5}]), r"top1 must be a number from -1e\+12 to 1"),
        (changed(evidence=[EVIDENCE | {"low": 0.95}]), "top1 must lie in its interval"),
        (changed(evidence=[EVIDENCE | {"execution": "openvino"}]), "must be a mapping"),
        (changed(response_timeout_s=float("nan")), "response_timeout_s must be a whole number"),
    ],
)
def test_what_means_nothing_is_refused_with_its_field_and_value(document: str, said: str) -> None:
    with pytest.raises(CardError, match=said) as caught:
        parse_serving(document, WHERE)
    assert str(caught.value).startswith("x/serving.json: ")


@given(st.text())
def test_any_text_is_read_or_refused(document: str) -> None:
    with pytest.raises(CardError):
        parse_serving(document, WHERE)


def test_a_folder_without_the_file_does_not_say_how_it_is_served(tmp_path: Path) -> None:
    assert read_serving(tmp_path) is None


@pytest.mark.parametrize(
    ("timeout", "seconds", "allowed"), [(60, 30.0, 30), (8, 30.0, 4), (8, 1.5, 1.5), (9, None, 4.5)]
)
def test_a_batch_is_given_less_time_than_the_server_gives_its_worker(
    timeout: int, seconds: float | None, allowed: float
) -> None:
    record = Serving(
        (Execution("openvino"),), response_timeout_s=timeout, budget=Budget(image_pixels=7, batch_seconds=seconds)
    )
    assert record.allowance == Budget(image_pixels=7, batch_seconds=allowed)


def test_the_usual_settings_are_said_once() -> None:
    usual, record = ServingOptions(), Serving((Execution("openvino"),))
    shared = {entry.name for entry in dataclasses.fields(Serving)} & set(ServingOptions.model_fields)
    assert shared == {entry.name for entry in dataclasses.fields(Serving)} - {"executions", "evidence", "schema"}
    assert {name: getattr(usual, name) for name in shared} == {name: getattr(record, name) for name in shared}


def test_what_is_set_changes_a_record_and_the_rest_of_it_stays(tmp_path: Path) -> None:
    from serve.runtime.card.card import load_card

    card = load_card(artifacts.onnx(tmp_path / "artifact"))
    kept = Serving((Execution("onnxruntime", threads=2, options={}), Execution("onnxruntime-cuda", "cuda")), workers=3)
    assert ServingOptions().over(kept, card) == kept
    found = ServingOptions(threads=1, k=7, engines=["openvino"]).over(kept, card)
    assert found == dataclasses.replace(
        kept,
        k=7,
        executions=(
            Execution("openvino", threads=1),
            Execution("onnxruntime", threads=1),
            Execution("onnxruntime-cuda", "cuda"),
        ),
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engines": ["openvin"]}, "engines: unknown engine 'openvin' .did you mean openvino"),
        ({"engines": ["openvino[cuda]"]}, "openvino runs on cpu, not on cuda"),
        ({"options": {"openvino": {"precison": "f32"}}}, "openvino has no option 'precison' .did you mean precision"),
        ({"options": {"openvino": {"precision": 32}}}, "option precision must be of type str, found 32"),
        ({"buckets": [8, 1]}, r"buckets must ascend, found \[8, 1\]"),
        ({"buckets": [0]}, "a bucket must be a whole number from 1"),
        ({"allow_fallback": True}, "allow_fallback: unknown"),
    ],
)
def test_an_option_that_means_nothing_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ServingOptions(**settings)


def test_evidence_holds_for_whatever_computes_the_same() -> None:
    evidence = (
        Evidence(Execution("openvino", threads=2), "top1", 0.9, 0.8, 0.95, 100),
        Evidence(Execution("exported", "cuda", options={"compile": True}), "top1", 0.7, 0.6, 0.75, 100),
    )
    assert evidence_for(evidence, Execution("openvino", threads=1, buckets=(1, 8))) == {
        "top1": 0.9,
        "low": 0.8,
        "high": 0.95,
        "images": 100,
    }
    found = evidence_for(evidence, Execution("exported", "cuda:1", options={"compile": True}))
    assert found is not None
    assert found["top1"] == 0.7
    assert evidence_for(evidence, Execution("exported", "cuda:1")) is None
    assert evidence_for(evidence, Execution("onnxruntime")) is None


def test_what_is_served_tells_its_accuracy_where_it_was_measured_as_it_runs(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "artifact")
    measured = Evidence(Execution("onnxruntime"), "top1", 0.9, 0.8, 0.95, 100)
    for engine, told in (("onnxruntime", {"top1": 0.9, "low": 0.8, "high": 0.95, "images": 100}), ("openvino", None)):
        serving = Serving((Execution(engine, threads=1),), batch_size=1, evidence=(measured,))
        (folder / SERVING_FILE).write_text(serving.text)
        predictor, _ = open_served(folder, None)
        described = predictor.describe()
        assert described["accuracy"] == told
        json.dumps(described, allow_nan=False)
