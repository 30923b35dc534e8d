"""A run whose files were changed: every command that reads it says so, and what it advises mends it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import serve.cli
from optimize import cli
from optimize.measure.rows import Report
from optimize.profiling.profile_files import write_page
from optimize.report.finished_runs import faults_of, report_of
from optimize.store.keys import make_key
from optimize.store.objects import Store
from optimize.store.store_pruning import prunable, prune
from serve.runtime.card.card import sha256_file
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.errors import UserError
from tests.optimize.runs_fixtures import Heard, made_run, run_recipe, shared_folder, with_stages
from tests.optimize.workbench import noting

SMALL = with_stages({"pass": "fuse"})
#: A file of each kind, and the commands beside `verify` that read it.
KINDS = {
    "report.json": ("show tiny", "package tiny", "run tiny", "start tiny", "export tiny --to kubernetes"),
    "run.json": (),
    "objects.json": ("prune",),
    "report.html": (),
    "pareto.svg": (),
    "sample.png": ("compare tiny/baseline tiny/fuse",),
    "artifacts/fuse/card.json": ("show tiny/fuse", "package tiny", "export tiny --to kubernetes --artifact fuse"),
    "artifacts/fuse/model.pt2": ("package tiny", "start tiny/fuse --engine exported", "tune tiny/fuse"),
    "artifacts/fuse/known.json": ("package tiny", "start tiny/fuse --workers 2", "tune tiny/fuse"),
    "artifacts/fuse/serving.json": ("package tiny", "start tiny/fuse --workers 2", "tune tiny/fuse"),
    "artifacts/fuse/measurements.json": ("package tiny",),
    "archives/tiny-fuse.mar": ("run tiny/fuse", "start tiny/fuse"),
    "archives/tiny-fuse.mar.cdx.json": (),
}
SERVING = ("package", "run", "start", "export", "tune")


def invoke(store: Path, command: str) -> Result:
    words = [*command.split(), "--store", str(store)]
    app = serve.cli.app if words[0] in SERVING else cli.app
    return CliRunner().invoke(app, words)


def one_letter_else(path: Path) -> bytes:
    """Change a letter, or a bit of what is no text, so that JSON stays JSON; returns what was there."""
    before = path.read_bytes()
    after = bytearray(before)
    digits = [place for place, byte in enumerate(before) if chr(byte).isdigit()]
    after[digits[len(digits) // 2]] ^= 1  # of 0.337 another number
    path.write_bytes(after)
    return before


def numbers(report: Report) -> dict[str, float]:
    """Top-1 of each pair that was measured."""
    return {pair.id: pair.measured.accuracy.score for row in report.rows for pair in row.pairs if pair.measured}


def verified(store: Path) -> str:
    return invoke(store, "verify tiny").stdout


WHOLE = "artifacts and archives are whole\n"


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run of the baseline and ``fuse`` alone, of which `tiny_run` has made everything."""
    store = tmp_path_factory.mktemp("small") / "model_store"
    shutil.copytree(made_run(shared_folder(tmp_path_factory)).store, store)
    run_recipe(store, SMALL)
    prune(Store(store), prunable(Store(store)))
    return store


