"""Images that cannot be read: named all at once, left out where that is allowed, counted, and refused where not."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from optimize.context import Context
from optimize.data import loading, pixels
from optimize.data.loading import loader
from optimize.data.records import Split
from optimize.data.targets import Labels
from optimize.listener import Silent
from optimize.measure.accuracy import accuracy, answer, load_answers, save_answers
from optimize.run.session import Session
from optimize.store.objects import Store
from optimize.tasks.classification import CLASSIFICATION
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from serve.runtime.errors import UserError
from serve.runtime.images import image_preprocessing
from serve.runtime.service.predictor import Predictor
from tests.narrow import encoded
from tests.optimize.training.test_training_loop import FAST, brightness, network
from tests.optimize.workbench import CPU, GREY16, image_data, noise, noting


@pytest.fixture(params=["memory", "disk", "workers"])
def way(request, monkeypatch, tmp_path):
    """The three ways of reading must leave out and refuse the same images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param != "memory":
        monkeypatch.setattr(pixels, "MEMORY_LIMIT", 0)
    if request.param == "workers":
        monkeypatch.setattr(pixels, "DISK_LIMIT", 0)
    return request.param


def with_bad(folder: Path, count: int, bad: set[int], classes: int = 4) -> Split:
    """Noise, of which those in ``bad`` are files of text; the others keep their bytes."""
    whole = noise(count, 3, classes=classes)
    folder.mkdir(parents=True, exist_ok=True)
    sources: list[Path | bytes] = []
    for row, source in enumerate(whole.sources):
        if row in bad:
            path = folder / f"bad{row}.png"
            path.write_bytes(b"not a picture")
            sources.append(path)
        else:
            sources.append(encoded(source))
    return Split(tuple(sources), whole.targets)


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, message: str) -> None:
        self.lines.append(message)


def test_a_tolerated_image_is_left_out_of_its_batch_and_the_others_keep_their_labels(way, tmp_path):
    split = with_bad(tmp_path, 20, {1, 12})
    whole = noise(20, 3)
    read = loader(split, GREY16, batch_size=8, device=CPU, skip_unreadable=0.1)
    rows, labels = [], []
    for numbers, batch, truth in read.numbered():
        for row, image in zip(numbers.tolist(), batch, strict=True):
            assert torch.equal(image, image_preprocessing.load(whole.sources[row], GREY16))
        rows += numbers.tolist()
        labels += truth.tolist()
    assert rows == [row for row in range(20) if row not in {1, 12}]
    assert labels == [row % 4 for row in rows]
    assert set(read.left_out) == {1, 12}
    assert len(read) == 3


def test_more_than_tolerated_are_refused_and_up_to_ten_are_named_at_once(way, tmp_path):
    bad = set(range(0, 24, 2))
    split = with_bad(tmp_path, 40, bad)
    read = loader(split, GREY16, batch_size=4, device=CPU, skip_unreadable=0.1, remedy="mend them")
    with pytest.raises(UserError) as caught:
        list(read)
    line = str(caught.value)
    assert line.count("bad") == 10
    assert "bad0.png: not an image" in line
    assert line.endswith("; mend them")
    assert "\n" not in line
    counted = re.search(r"(\d+) of 40 images cannot be read", line)
    assert counted is not None
    found = int(counted[1])
    assert found == 12 if way != "workers" else 10 <= found <= 12, "workers stop where it is certain"
    assert (f"and {found - 10} more" in line) == (found > 10)


def test_one_that_is_not_tolerated_is_named_with_all_others_even_if_they_come_much_later(way, tmp_path):
    read = loader(with_bad(tmp_path, 64, {2, 33, 61}), GREY16, batch_size=4, device=CPU)
    with pytest.raises(UserError, match=r"3 of 64 images cannot be read: .*bad2\.png.*bad33\.png.*bad61\.png"):
        list(read)


