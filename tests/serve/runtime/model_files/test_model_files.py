"""No file of an artifact runs code of its own, or reads another that the card does not name."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from torch import nn

from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import open_engine
from serve.runtime.errors import EngineError
from serve.runtime.model_files.onnx_file import external_files
from serve.runtime.model_files.program_file import check_program, load_program, program_on, save_program
from serve.runtime.model_files.script_file import check_script, load_script
from serve.runtime.service.predictor import Predictor
from tests.serve import artifacts, crafted

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.exported(tmp_path_factory.mktemp("program") / "exported") / "model.pt2"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "RAN"


# --- programs of torch.export


def test_a_program_that_this_project_wrote_is_loaded(program: Path) -> None:
    inputs = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(load_program(program).module()(inputs), torch.export.load(program).module()(inputs))


class Converting(nn.Module):
    """Leaves assertions about devices in its program, in its graph and in a block's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32) + torch.zeros(2, device=x.device)
        with torch.no_grad():
            return x.to(torch.float64).relu()


def test_a_program_is_moved_to_another_device_with_all_that_names_one(tmp_path: Path) -> None:
    exported = torch.export.export(Converting(), (torch.zeros(3, 2, dtype=torch.float16),))
    save_program(exported, tmp_path / "model.pt2")
    moved = program_on(tmp_path / "model.pt2", torch.device("meta")).module()
    found = moved(torch.zeros(3, 2, dtype=torch.float16, device="meta"))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float64, (3, 2))


