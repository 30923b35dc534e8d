"""A training that SIGKILL ends goes on where it was, and ends with the weights that it would have had, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimize.data.loading import loader
from optimize.listener import Silent
from optimize.store.objects import Store
from optimize.store.store_pruning import prunable, prune
from optimize.training.checkpoints import Checkpoints, fingerprint
from optimize.training.loop import train
from tests.optimize.interrupted import STEPS
from tests.optimize.training.test_training_loop import FAST, brightness, network
from tests.optimize.workbench import CPU, GREY16

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("interrupted")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.optimize.interrupted", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize("at", range(1, STEPS + 1))
def test_a_training_that_is_killed_at_any_step_ends_with_the_same_weights(outcomes, at):
    (whole,), (killed, resumed) = outcomes["plain"], outcomes[f"plain {at}"]
    assert killed == {"killed": True}
    assert whole["steps"] == STEPS
    assert resumed["steps"] == STEPS - (at - 1), "the step that was not saved is taken again, and no other"
    assert resumed["made"] == whole["made"]
    assert resumed["notes"] == whole["notes"]
    assert any("training continues in epoch" in line for line in resumed["said"]) == (at > 1)
    assert resumed["left"] == whole["left"] == []


@pytest.mark.parametrize(("name", "at"), [("rich", 7), ("qat", 6)])
def test_so_does_one_with_averaged_weights_in_mixed_precision_and_one_for_int8(outcomes, name, at):
    (whole,), (killed, resumed) = outcomes[name], outcomes[f"{name} {at}"]
    assert killed == {"killed": True}
    assert resumed["made"] == whole["made"]
    assert resumed["notes"] == whole["notes"]
    assert resumed["steps"] == whole["steps"] - (at - 1)
    assert any("best" in note and "best=None" not in note for note in whole["notes"]), "training changed something"


def test_a_process_that_is_killed_while_it_writes_a_checkpoint_leaves_the_one_before(outcomes):
    (whole,), (killed, resumed) = outcomes["plain"], outcomes["writing 6"]
    assert killed == {"killed": True}
    assert resumed["steps"] == STEPS - 5
    assert resumed["made"] == whole["made"]
    assert resumed["left"] == []


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, message: str) -> None:
        self.lines.append(message)


def test_a_checkpoint_that_cannot_be_read_is_said_and_training_begins_anew(tmp_path):
    heard = Heard()
    checkpoints = Checkpoints(tmp_path, "a", 0.0, heard)
    checkpoints.save({"step": torch.tensor(3)})
    assert checkpoints.load() == {"step": torch.tensor(3)}
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert checkpoints.load() is None
    assert heard.lines == ["the checkpoint of the interrupted training cannot be read; training starts again"]


def test_a_full_disk_stops_the_checkpoints_and_not_the_training(tmp_path):
    heard = Heard()
    checkpoints = Checkpoints(tmp_path / "file" / "folder", "a", 0.0, heard)
    (tmp_path / "file").touch()
    before = checkpoints.due
    checkpoints.save({})
    assert (before, checkpoints.due) == (True, False)
    assert len(heard.lines) == 1
    assert "training continues without checkpoints" in heard.lines[0]


def test_no_checkpoint_is_due_before_its_time_or_without_a_folder(tmp_path):
    assert not Checkpoints(tmp_path, "a", 3600.0, Silent()).due
    assert not Checkpoints(None, "a", 0.0, Silent()).due


def test_unfinished_work_goes_with_its_object_and_can_be_pruned(tmp_path):
    store = Store(tmp_path)
    for key in ("a", "b"):
        store.unfinished(key).mkdir(parents=True)
        (store.unfinished(key) / "training.pt").write_bytes(b"x" * 100)
    store.obtain("a", lambda folder: (folder / "model").touch())
    assert not store.unfinished("a").exists()
    found = prunable(store)
    assert store.unfinished("b") in found.objects
    assert any("unfinished" in line for line in found.lines())
    prune(store, found)
    assert not store.unfinished("b").exists()


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_checkpoint_is_noticed(place, bit, tmp_path_factory):
    folder, heard = tmp_path_factory.mktemp("unfinished"), Heard()
    checkpoints = Checkpoints(folder, "start", 0.0, heard)
    checkpoints.save({"weights": torch.arange(8.0)})
    saved = checkpoints.load()
    assert saved is not None
    assert torch.equal(saved["weights"], torch.arange(8.0))
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    assert checkpoints.load() is None
    assert heard.lines == ["the checkpoint of the interrupted training cannot be read; training starts again"]


def test_two_trainings_for_one_object_go_on_each_from_its_own_checkpoint(tmp_path):
    context = dataclasses.replace(brightness(), unfinished=tmp_path, checkpoint_seconds=0.0)
    heard = Heard()
    for start in (0, 1):
        alone, kept, again = network(start), network(start), network(start)
        train(alone, dataclasses.replace(context, unfinished=None), FAST)
        train(kept, context, FAST)
        train(again, dataclasses.replace(context, listener=heard), FAST)
        for name, value in alone.state_dict().items():
            assert torch.equal(kept.state_dict()[name], value)
            assert torch.equal(again.state_dict()[name], value)
    assert len([line for line in heard.lines if "continues" in line]) == 2


def test_another_number_of_processes_does_not_go_on_from_what_these_have_trained():
    starts = [fingerprint(network(seed), FAST, processes) for seed in (0, 1) for processes in (1, 2)]
    assert len(set(starts)) == 4
    assert fingerprint(network(), FAST, 2) == starts[1]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_loader_goes_on_within_an_epoch(streamed, digits, monkeypatch):
    if streamed:
        monkeypatch.setattr("optimize.data.pixels.MEMORY_LIMIT", 0)
    batches = loader(digits.val, GREY16, batch_size=50, device=CPU, shuffle=True, seed=4)
    whole = list(batches.placed(2))
    rest = list(batches.placed(2, 5))
    assert [place for place, *_ in whole] == list(range(len(batches)))
    assert [place for place, *_ in rest] == list(range(5, len(batches)))
    for expected, found in zip(whole[5:], rest, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(expected[1:4], found[1:4], strict=True))
    assert list(batches.placed(2, len(batches))) == []