def test_nothing_but_unreadable_images_is_refused_whatever_is_tolerated(way, tmp_path):
    with pytest.raises(UserError, match="2 of 2 images cannot be read"):
        list(loader(with_bad(tmp_path, 2, {0, 1}), GREY16, batch_size=2, device=CPU, skip_unreadable=1.0))


def test_a_shuffled_epoch_leaves_them_out_and_never_has_a_batch_of_one(way, tmp_path):
    split = with_bad(tmp_path, 21, {4, 5, 6})
    read = loader(split, GREY16, batch_size=2, device=CPU, shuffle=True, skip_unreadable=0.2)
    for number in range(3):
        batches = [rows.tolist() for rows, *_ in read.numbered(number)]
        assert {len(rows) for rows in batches} == {2}
        assert not {4, 5, 6} & set(itertools.chain.from_iterable(batches))


def test_what_is_left_out_is_said_once(way, tmp_path):
    heard = Heard()
    read = loader(with_bad(tmp_path, 20, {7}), GREY16, batch_size=8, device=CPU, skip_unreadable=0.1, said=heard.said)
    for _ in range(2):
        list(read)
    (line,) = heard.lines
    assert line.startswith("1 unreadable image left out: ")
    assert "bad7.png: not an image" in line


def test_training_leaves_out_its_share_and_notes_it(tmp_path):
    context = brightness(96)
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not a picture")
    sources = (*context.data.train.sources[:95], bad)
    train_split = Split(sources, context.data.train.targets)
    context = dataclasses.replace(context, data=image_data(train_split, context.data.val))
    result = train(network(), context, FAST.model_copy(update={"skip_unreadable": 0.2}))
    (note,) = result.notes
    assert "1 unreadable image left out: " in note
    assert "bad.png: not an image" in note
    with pytest.raises(UserError, match=r"bad\.png.*leave out at most 1\.00% of them.*skip_unreadable"):
        train(network(), context, FAST)


def test_a_baselines_card_counts_what_it_was_not_trained_on(tmp_path, session):
    data = session.context.data
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not a picture")
    train_split = Split((*data.train.sources[:299], bad), Labels(data.train.labels[:300]))
    context = dataclasses.replace(session.context, data=dataclasses.replace(data, train=train_split))
    made = Session(Store(tmp_path / "store"), session.source, context).baseline(
        TrainingConfig(epochs=1, augment=False, skip_unreadable=0.05)
    )
    assert any("1 unreadable image left out" in note and "bad.png" in note for note in made.artifact.card.notes)


def test_accuracy_refuses_unreadable_images_or_leaves_them_out_and_counts_them(tmp_path, trained, digits_context):
    data = digits_context.data
    sources = list(data.val.sources)
    rows = (3, 100)
    for row in rows:
        sources[row] = tmp_path / f"bad{row}.png"
        sources[row].write_bytes(b"not a picture")
    spoilt = dataclasses.replace(data, val=Split(tuple(sources), data.val.targets))
    context = Context(spoilt, GREY16, CPU)
    predictor = Predictor(trained.folder)
    with pytest.raises(UserError, match=r"2 of \d+ images cannot be read: .*bad3.*bad100.*--skip-unreadable"):
        answer(predictor.outputs, context, 32)
    found = answer(predictor.outputs, dataclasses.replace(context, skip_unreadable=True), 32)
    whole = answer(predictor.outputs, Context(data, GREY16, CPU), 32)
    others = [row for row in range(len(sources)) if row not in rows]
    assert found.evidence["predicted"].tolist() == whole.evidence["predicted"][others].tolist()
    assert found.evidence["first"].tolist() == whole.evidence["first"][others].tolist()
    record = accuracy(found, None, "key", CLASSIFICATION)
    assert (record.images, record.left_out) == (len(sources) - 2, 2)
    save_answers(found, tmp_path)
    assert load_answers(tmp_path).left_out.tolist() == list(rows)
    assert accuracy(whole, None, "key", CLASSIFICATION).left_out == 0