@pytest.mark.parametrize("way", crafted.RUN_BY_TORCH)
def test_torch_runs_what_a_program_brings(
    way: str, program: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why `load_program` is there. Where a later torch no longer runs one of these, its refusal costs nothing."""
    path = write_crafted(way, program, marker)
    monkeypatch.syspath_prepend(str(marker.parent))
    monkeypatch.delitem(sys.modules, "crafted_module", raising=False)
    logging.disable()  # torch logs the failure with its traceback
    try:
        with contextlib.suppress(Exception):
            torch.export.load(path)
    finally:
        logging.disable(logging.NOTSET)
    assert marker.exists()


@pytest.mark.parametrize("way", crafted.WAYS)
def test_a_program_that_brings_code_is_refused_before_anything_runs(
    way: str, program: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_crafted(way, program, marker)
    monkeypatch.syspath_prepend(str(marker.parent))
    monkeypatch.delitem(sys.modules, "crafted_module", raising=False)
    with pytest.raises(EngineError, match=crafted.WAYS[way][1]) as caught:
        load_program(path)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_an_artifact_with_such_a_program_is_not_opened(program: Path, marker: Path, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    write_crafted("a pickled weight", program, marker).rename(folder / "model.pt2")
    artifacts.write_artifact(folder, "crafted", "exported_program", "model.pt2")
    with pytest.raises(EngineError, match="asks for pickle"):
        Predictor(folder)
    assert not marker.exists()


def write_crafted(way: str, program: Path, marker: Path) -> Path:
    records = crafted.records_of(program)
    crafted.WAYS[way][0](records, marker)
    return crafted.write_records(marker.parent / "model.pt2", records)


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every string of a JSON value, and to every key (which ends with None)."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key, None)
            yield from strings(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from strings(item, (*path, index))
    elif isinstance(value, str):
        yield path


def replaced(value: Any, path: tuple[Any, ...], text: str) -> None:
    *above, last = path
    if last is None:
        *above, key = above
    for step in above:
        value = value[step]
    if last is None:
        value[text] = value.pop(key)
    else:
        value[last] = text


@pytest.mark.parametrize("record", [crafted.MODEL, crafted.WEIGHTS])
@pytest.mark.parametrize("text", ["x = __import__('os')", "a\n  b", 'a"b', "a'b", "(a)"])
def test_no_string_of_a_program_can_hold_more_than_a_name(
    record: str, text: str, program: Path, tmp_path: Path
) -> None:
    """Names of nodes and arguments become source code: a statement is refused wherever it stands."""
    records = crafted.records_of(program)
    document = json.loads(records[record])
    # Kept beside a node and never made source of; and a program has many of the same kind.
    free = {"nn_module_stack", "torch_fn"} if "\n" not in text else set()
    seen, places = set(), []
    for path in strings(document):
        kind = tuple(0 if isinstance(step, int) else step for step in path)
        if kind not in seen and not free & set(path[:-1] if path[-1] is None else path):
            seen.add(kind)
            places.append(path)
    assert len(places) > 50
    for path in places:
        changed = json.loads(records[record])
        replaced(changed, path, text)
        file = crafted.write_records(tmp_path / "model.pt2", {**records, record: json.dumps(changed).encode()})
        try:
            check_program(file)
        except EngineError:
            continue
        # An unknown key is ignored by torch: what it stood for is then missing.
        assert path[-1] is None, path
        raise AssertionError(path)


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save.default",
        "torch.ops.aten.__class__.mro",
        "torch.ops.c10d.send.default",
        "torch.ops.load_library",
        "torch.load",
        "math.factorial",
        "_operator.attrgetter",
        "#x:y",
    ],
)
def test_a_graph_calls_nothing_but_operators(target: str, program: Path, tmp_path: Path) -> None:
    records = crafted.records_of(program)
    crafted.edit(records, crafted.MODEL, lambda d: d["graph_module"]["graph"]["nodes"][0].update(target=target))
    with pytest.raises(EngineError, match="its graph calls"):
        check_program(crafted.write_records(tmp_path / "model.pt2", records))


@pytest.mark.parametrize("record", [crafted.MODEL, crafted.WEIGHTS, crafted.CONSTANTS])
@settings(max_examples=30)
@given(data=st.data())
def test_any_document_is_a_program_or_refused(record: str, program: Path, data: st.DataObject) -> None:
    """Whatever replaces a part of the document, the check ends in its own error, never in another."""
    records = crafted.records_of(program)
    document = json.loads(records[record])
    where: Any = document
    while isinstance(where, dict | list) and where and data.draw(st.booleans() | st.just(value=True)):
        key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
        above, where = where, where[key]
    if where is not document:
        above[key] = data.draw(
            st.none() | st.booleans() | st.integers() | st.text() | st.just([[]]) | st.just({"x": {}})
        )
    records[record] = json.dumps(document).encode()
    file = crafted.write_records(program.parent / "changed.pt2", records)
    refused = ""
    try:
        check_program(file)
    except EngineError as error:
        refused = str(error)
    assert len(refused.splitlines()) <= 1


# --- the zip around them


def with_compressed_record(data: bytes, tmp_path: Path) -> bytes:
    source, target = tmp_path / "a.zip", tmp_path / "b.zip"
    source.write_bytes(data)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return target.read_bytes()


def with_duplicate(data: bytes, tmp_path: Path) -> bytes:
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(next(n for n in archive.namelist() if n.endswith("version")), b"0")
    return path.read_bytes()


def with_name(name: str, data: bytes, tmp_path: Path) -> bytes:
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"0")
    return path.read_bytes()


def with_second_directory(data: bytes, tmp_path: Path) -> bytes:
    """The locator of the 64-bit end record points at an archive inside a record; zipfile does not follow it."""
    changed = bytearray(data)
    changed[-42 + 8 : -42 + 16] = (0).to_bytes(8, "little")
    return bytes(changed)


ZIPS = {
    "something before it": lambda data, tmp_path: b"#!/bin/sh\n" + data,
    "something behind it": lambda data, tmp_path: data + b"PK",
    "another archive behind it": lambda data, tmp_path: data + data,
    "a duplicate": with_duplicate,
    "a record in another case": lambda data, tmp_path: with_name("model/Archive_Version", data, tmp_path),
    "a way out": lambda data, tmp_path: with_name("model/../../x", data, tmp_path),
    "a record outside the folder": lambda data, tmp_path: with_name("version", data, tmp_path),
    "compressed records": with_compressed_record,
    "two directories": with_second_directory,
    "a cut": lambda data, tmp_path: data[:-30],
    "no zip": lambda data, tmp_path: b"PK nothing",
    "nothing": lambda data, tmp_path: b"",
}


@pytest.mark.parametrize("change", ZIPS)
def test_a_zip_that_two_readers_could_read_differently_is_refused(change: str, program: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(ZIPS[change](program.read_bytes(), tmp_path))
    with pytest.raises(EngineError, match="refused before loading"):
        check_program(path)
    with pytest.raises(EngineError, match="refused before loading"):
        check_script(path)


# --- TorchScript


class Saves(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        torch.save(batch, self.path)
        return batch


class SavesOnLoading(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path, self.training = state
        torch.save(torch.zeros(1), state[0])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


def test_torchscript_runs_code_of_its_file_on_loading(tmp_path: Path, marker: Path) -> None:
    """Why `check_script` is there."""
    torch.jit.script(SavesOnLoading(str(marker))).save(str(tmp_path / "model.pt"))
    torch.jit.load(str(tmp_path / "model.pt"))
    assert marker.exists()


@pytest.mark.parametrize("module", [Saves, SavesOnLoading])
def test_a_script_that_writes_files_is_refused(module: Any, tmp_path: Path, marker: Path) -> None:
    torch.jit.script(module(str(marker))).save(str(tmp_path / "model.pt"))
    with pytest.raises(EngineError, match=r"uses torch\.save, which reaches files"):
        load_script(tmp_path / "model.pt", CPU)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("torch.from_file('x')", r"torch\.from_file"),
        ("getattr(torch, 'save')(x, 'y')", "getattr"),
        ("f(torch)", "torch as a value"),
        ("getattr(ops.aten, 'save')(x, 'y')", "getattr"),
        ("ops.aten.save(x, 'y')", "reaches files"),
        ("ops.c10d.send(x)", r"ops\.c10d"),
        ("__torch__.torch.classes.c10d.FileStore('x')", "classes c10d"),
        ("import os", "imports"),
    ],
)
def test_code_of_a_script_that_reaches_more_than_tensors_is_refused(line: str, reason: str, tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "script")
    records = crafted.records_of(folder / "model.pt")
    name = next(name for name in records if name.endswith(".py"))
    records[name] += f"  {line}\n".encode()
    with pytest.raises(EngineError, match=reason):
        check_script(crafted.write_records(tmp_path / "model.pt", records))


@pytest.mark.parametrize("name", ["data.pkl", "constants.pkl"])
def test_a_pickle_in_a_script_runs_nothing_with_or_without_the_check(name: str, tmp_path: Path, marker: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "script")
    records = {**crafted.records_of(folder / "model.pt"), name: pickle.dumps(crafted.Payload(marker), protocol=2)}
    path = crafted.write_records(tmp_path / "model.pt", records)
    with pytest.raises(RuntimeError, match="Unknown type name"):
        torch.jit.load(str(path))
    with pytest.raises(EngineError, match="mknod"):
        load_script(path, CPU)
    assert not marker.exists()


# --- ONNX


def external(location: str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def graph_of(tensor: TensorProto, **more: Any) -> onnx.GraphProto:
    value = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [4])
    return helper.make_graph([helper.make_node("Identity", ["w"], ["logits"])], "g", [], [value], [tensor], **more)


def model_of(graph: onnx.GraphProto, **more: Any) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, **more)


def in_a_branch(tensor: TensorProto) -> onnx.ModelProto:
    branch = graph_of(tensor)
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=graph_of(external("b.bin")))
    return model_of(helper.make_graph([node], "g", [], []))


def in_a_constant(tensor: TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    return model_of(helper.make_graph([node], "g", [], []))


def in_a_function(tensor: TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    function = helper.make_function("d", "f", [], ["w"], [node], [helper.make_opsetid("", 17)])
    return model_of(helper.make_graph([], "g", [], []), functions=[function])


def in_a_sparse_tensor(tensor: TensorProto) -> onnx.ModelProto:
    sparse = helper.make_sparse_tensor(tensor, external("b.bin"), [4])
    return model_of(helper.make_graph([], "g", [], [], sparse_initializer=[sparse]))


@pytest.mark.parametrize(
    "place", [lambda t: model_of(graph_of(t)), in_a_branch, in_a_constant, in_a_function, in_a_sparse_tensor]
)
def test_tensors_outside_an_onnx_file_are_found_wherever_they_stand(place: Any, tmp_path: Path) -> None:
    model = place(external("a.bin"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert set(external_files(tmp_path / "m.onnx")) - {"b.bin"} == {"a.bin"}
    assert len(list(external_files(tmp_path / "m.onnx"))) == str(model).count('key: "location"')


@pytest.mark.parametrize("location", ["../outside.bin", "{absolute}", "unnamed.bin", "./named.bin", "link.bin"])
def test_a_graph_that_reads_what_its_card_does_not_name_is_refused(location: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "artifact", tmp_path / "outside.bin"
    folder.mkdir()
    for path in (outside, folder / "named.bin", folder / "unnamed.bin"):
        path.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (folder / "link.bin").symlink_to(outside)
    graph = graph_of(external(location.format(absolute=outside)))
    (folder / "model.onnx").write_bytes(model_of(graph).SerializeToString())
    artifacts.write_artifact(folder, "x", "onnx", "model.onnx", extra=("named.bin",))
    with pytest.raises(EngineError, match="which the card does not list"):
        open_engine(folder, load_card(folder), Execution("onnxruntime"))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("inner", [False, True])
def test_a_graph_that_brings_compiled_code_is_refused(inner: bool, engine: str, tmp_path: Path) -> None:
    """A TensorRT engine within a node is loaded as it is; also where the node stands in a branch."""
    node = helper.make_node("EPContext", [], ["y"], domain="com.microsoft", ep_cache_context=b"engine", embed_mode=1)
    if inner:
        branch = helper.make_graph([node], "b", [], [])
        node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    folder = artifacts.onnx(tmp_path / "onnx")
    onnx.save(model_of(helper.make_graph([node], "g", [], [])), folder / "model.onnx")
    card = load_card(artifacts.write_artifact(folder, "onnx", "onnx", "model.onnx"))
    with pytest.raises(EngineError, match="compiled code"):
        open_engine(folder, card, Execution(engine))


def test_a_graph_may_keep_tensors_in_a_file_that_the_card_names(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "model.onnx.data").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    graph = graph_of(external("model.onnx.data"))
    graph.input.append(value)
    graph.node[0].CopyFrom(helper.make_node("Add", ["x", "w"], ["logits"]))
    (folder / "model.onnx").write_bytes(model_of(graph).SerializeToString())
    artifacts.write_artifact(folder, "x", "onnx", "model.onnx", extra=("model.onnx.data",))
    (found,) = open_engine(folder, load_card(folder), Execution("onnxruntime")).run(torch.ones(4))
    assert found.tolist() == [1, 2, 3, 4]


@settings(max_examples=200)
@given(data=st.binary(min_size=1, max_size=64), cut=st.integers(0, 200))
def test_bytes_that_are_no_graph_are_refused_as_such(
    data: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    whole = in_a_branch(external("a.bin")).SerializeToString()
    path.write_bytes(whole[:cut] + data)
    with contextlib.suppress(ValueError):
        for location in external_files(path):
            assert isinstance(location, str)
