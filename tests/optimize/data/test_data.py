"""Loaders, subsets, random changes and the choice of preprocessing, against what is written out by hand."""

from __future__ import annotations

import io
import multiprocessing
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from optimize.data import pixels as data_module
from optimize.data.augment import augment
from optimize.data.formats.base import open_data
from optimize.data.loading import loader
from optimize.data.pixels import decoded
from optimize.data.random_draws import Draws
from optimize.data.records import ImageData, Split
from optimize.data.sources import Files, Selected, select
from optimize.data.splits import hold_out, subset
from optimize.data.targets import Labels
from optimize.models.model_names import resolve_model
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.source import ModelSource
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from serve.runtime.images import image_preprocessing
from tests.narrow import encoded
from tests.optimize.workbench import noting

CPU = torch.device("cpu")
TINY = Preprocessing(4, (4, 4))


def png(value: int, size: int = 4) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (value % 256, value // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def numbered(count: int, classes: int = 3) -> Split:
    """Images whose colour is their number, labelled with their number modulo ``classes``."""
    return Split(tuple(png(i) for i in range(count)), Labels(torch.arange(count) % classes))


def numbers(batch: torch.Tensor) -> list[int]:
    return (batch[:, 0, 0, 0].long() + 256 * batch[:, 1, 0, 0].long()).tolist()


@pytest.fixture(params=["memory", "workers"])
def way(request, monkeypatch):
    """Both ways of reading must give the same batches."""
    if request.param == "workers":
        monkeypatch.setattr(data_module, "MEMORY_LIMIT", 0)
    return request.param


def test_unshuffled_batches_hold_every_image_in_order_with_its_label(way):
    batches = list(loader(numbered(10), TINY, batch_size=4, device=CPU))
    assert [numbers(x) for x, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [y.tolist() for _, y in batches] == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0]]
    assert all(x.dtype == torch.uint8 and x.shape[1:] == (3, 4, 4) and y.dtype == torch.int64 for x, y in batches)
    assert len(loader(numbered(10), TINY, batch_size=4, device=CPU)) == 3


def test_pixels_are_the_runtimes_own(way):
    sources = tuple(sorted(open_data("digits").val.sources[:6]))
    split = Split(sources, Labels(torch.zeros(6, dtype=torch.int64)))
    preprocessing = Preprocessing(20, (16, 18), interpolation="bicubic")
    ((batch, _),) = loader(split, preprocessing, batch_size=6, device=CPU)
    assert torch.equal(
        batch, torch.stack([image_preprocessing.load(encoded(source), preprocessing) for source in sources])
    )


def test_shuffled_epochs_differ_and_each_is_repeatable_and_whole(way):
    split = numbered(40)
    shuffled = loader(split, TINY, batch_size=8, device=CPU, shuffle=True, seed=3)

    def order(epoch: int) -> list[int]:
        batches = list(shuffled.epoch(epoch))
        for x, y in batches:
            assert [n % 3 for n in numbers(x)] == y.tolist()
        return [n for x, _ in batches for n in numbers(x)]

    first, second = order(0), order(1)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second != list(range(40))
    assert order(0) == first
    next_seed = loader(split, TINY, batch_size=8, device=CPU, shuffle=True, seed=4)
    assert [n for x, _ in next_seed.epoch(0) for n in numbers(x)] not in (first, second)


def test_a_last_batch_of_one_image_is_left_out_of_training_only():
    split = numbered(9)
    assert [len(y) for _, y in loader(split, TINY, batch_size=4, device=CPU, shuffle=True)] == [4, 4]
    assert [len(y) for _, y in loader(split, TINY, batch_size=4, device=CPU)] == [4, 4, 1]
    assert len(loader(split, TINY, batch_size=4, device=CPU, shuffle=True)) == 2