def test_calibration_goes_on_without_one_image_in_twenty(tmp_path):
    heard = Heard()
    context = Context(image_data(with_bad(tmp_path, 64, {9}), noise(8)), GREY16, CPU, listener=heard)
    read = list(context.calibration(64))
    assert sum(len(labels) for _, labels in read) == 63
    assert ["bad9.png" in line for line in heard.lines] == [True]
    few = Context(image_data(with_bad(tmp_path, 64, set(range(8))), noise(8)), GREY16, CPU)
    with pytest.raises(UserError, match=r"8 of 64 images cannot be read.*one in twenty"):
        list(few.calibration(64))


def test_an_example_has_as_many_images_as_asked_for_even_if_some_cannot_be_read(tmp_path):
    context = Context(image_data(with_bad(tmp_path, 4, {0, 2}), noise(8)), GREY16, CPU)
    assert context.example(4).shape == (4, 1, 16, 16)


# --- too many for memory -----------------------------------------------------------------------------------------


@pytest.fixture
def decodings(monkeypatch):
    """How many images were decoded."""
    count: list[int] = []
    monkeypatch.setattr(pixels, "load_row", noting(count, pixels.load_row, lambda *_: 1))
    monkeypatch.setattr(loading, "load_row", pixels.load_row)
    return count


def test_evaluation_images_above_memory_are_decoded_once_for_all_artifacts(
    tmp_path, monkeypatch, decodings, made, digits_context
):
    artifacts = (made("fuse"), made("fuse", "onnx"))
    from_memory = [answer(Predictor(artifact.folder).outputs, digits_context, 32) for artifact in artifacts]
    monkeypatch.setattr(pixels, "MEMORY_LIMIT", 0)
    data = digits_context.data
    fresh = dataclasses.replace(data, val=Split(data.val.sources, data.val.targets))
    context = Context(fresh, GREY16, CPU, scratch=tmp_path)
    decodings.clear()
    from_disk = [answer(Predictor(artifact.folder).outputs, context, 32) for artifact in artifacts]
    assert len(decodings) == len(data.val)
    for one, two in zip(from_memory, from_disk, strict=True):
        assert torch.equal(one.outputs[0], two.outputs[0])
        assert torch.equal(one.evidence["predicted"], two.evidence["predicted"])
    assert not list(tmp_path.iterdir()), "the file has no name, so that nothing is left behind"


def test_pixels_on_disk_are_those_in_memory_in_any_order(tmp_path, monkeypatch):
    split = noise(150, 5)
    kept = pixels.fitted(split, GREY16)
    monkeypatch.setattr(pixels, "MEMORY_LIMIT", 0)
    on_disk = pixels.fitted(Split(split.sources, split.targets), GREY16, tmp_path, disk=True)
    rows = torch.from_numpy(np.random.default_rng(0).permutation(150))
    assert kept is not None
    assert isinstance(kept.images, pixels.InMemory)
    assert on_disk is not None
    assert isinstance(on_disk.images, pixels.OnDisk)
    assert all(map(torch.equal, kept.read(rows), on_disk.read(rows)))
    assert torch.equal(kept.images.values, on_disk.images.read(torch.arange(150)))


@pytest.mark.parametrize("limit", ["disk", "free"])
def test_pixels_beyond_the_disks_bound_are_decoded_each_time(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(pixels, "MEMORY_LIMIT", 0)
    needed = 149 * (16 * 16 + 8)  # a grey byte for each pixel, and a label of 64 bits
    if limit == "disk":
        monkeypatch.setattr(pixels, "DISK_LIMIT", needed)
    else:
        usage = shutil.disk_usage(tmp_path)._replace(free=2 * needed)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert pixels.fitted(noise(150, 5), GREY16, tmp_path, disk=True) is None
    assert pixels.fitted(noise(149, 5), GREY16, tmp_path, disk=True) is not None


def test_the_decoding_of_many_images_tells_how_far_it_is(tmp_path):
    told: list[float] = []
    list(loader(noise(200, 6), GREY16, batch_size=64, device=CPU, told=told.append))
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) > 1
