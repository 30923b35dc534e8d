"""The sealed list of a run's files: whatever changes in the folder is named, and what is written later is sealed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.common import layout
from serve.runs import sealed_files
from serve.runs.sealed_files import SealError
from serve.runtime.card.card import sha256_file
from serve.runtime.errors import UserError

CONTENTS = {
    "report.json": b'{"top1": 0.337}',
    "report.html": b"<html></html>",
    "artifacts/a/known.json": b"{}",
    "artifacts/a/model.onnx": bytes(range(64)),
    "archives/small-a.mar": b"an archive",
    "archives/small-a.mar.cdx.json": b"a bill",
}


def make_run(store: Path) -> Path:
    folder = store / "small"
    for name, content in CONTENTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sealed_files.seal(folder)
    return folder


def named(folder: Path) -> list[str]:
    return [fault.name for fault in sealed_files.faults(folder, sealed_files.names(folder))]


@given(data=st.data())
def test_any_flipped_bit_is_noticed_or_harmless(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("store") / "small"
    make_run(folder.parent)
    before = json.loads((folder / "files.json").read_text())
    name = data.draw(st.sampled_from([*CONTENTS, "files.json"]))
    content = bytearray((folder / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(content)
    if name == "files.json":
        if sealed_files.is_sealed(folder):
            assert json.loads((folder / name).read_text()) == before
        else:
            with pytest.raises(SealError, match=r"files\.json is damaged; run the model again to rebuild it \(.*\)$"):
                sealed_files.require(folder, "report.json")
    else:
        assert named(folder) == [name]
        with pytest.raises(SealError):
            sealed_files.read(folder, name)


def test_what_is_missing_and_what_is_not_of_the_run_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert named(folder) == []
    (folder / "artifacts/a/known.json").unlink()
    (folder / "artifacts/a/stray").mkdir()
    (folder / "artifacts/a/stray/file").touch()
    (folder / "artifacts/a/link").symlink_to(folder)
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    assert named(folder) == ["artifacts/a/known.json", "artifacts/a/link", "artifacts/a/stray/file", "report.html"]
    with pytest.raises(SealError, match=r"known\.json: missing \(and 2 more: `.* -m optimize verify small .*` lists"):
        sealed_files.require(folder, "artifacts/a")
    sealed_files.require(folder, "report.json")


def test_what_proves_itself_or_is_being_written_or_may_be_edited_is_not_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    others = (
        "archives/small-a.mar.sig",
        ".report.json.new",
        "artifacts/a/tuning.journal",
        "ptq-error.txt",
        "export/k/a",
    )
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert named(folder) == []
    sealed_files.seal(folder)
    assert set(json.loads((folder / "files.json").read_text())["files"]) == set(CONTENTS)


def test_only_what_was_written_is_sealed_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    for name in ("archives/small-a.mar", "report.html"):
        (folder / name).write_bytes(b"another")
    (folder / "archives/small-a.mar.cdx.json").unlink()
    sealed_files.reseal(folder, [folder / "archives/small-a.mar", folder / "archives/small-a.mar.cdx.json"])
    assert named(folder) == ["report.html"]


def test_what_was_just_hashed_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path)
    model = folder / "artifacts/a/model.onnx"
    digest = json.loads((folder / "files.json").read_text())["files"]["artifacts/a/model.onnx"]["sha256"]
    hashed: list[Path] = []

    def hashing(path: Path) -> str:
        hashed.append(path)
        return sha256_file(path)

    monkeypatch.setattr(sealed_files, "sha256_file", hashing)
    sealed_files.seal(folder, {model: digest})
    assert sorted(hashed) == sorted(folder / name for name in CONTENTS if folder / name != model)
    hashed.clear()
    sealed_files.read(folder, "report.json")
    assert hashed == [folder / "report.json"]
    assert named(folder) == []


def test_a_folder_of_nothing_but_archives_is_trusted_and_a_run_without_a_list_is_not(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / layout.SEAL_FILE).unlink()
    for ask in (sealed_files.require, sealed_files.read):
        with pytest.raises(UserError, match=r"small has no files\.json, .* run the model again$"):
            ask(folder, "report.json")
    (folder / "report.json").unlink()
    sealed_files.require(folder, "archives/small-a.mar")
    assert sealed_files.read(folder, "report.json") is None
    sealed_files.reseal(folder, [folder / "archives/small-a.mar"])
    assert not (folder / layout.SEAL_FILE).exists()