@pytest.fixture
def small_store(small_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    store = tmp_path / "model_store"
    shutil.copytree(small_run, store)
    return store


def again(store: Path) -> tuple[Report, Heard]:
    outcome, heard = run_recipe(store, SMALL)
    assert outcome.failed == ()
    assert verified(store) == f"4 {WHOLE}"
    return outcome.report, heard


def test_every_changed_file_of_a_run_is_named_and_refused_by_what_reads_it(small_store: Path) -> None:
    for name, readers in KINDS.items():
        path = small_store / "tiny" / name
        before = one_letter_else(path)
        result = invoke(small_store, "verify tiny")
        assert result.exit_code == 1, name
        line, last = result.stderr.splitlines()
        assert line.startswith(f"{path}: corrupted: ")
        assert last.endswith("are damaged; run the model again to rebuild them")
        for reader in readers:
            result = invoke(small_store, reader)
            said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
            assert (result.exit_code, len(said)) == (2, 1), (name, reader, result.output, result.exception)
            assert str(path) in said[0], (name, reader)
            assert "run the model again" in said[0] or "run the command that made tiny again" in said[0], (name, reader)
        path.write_bytes(before)
    assert verified(small_store) == f"4 {WHOLE}"


def test_running_again_mends_whatever_was_changed_and_makes_nothing_anew(small_store: Path) -> None:
    first, _ = again(small_store)
    folder = small_store / "tiny"
    for name in KINDS:
        one_letter_else(folder / name)
    (folder / "artifacts" / "fuse" / "stray.json").touch()
    (folder / "sample.jpg").touch()
    assert len(faults_of(small_store, "tiny")[1]) == len(KINDS) + 2
    repeat, heard = again(small_store)
    assert heard.made() == set()
    assert numbers(repeat) == numbers(first)


def test_a_run_that_finds_everything_made_hashes_no_model_and_no_archive_to_seal(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(small_store)  # from here on the run's files are those of the store: links
    hashed: list[str] = []
    monkeypatch.setattr("serve.runs.sealed_files.sha256_file", noting(hashed, sha256_file, lambda path: path.name))
    run_recipe(small_store, SMALL)
    assert "report.json" in hashed
    assert not [name for name in hashed if name.endswith((".pt2", ".safetensors", ".mar"))]


def test_a_changed_owner_of_a_run_does_not_keep_the_run_from_being_made_again(small_store: Path) -> None:
    path = small_store / "tiny" / "run.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({name: f"{value}x" for name, value in body.items()}))
    again(small_store)
    assert json.loads(path.read_text()) == body


@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_list_that_is_missing_or_damaged_is_one_line_and_the_next_run_seals(damage: str, small_store: Path) -> None:
    path = small_store / "tiny" / "files.json"
    if damage == "removed":
        path.unlink()
    else:
        one_letter_else(path)
    for command in ("verify tiny", "show tiny", "package tiny", "run tiny", "start tiny", "tune tiny/fuse"):
        result = invoke(small_store, command)
        assert result.exit_code == 2, command
        (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
        assert "files.json" in line
        assert "run the model again" in line
    assert "left out: " in invoke(small_store, "list").stderr
    assert again(small_store)[1].made() == set()


def test_packing_again_mends_an_archive_and_its_bill_as_verify_says(small_store: Path) -> None:
    folder = small_store / "tiny" / "archives"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    one_letter_else(folder / "tiny-fuse.mar.cdx.json")
    (folder / "tiny-baseline.mar").unlink()
    first, second, last = invoke(small_store, "verify tiny").stderr.splitlines()
    for line in (first, second):
        assert f"`{serve.common.hints.command('serve package tiny', small_store)}` packs it as the run did" in line
    assert last.startswith("error: 2 of 4 are damaged")
    result = invoke(small_store, "package tiny")
    assert (result.exit_code, result.stderr) == (0, "")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert verified(small_store) == f"4 {WHOLE}"


def test_what_other_commands_write_into_a_run_is_sealed(small_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(small_store, "package tiny --workers 2").exit_code == 0
    write_page(small_store, "tiny")
    assert invoke(small_store, "export tiny --to kubernetes").exit_code == 0
    assert verified(small_store) == f"4 {WHOLE}"
    way = SimpleNamespace(way=Serving((Execution("exported"),), batch_size=2), outcome="well")

    def tuned(artifact: Path, *_: object) -> SimpleNamespace:
        for name in ("tuning.json", "tuning.svg", "tuning.journal"):
            (artifact / name).touch()
        (artifact / "serving.json").unlink()  # which no link to the store shares
        (artifact / "serving.json").write_text(way.way.text)
        return SimpleNamespace(chosen=way, usual=way)

    monkeypatch.setattr("serve.tune.tuning.tune", tuned)
    assert invoke(small_store, "tune tiny/fuse --short").exit_code == 0
    assert verified(small_store) == f"4 {WHOLE}"
    assert invoke(small_store, "package tiny").exit_code == 0


def test_a_run_that_is_killed_before_it_seals_says_so_and_the_next_one_mends_it(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("optimize.run.pipeline.sealed_files.seal", killed)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(small_store, {**SMALL, "serving": {"workers": 2}})
        shutil.copytree(small_store / "tiny", small_store / "first")
        (small_store / "first" / "files.json").unlink()  # as a first run leaves it
    result = invoke(small_store, "verify tiny")
    assert (result.exit_code, result.stderr.splitlines()[-1].endswith("run the model again to rebuild them")) == (
        1,
        True,
    )
    assert "run the model again" in invoke(small_store, "run tiny/fuse").stderr
    assert "it is incomplete or from an older version; run the model again" in invoke(small_store, "show first").stderr
    assert again(small_store)[1].made() == set()


def test_nothing_is_pruned_by_a_changed_list_of_what_a_run_needs(small_store: Path) -> None:
    path = small_store / "tiny" / "objects.json"
    one_letter_else(path)
    with pytest.raises(UserError, match="is damaged; run the command that made tiny again, or remove"):
        prunable(Store(small_store))
    again(small_store)
    prunable(Store(small_store))


# --- bit by bit

KEY = make_key(what="the object of these tests")


def build(folder: Path) -> None:
    (folder / "figures.json").write_text('{"top1": 0.337}')
    (folder / "weights").write_bytes(bytes(range(32)))


@settings(max_examples=300)
@given(data=st.data())
def test_any_flipped_bit_of_an_object_is_noticed_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("store")
    made = Store(root).obtain(KEY, build, about="these tests")
    flip(data, root / ".store")
    found = Store(root).obtain(KEY, build, about="these tests")
    assert found.files == made.files
    assert (found.folder / "figures.json").read_text() == '{"top1": 0.337}'
    assert (found.folder / "weights").read_bytes() == bytes(range(32))
    if found.cached:
        assert (found.seconds, found.created) == (made.seconds, made.created)


PLACES = st.integers(0, 2**32 - 1)


def flip(data: st.DataObject, *roots: Path) -> None:
    """Change a bit of a file in the folders; what is drawn does not depend on what lies there."""
    files = sorted(path for root in roots for path in root.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[data.draw(PLACES) % len(files)]
    content = bytearray(path.read_bytes())
    bit = data.draw(PLACES) % (8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.slow
@settings(max_examples=4, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_run_over_a_store_with_flipped_bits_gives_the_same_numbers(
    data: st.DataObject, small_run: Path, small_store: Path
) -> None:
    """Of the run's folder and of the store's objects and locks; each example damages what the one before mended."""
    for _ in range(4):
        flip(data, small_store / "tiny", small_store / ".store")
    report, _ = again(small_store)
    assert numbers(report) == numbers(report_of(small_run, "tiny"))
