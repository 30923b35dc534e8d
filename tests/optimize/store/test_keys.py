"""Keys: every input of every result changes its key, and what the result does not depend on does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from optimize.store import keys
from optimize.store.keys import Key, content, make_key, opening, paired
from serve.runtime.card.card import Ancestor, Card, Preprocessing
from serve.runtime.card.certificate import Certificate
from serve.runtime.card.execution import Execution

PLAIN = Preprocessing(16, (16, 16))
CARD: dict[str, Any] = {"name": "ptq", "files": {"model.pt": "0" * 64}}

#: For each record a value of every field, and another one. A new field needs a pair here.
INPUTS: dict[type[Key], dict[str, tuple[Any, Any]]] = {
    keys.BaselineKey: {
        "architecture": (("a" * 64, "resnet18"), ("a" * 64, "resnet34")),
        "weights": (("c" * 64, "model"), ("c" * 64, "model_ema")),
        "training": ({"epochs": 1}, {"epochs": 2}),
        "processes": (1, 2),
        "outputs": ((), ("out",)),
        "teacher": (None, "a" * 64),
        "classes": (10, 11),
        "images": ("d" * 64, "e" * 64),
        "augmentation": ("shift", "none"),
        "preprocessing": (PLAIN, dataclasses.replace(PLAIN, interpolation="bicubic")),
        "seed": (0, 1),
        "libraries": ({"torch": "2.14"}, {"torch": "2.15"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.StageKey: {
        "operation": ("ptq", "qat"),
        "config": ({"images": 8}, {"images": 9}),
        "ancestors": (("a", "b"), ("c", "b")),
        "target": ("x86", "x86-vnni"),
        "device": (None, "cuda"),
        "architecture": (None, ("a" * 64, "resnet18")),
        "processes": (1, 2),
        "zeros": (None, "f" * 64),
        "ending": (None, "f" * 64),
        "timed": (None, {"machine": {"cores": 2}}),
        "teacher": (None, "a" * 64),
        "classes": (10, 11),
        "images": ("d" * 64, "e" * 64),
        "augmentation": ("shift", "none"),
        "preprocessing": (PLAIN, dataclasses.replace(PLAIN, std=(0.1, 0.1, 0.1))),
        "seed": (0, 1),
        "libraries": ({"torch": "2.14"}, {"torch": "2.14", "onnx": "1.23"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.TeacherKey: {
        "teacher": ("a" * 64, "b" * 64),
        "images": ("d" * 64, "e" * 64),
        "preprocessing": (PLAIN, dataclasses.replace(PLAIN, resize=20)),
        "precision": ("float32", "bfloat16"),
        "libraries": ({"torch": "2.14"}, {"torch": "2.15"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.TakenKey: {"artifact": ({"files": {}}, {"files": {"model.pt": "0"}})},
    keys.NamedKey: {"made": ("a" * 64, "b" * 64), "card": (CARD, {**CARD, "name": "int8"})},
    keys.AnswersKey: {
        "artifact": ({"files": {}}, {"files": {"model.pt": "0"}}),
        "execution": (Execution("openvino").to_json(), Execution("openvino", threads=1).to_json()),
        "task": ("classification", "another"),
        "images": ("d" * 64, "e" * 64),
        "preprocessing": (PLAIN, dataclasses.replace(PLAIN, resize=20)),
        "skip_unreadable": (False, True),
        "max_batch": (64, 32),
        "environment": ({"GOMP_SPINCOUNT": "10000"}, {"GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": "1"}),
        "machine": ({"cores": 2}, {"cores": 4}),
        "libraries": ({"torch": "2.14"}, {"torch": "2.15"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.FootprintKey: {
        "artifact": ({"files": {}}, {"files": {"model.pt": "0"}}),
        "execution": (Execution("torchscript").to_json(), Execution("torchscript", "cuda").to_json()),
        "batch": (16, 1),
        "environment": ({"GOMP_SPINCOUNT": "10000"}, {"GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": "1"}),
        "machine": ({"cores": 2}, {"cores": 4}),
        "libraries": ({"torch": "2.14"}, {"torch": "2.15"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.SpeedKey: {
        "pairs": (("a", "b"), ("a",)),
        "references": ((("eager", "cpu"),), (("eager", "cuda"),)),
        "eager": ("a" * 64, None),
        "timing": ({"rounds": 5}, {"rounds": 6}),
        "images": ("d" * 64, "e" * 64),
        "preprocessing": (PLAIN, dataclasses.replace(PLAIN, crop=(8, 8))),
        "max_batch": (64, 32),
        "environment": ({"GOMP_SPINCOUNT": "10000"}, {"GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": "1"}),
        "machine": ({"cores": 2}, {"cores": 4}),
        "libraries": ({"torch": "2.14"}, {"torch": "2.15"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.RanksKey: {
        "config": ({"observer": "minmax"}, {"observer": "mse"}),
        "ancestors": (("a", "b"), ("c", "b")),
        "target": ("x86", "x86-vnni"),
        "device": ("cpu", "cuda"),
        "classes": (10, 11),
        "images": ("d" * 64, "e" * 64),
        "augmentation": ("shift", "none"),
        "preprocessing": (PLAIN, dataclasses.replace(PLAIN, resize=20)),
        "seed": (0, 1),
        "libraries": ({"torch": "2.14"}, {"torch": "2.15"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.ProbeKey: {
        "engine": ("openvino", "onnxruntime"),
        "device": ("cpu", "cuda"),
        "environment": ({}, {"OMP_NUM_THREADS": "1"}),
        "machine": ({"cores": 2}, {"cores": 4}),
        "libraries": ({"openvino": "2026.4"}, {}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.CertificateKey: {
        "reference": ("a" * 64, "b" * 64),
        "answers": ({"openvino": "c" * 64}, {"openvino": "d" * 64}),
        "absent": ({}, {"openvino": "is not installed"}),
        "file": ("e" * 64, "f" * 64),
        "code": ("f" * 64, "0" * 64),
    },
    keys.LayersKey: {
        "artifact": ({"files": {}}, {"files": {"model.onnx": "0"}}),
        "reference": ("e" * 64, "f" * 64),
        "execution": (Execution("openvino").to_json(), Execution("onnxruntime").to_json()),
        "images": ("d" * 64, "e" * 64),
        "environment": ({}, {"OMP_NUM_THREADS": "1"}),
        "machine": ({"cores": 2}, {"cores": 4}),
        "libraries": ({"torch": "2.14"}, {"torch": "2.15"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.ArchiveKey: {
        "model_name": ("resnet18-ptq", "mine-ptq"),
        "card": (CARD, {**CARD, "precision": "int8"}),
        "serving": ('{"k": 5}', '{"k": 4}'),
        "known": (None, '{"tolerance": 0.1}'),
        "libraries": ({"PyYAML": "6.0"}, {"PyYAML": "6.1"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.ChartsKey: {
        "report": ({"title": "resnet18", "rows": []}, {"title": "resnet50", "rows": []}),
        "libraries": ({"matplotlib": "3.9"}, {"matplotlib": "3.10"}),
        "code": ("f" * 64, "0" * 64),
    },
    keys.ExamplesKey: {
        "answers": (("a" * 64, "b" * 64), ("a" * 64, "c" * 64)),
        "names": (("baseline@eager", "onnx-int8@openvino"), ("baseline@eager", "ptq@torchscript")),
        "captions": (("Image 1",), ("Image 2",)),
        "images": ("d" * 64, "e" * 64),
        "classes": (("road", "sky"), ("sky", "road")),
        "preprocessing": (PLAIN, dataclasses.replace(PLAIN, resize=20)),
        "libraries": ({"pillow": "12"}, {"pillow": "13"}),
        "code": ("f" * 64, "0" * 64),
    },
}


def records(kind: type[Key] = Key) -> list[type[Key]]:
    """Every record that has a kind: those of results."""
    return [entry for sub in kind.__subclasses__() for entry in ([sub] if hasattr(sub, "kind") else records(sub))]


FIELDS = [(record, field.name) for record in records() for field in dataclasses.fields(record)]


def key_of(record: type[Key], **changes: Any) -> str:
    return record(**{name: first for name, (first, _) in INPUTS[record].items()} | changes).digest


@pytest.mark.parametrize(("record", "field"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_input_changes_the_key(record: type[Key], field: str) -> None:
    first, other = INPUTS[record][field]
    assert key_of(record, **{field: other}) != key_of(record) == key_of(record, **{field: first})


def test_no_two_inputs_or_kinds_share_a_key() -> None:
    found = [key_of(record) for record in INPUTS]
    found += [key_of(record, **{field: INPUTS[record][field][1]}) for record, field in FIELDS]
    assert len(set(found)) == len(found)


def test_every_record_is_known_here() -> None:
    assert set(records()) == set(INPUTS)
    assert len({record.kind for record in records()}) == len(INPUTS)


def test_the_order_of_settings_is_no_input() -> None:
    assert make_key(a=1, b={"x": 2, "y": 3}) == make_key(b={"y": 3, "x": 2}, a=1)
    one, two = {"images": 8, "observer": "minmax"}, {"observer": "minmax", "images": 8}
    assert key_of(keys.StageKey, config=one) == key_of(keys.StageKey, config=two)


def test_what_is_no_json_cannot_be_an_input() -> None:
    assert len({make_key(a=1), make_key(a=2), make_key(a="1"), make_key(b=1), make_key(a=[1]), make_key()}) == 6
    with pytest.raises(TypeError):
        make_key(a=object())


# --- what of a card counts

HELD = Card(
    name="ptq",
    model="resnet18",
    task="classification",
    format="torchscript",
    file="model.pt",
    precision="int8",
    input_dtype="float32",
    device="cpu",
    preprocessing=PLAIN,
    classes=("ant", "bee"),
    files={"model.pt": "0" * 64},
)

#: Another value of every field of a card. A new field needs one here, and a decision whether an engine reads it.
OTHER: dict[str, Any] = {
    "name": "int8",
    "model": "mine",
    "task": "other",
    "format": "onnx",
    "file": "model.onnx",
    "precision": "float32",
    "input_dtype": "float16",
    "device": "any",
    "target": "x86-vnni",
    "preprocessing": dataclasses.replace(PLAIN, resize=20),
    "classes": ("wasp", "bee"),
    "files": {"model.pt": "1" * 64},
    "lineage": (Ancestor("baseline", "baseline", {}, "0" * 64),),
    "data": {"name": "digits"},
    "versions": {"torch": "2.14"},
    "machine": {"cpu": "other"},
    "notes": ("remark",),
    "packed": {"handler.py": "2" * 64},
    "probabilities": "sigmoid",
    "outputs": ("logits", "map"),
    "ending": ("classes",),
    "certificate": Certificate("3" * 64, 0.1, images=1, logits_of=1, data="4" * 64, agreements=()),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Card) if field.name != "schema"])
def test_a_field_of_the_card_counts_unless_it_is_provenance(field: str) -> None:
    files = {"model.onnx": "0" * 64, **HELD.files} if field == "file" else HELD.files
    base = dataclasses.replace(HELD, files=files)
    changed = dataclasses.replace(base, **{field: OTHER[field]})
    read_by_engines = field not in keys.PROVENANCE
    assert (opening(base) != opening(changed)) == read_by_engines
    # Another preprocessing or other labels are another artifact to measure, but no other file to start a pass from.
    assert (content(base) != content(changed)) == (read_by_engines and field not in ("preprocessing", "classes"))


def test_a_pair_is_its_artifact_and_its_execution_and_no_name() -> None:
    one, other = Execution("openvino"), Execution("openvino", options={"precision": "bf16"})
    renamed = dataclasses.replace(HELD, name="int8")
    changed = dataclasses.replace(HELD, precision="int8-dynamic")
    assert paired(HELD, one) == paired(renamed, Execution.from_json(one.to_json()))
    assert len({paired(HELD, one), paired(HELD, other), paired(changed, one)}) == 3


def test_provenance_names_fields_that_there_are() -> None:
    assert not keys.PROVENANCE - {field.name for field in dataclasses.fields(Card)}
    assert "files" in opening(HELD)