def test_a_file_that_is_no_image_is_named_in_one_line(way, tmp_path):
    bad = tmp_path / "holiday.jpg"
    bad.write_bytes(b"not a picture")
    split = Split((png(1), bad, png(2)), Labels(torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(UserError, match=r"holiday\.jpg: not an image") as caught:
        list(loader(split, TINY, batch_size=2, device=CPU))
    assert "\n" not in str(caught.value)


def test_a_file_that_has_gone_is_named(way, tmp_path):
    split = Split((tmp_path / "gone.png",), Labels(torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(UserError, match=r"gone\.png: cannot be read"):
        list(loader(split, TINY, batch_size=2, device=CPU))


def test_a_split_is_decoded_once_and_forgotten_with_it(monkeypatch):
    split = numbered(5)
    first = decoded(split, TINY)
    monkeypatch.setattr(image_preprocessing, "decode", lambda *_, **__: pytest.fail("decoded again"))
    assert decoded(split, TINY) is first
    kept = len(data_module._kept)
    del split
    assert len(data_module._kept) == kept - 1


def test_what_is_first_read_in_inference_mode_can_be_trained_on_afterwards():
    split = numbered(6)
    with torch.inference_mode():
        list(loader(split, TINY, batch_size=3, device=CPU, limit=4))
        list(loader(split, TINY, batch_size=3, device=CPU))
    for limit in (4, None):
        for batch, labels in loader(split, TINY, batch_size=3, device=CPU, limit=limit):
            assert not batch.is_inference()
            assert not labels.is_inference()


def test_large_images_are_decoded_by_threads_with_the_same_result(monkeypatch):
    monkeypatch.setattr(data_module, "cores", lambda: 4)
    noise = np.random.default_rng(0).integers(0, 256, (130, 96, 96, 3), dtype=np.uint8)
    sources = []
    for pixels in noise:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        sources.append(buffer.getvalue())
    split = Split(tuple(sources), Labels(torch.zeros(130, dtype=torch.int64)))
    assert data_module._threads(split.sources) == 4
    assert torch.equal(decoded(split, Preprocessing(96, (96, 96))), torch.from_numpy(noise).permute(0, 3, 1, 2))


def test_workers_stay_alive_between_epochs(monkeypatch):
    monkeypatch.setattr(data_module, "MEMORY_LIMIT", 0)
    stream = loader(numbered(12), TINY, batch_size=4, device=CPU, shuffle=True)
    list(stream.epoch(0))
    before = {process.pid for process in multiprocessing.active_children()}
    list(stream.epoch(1))
    assert before
    assert {process.pid for process in multiprocessing.active_children()} == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_for_cuda_are_pinned(way):
    for x, y in loader(numbered(6), TINY, batch_size=4, device=torch.device("cuda")):
        assert x.is_pinned()
        assert y.is_pinned()


@settings(max_examples=50)
@given(labels=st.lists(st.integers(0, 4), min_size=2, max_size=60), seed=st.integers(0, 9), share=st.floats(0.05, 0.99))
def test_a_subset_has_the_asked_size_keeps_proportions_and_repeats(labels, seed, share):
    split = Split(tuple(str(i).encode() for i in range(len(labels))), Labels(torch.tensor(labels)))
    limit = max(1, int(len(labels) * share))
    part = subset(split, limit, seed)
    assert len(part) == limit
    assert len(set(part.sources)) == limit
    assert [labels[int(encoded(source))] for source in part.sources] == part.labels.tolist()
    for label in set(labels):
        exact = labels.count(label) * limit / len(labels)
        assert abs(part.labels.tolist().count(label) - exact) < 1 + 1e-5
    again = Split(split.sources, split.targets)
    assert subset(again, limit, seed).sources == part.sources


def test_a_subset_as_large_as_the_split_is_the_split_and_limits_reach_the_loader():
    split = numbered(30)
    assert subset(split, 30) is split
    assert subset(split, 5, seed=1) is subset(split, 5, seed=1)
    assert subset(split, 6, seed=1).sources != subset(split, 6, seed=2).sources
    read = [n for x, _ in loader(split, TINY, batch_size=4, device=CPU, limit=6, seed=1) for n in numbers(x)]
    assert [png(n) for n in read] == list(subset(split, 6, seed=1).sources)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 4, "limit": 0}])
def test_sizes_that_are_not_positive_are_refused(options):
    with pytest.raises(UserError, match="at least 1, got 0"):
        loader(numbered(3), TINY, device=CPU, **options)


def shifted(image: np.ndarray, dy: int, dx: int, mode: str) -> np.ndarray:
    """What a shift means, written with numpy's padding: the window moves, the outside is filled."""
    _, height, width = image.shape
    reach = 2
    padded = np.pad(image, ((0, 0), (reach, reach), (reach, reach)), "reflect" if mode == "reflect" else "constant")
    return padded[:, reach + dy : reach + dy + height, reach + dx : reach + dx + width]


@pytest.mark.parametrize(("kind", "mode"), [("shift", "zero"), ("shift+flip", "reflect")])
def test_each_image_is_one_of_the_allowed_shifts_and_all_kinds_occur(kind, mode):
    batch = torch.randint(1, 256, (64, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    original = batch.clone()
    result = augment(batch, kind, Draws(1, 0, torch.arange(64)))
    assert torch.equal(batch, original)
    assert (result.shape, result.dtype) == (batch.shape, torch.uint8)
    seen = set()
    for before, after in zip(batch.numpy(), result.numpy(), strict=True):
        found = [
            (dy, dx, flip)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            for flip in (False, True)
            if np.array_equal(shifted(before, dy, dx, mode)[:, :, :: -1 if flip else 1], after)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert {dy for dy, _, _ in seen} == {dx for _, dx, _ in seen} == set(range(-2, 3))
    assert {flip for _, _, flip in seen} == ({False, True} if kind == "shift+flip" else {False})


def test_no_augmentation_changes_nothing_and_a_seed_repeats_itself():
    batch = torch.randint(0, 256, (8, 1, 9, 5), dtype=torch.uint8)
    assert augment(batch, "none", Draws(5, 0, torch.arange(8))) is batch
    one, two = (augment(batch, "shift+flip", Draws(5, 0, torch.arange(8))) for _ in range(2))
    assert torch.equal(one, two)


def test_what_happens_to_an_image_is_its_own_whatever_batch_it_comes_in():
    batch = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8)
    rows = torch.randperm(1000)[:64]
    whole = augment(batch, "shift+flip", Draws(7, 3, rows))
    for some in (torch.tensor([5]), torch.tensor([60, 2, 33])):
        assert torch.equal(augment(batch[some], "shift+flip", Draws(7, 3, rows[some])), whole[some])
    for other in (Draws(8, 3, rows), Draws(7, 4, rows), Draws(7, 3, rows + 1)):
        same = (augment(batch, "shift+flip", other) == whole).flatten(1).all(1)
        assert same.float().mean() < 0.2, "each image has one chance in 50 to be moved as before"


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 40])
def test_draws_are_spread_evenly_and_independent_of_each_other(seed):
    draws = [Draws(seed, epoch, torch.arange(20_000)).uniform(what) for epoch in (0, 1) for what in (0, 1)]
    for numbers in draws:
        counts = np.histogram(numbers, 20, (0.0, 1.0))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 50, "chi-squared of 19 degrees: 43.8 is exceeded once in 1000"
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03
    correlations = np.corrcoef(np.stack(draws)) - np.eye(4)
    assert abs(correlations).max() < 0.03
    assert set(Draws(seed, 0, torch.arange(500)).below(5, 0)) == {0, 1, 2, 3, 4}


def data_of(name: str, native: tuple[int, int] | None) -> ImageData:
    split = Split((b"",), Labels(torch.zeros(1, dtype=torch.int64)))
    return ImageData(
        name,
        "classification",
        ("a", "b"),
        split,
        split,
        "none",
        native,
        preferred_side=64 if name == "digits" else None,
    )


def size_of(preprocessing: Preprocessing) -> tuple[int, tuple[int, int]]:
    assert isinstance(preprocessing.resize, int)
    return preprocessing.resize, preprocessing.crop


DIGITS, CIFAR, PHOTOS = data_of("digits", (8, 8)), data_of("cifar10", (32, 32)), data_of("photos", None)


@pytest.mark.parametrize(
    ("model", "data", "image_size", "expected"),
    [
        ("resnet18", DIGITS, None, (64, (64, 64))),
        ("inception_v3", DIGITS, None, (75, (75, 75))),
        ("vit_b_16", DIGITS, None, (64, (64, 64))),
        ("vit_h_14", DIGITS, None, (70, (70, 70))),
        ("maxvit_t", DIGITS, None, (224, (224, 224))),
        ("resnet18", CIFAR, None, (32, (32, 32))),
        ("alexnet", CIFAR, None, (63, (63, 63))),
        ("resnet18", PHOTOS, None, (256, (224, 224))),
        ("resnet18", data_of("wide", (32, 48)), None, (256, (224, 224))),
        ("resnet18", PHOTOS, 112, (128, (112, 112))),
        ("resnet18", DIGITS, 56, (64, (56, 56))),
    ],
)
def test_the_size_follows_model_data_and_wish(model, data, image_size, expected):
    source = resolve_model(model)
    preprocessing = choose_preprocessing(source, data, image_size).preprocessing
    assert source.preprocessing is not None
    assert size_of(preprocessing) == expected
    assert (preprocessing.mean, preprocessing.std, preprocessing.interpolation) == (
        source.preprocessing.mean,
        source.preprocessing.std,
        source.preprocessing.interpolation,
    )


def test_a_users_declaration_wins_over_the_data_and_its_proportion_is_kept():
    declared = Preprocessing(40, (32, 32), (0.5,) * 3, (0.25,) * 3, "bicubic")
    source = ModelSource("m.py:net", "net", "0", declared)
    assert choose_preprocessing(source, DIGITS).preprocessing == declared
    assert choose_preprocessing(source, PHOTOS, 64).preprocessing == Preprocessing(
        80, (64, 64), (0.5,) * 3, (0.25,) * 3, "bicubic"
    )


def test_a_user_who_declares_nothing_gets_imagenets_numbers_at_the_datas_size():
    source = ModelSource("m.py:net", "net", "0", None)
    assert choose_preprocessing(source, CIFAR).preprocessing == Preprocessing(32, (32, 32))
    assert choose_preprocessing(source, PHOTOS).preprocessing == Preprocessing(256, (224, 224))


def test_a_size_that_the_network_cannot_take_is_refused():
    with pytest.raises(UserError, match="96 or 112"):
        choose_preprocessing(resolve_model("vit_b_16"), PHOTOS, 100)


def test_paths_and_bytes_give_the_same_pixels(tmp_path):
    file = Path(tmp_path / "1.png")
    file.write_bytes(png(7))
    split = Split((file, png(7)), Labels(torch.zeros(2, dtype=torch.int64)))
    assert torch.equal(*decoded(split, TINY))


def test_an_epochs_order_is_drawn_once_whatever_else_is_asked(way, monkeypatch):
    drawn: list[int] = []
    monkeypatch.setattr(torch, "randperm", noting(drawn, torch.randperm, lambda size, *_, **__: size))
    shuffled = loader(numbered(20), TINY, batch_size=4, device=CPU, shuffle=True)
    for _ in shuffled.epoch(0):
        assert len(shuffled) == 5
    assert drawn.count(20) == 1


def test_a_hundred_thousand_files_are_held_in_a_few_megabytes_and_a_part_of_them_copies_no_name():
    names = [[b"ILSVRC2012_%08d.JPEG" % (1000 * folder + n) for n in range(1000)] for folder in range(100)]
    tracemalloc.start()
    files = Files.listed(Path("/data"), ((b"train/n%08d" % n, part) for n, part in enumerate(names)))
    split = Split(select(files, np.arange(len(files))), Labels(torch.arange(100_000) % 1000))
    fit, held = hold_out(split, 0.1, 0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 6e6  # as a tuple of paths, 20 times as much
    assert len(fit) == 90_000
    assert len(held) == 10_000
    assert isinstance(held.sources, Selected)
    row = int(held.sources.rows[17])
    assert held.sources[17] == Path(f"/data/train/n{row // 1000:08d}/ILSVRC2012_{row:08d}.JPEG")
    assert held.sources.whole is files
