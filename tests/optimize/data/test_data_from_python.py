"""Tensors, datasets and loaders as data: equal pixels, labels and fingerprints, or a line that says what is missing."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)
from torchvision.transforms.v2 import functional as transforms

from optimize.data import from_python
from optimize.data.from_python import image_data
from optimize.data.pixels import decoded, load
from optimize.data.program_items import Data
from optimize.data.sources import Pixels, Records
from optimize.models.model_names import resolve_model
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.preprocessing_config import PreprocessingConfig, Wish
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from serve.runtime.images import image_preprocessing
from tests.narrow import encoded
from tests.optimize.picture_files import PICTURE_FILES

RNG = np.random.default_rng(0)
PIXELS = torch.from_numpy(RNG.integers(0, 256, (24, 3, 10, 12), dtype=np.uint8))
LABELS = torch.arange(24) % 3
DONE = Preprocessing(12, (10, 12), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Pictures(Dataset[tuple[Image.Image, int]]):
    """PIL images with their classes' names, as torchvision's data sets give them."""

    classes = ("ant", "bee", "cat")

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(PIXELS[row].permute(1, 2, 0).numpy()), int(LABELS[row])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Pictures()[row] for row in range(len(PIXELS)))


FORMS: dict[str, Data] = {
    "tensors": (PIXELS, LABELS),
    "arrays": (PIXELS.permute(0, 2, 3, 1).numpy(), LABELS.numpy()),
    "tensor dataset": TensorDataset(PIXELS, LABELS),
    "pictures": Pictures(),
    "pairs": [Pictures()[row] for row in range(24)],
    "stream": Stream(),
    "loader": DataLoader(TensorDataset(PIXELS, LABELS), batch_size=5),
    "shuffled loader": DataLoader(TensorDataset(PIXELS, LABELS), batch_size=5, shuffle=True, drop_last=True),
    "concatenated": ConcatDataset([Subset(Pictures(), range(10)), Subset(Pictures(), range(10, 24))]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pixels_labels_and_fingerprint(form):
    data = image_data(FORMS[form], (PIXELS[:6], LABELS[:6]))
    expected = image_data(FORMS["tensors"], (PIXELS[:6], LABELS[:6]))
    assert [image_preprocessing.decode(encoded(source)).tolist() for source in data.train.sources] == PIXELS.tolist()
    assert data.train.labels.tolist() == LABELS.tolist()
    assert data.train.fingerprint == expected.train.fingerprint
    assert data.native_size == (10, 12)
    assert data.preprocessing is None
    assert len(data.val) == 6


def test_names_of_classes_are_those_given_or_the_datas_own_or_numbers():
    held = (PIXELS[:6], LABELS[:6])
    assert image_data(FORMS["tensors"], held).classes == ("0", "1", "2")
    assert image_data(FORMS["pictures"], held).classes == ("ant", "bee", "cat")
    assert image_data(DataLoader(Pictures(), batch_size=None), held).classes == ("ant", "bee", "cat")
    assert image_data(FORMS["pictures"], held, classes=["x", "y", "z", "w"]).classes == ("x", "y", "z", "w")


def test_without_validation_images_a_fifth_of_each_class_is_split_off():
    first, again, other = (image_data(FORMS["tensors"], seed=seed) for seed in (0, 0, 1))
    assert torch.bincount(first.val.labels).tolist() == [2, 2, 2]
    assert torch.bincount(first.train.labels).tolist() == [6, 6, 6]
    assert not set(first.train.sources) & set(first.val.sources)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_loader_of_some_images_gives_those_in_the_order_of_their_data_set():
    loader = DataLoader(Pictures(), sampler=SubsetRandomSampler([9, 3, 17, 4]), batch_size=2)
    data = image_data(loader, FORMS["tensors"])
    assert data.train.labels.tolist() == LABELS[[3, 4, 9, 17]].tolist()


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Pictures(), batch_sampler=BatchSampler(SubsetRandomSampler([9, 3, 17, 4]), 3, drop_last=False)),
        DataLoader(Pictures(), batch_sampler=[[17, 4], [9], [3]]),
        DataLoader(Pictures(), sampler=[17, 4, 9, 3], batch_size=None),
        DataLoader(
            TensorDataset(PIXELS, LABELS), sampler=BatchSampler([17, 4, 9, 3], 2, drop_last=False), batch_size=None
        ),
    ],
    ids=["batch sampler", "batches", "one by one", "batches, one by one"],
)
def test_however_a_loader_says_which_images_it_gives_it_is_those(loader):
    assert image_data(loader, FORMS["tensors"]).train.labels.tolist() == LABELS[[3, 4, 9, 17]].tolist()


def test_a_loader_that_draws_some_images_gives_no_more():
    drawn = RandomSampler(Pictures(), num_samples=9, generator=torch.Generator().manual_seed(0))
    assert len(image_data(DataLoader(Pictures(), sampler=drawn), FORMS["tensors"]).train) == 9


def test_grey_pixels_stay_grey():
    data = image_data((PIXELS[:, :1], LABELS), (PIXELS[:, 0], LABELS))
    for split in (data.train, data.val):
        assert [image_preprocessing.decode(encoded(source), 1)[0].tolist() for source in split.sources] == PIXELS[
            :, 0
        ].tolist()


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.float64])
def test_floats_that_are_prepared_as_stated_become_the_pixels_they_were_made_of(kind):
    floats = image_preprocessing.normalise(PIXELS, DONE, torch.device("cpu"), torch.float32).to(kind)
    data = image_data((floats, LABELS), (PIXELS, LABELS), preprocessing=DONE)
    assert data.preprocessing == DONE
    off = (decoded(data.train, DONE).int() - PIXELS.int()).abs().max()
    assert off <= (1 if kind == torch.float16 else 0)
    assert torch.equal(decoded(data.val, DONE), PIXELS)


def test_prepared_images_are_not_prepared_again():
    done = Preprocessing(20, (10, 12))  # a crop of a larger image: fitting it again would enlarge it
    data = image_data((PIXELS, LABELS), preprocessing=done)
    first = data.train.sources[0]
    assert isinstance(first, np.ndarray)
    assert torch.equal(load(first, done), torch.tensor(first))
    assert first.tolist() in PIXELS.tolist()
    source = resolve_model("resnet18")
    larger = PIXELS.repeat(1, 1, 4, 4)[..., :40, :40]
    chosen = choose_preprocessing(source, image_data((larger, LABELS), preprocessing=Preprocessing(48, (40, 40))))
    assert chosen.preprocessing == Preprocessing(48, (40, 40))
    assert set(chosen.origins.values()) == {"already done, as you stated"}


def test_what_was_done_cannot_be_asked_for_otherwise():
    data = image_data((transforms.resize(PIXELS, [40, 40]), LABELS), preprocessing=Preprocessing(48, (40, 40)))
    source = resolve_model("resnet18")
    for size, wish in ((64, {}), (None, {"mean": (0.5, 0.5, 0.5)}), (None, {"crop": 36})):
        with pytest.raises(UserError, match="already preprocessed, with"):
            choose_preprocessing(source, data, size, [Wish(PreprocessingConfig(**wish))])
    same = Wish(PreprocessingConfig(resize=48))
    assert choose_preprocessing(source, data, 40, [same]).preprocessing == Preprocessing(48, (40, 40))


FLOATS = PIXELS.float() / 255


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (
            (FLOATS, LABELS),
            {},
            r"train\[0\]: its image is Tensor of torch.float32, shape \(3, 10, 12\); float images are already prep",
        ),
        ((FLOATS * 9 - 4, LABELS), {"preprocessing": DONE}, r"train\[0\]: is not normalized with mean"),
        ((FLOATS * torch.nan, LABELS), {"preprocessing": DONE}, "come from a pixel of nan"),
        (
            (FLOATS[..., :9], LABELS),
            {"preprocessing": DONE},
            r"shape \(3, 10, 9\); with your preprocessing, images have the shape \(3, 10, 12\)",
        ),
        ((PIXELS.long(), LABELS), {}, "torch.int64.*must be a PIL image or uint8"),
        ((PIXELS[:, [0, 1, 2, 0, 1]], LABELS), {}, r"shape \(5, 10, 12\); it must have the shape \(C, H, W\)"),
        ((PIXELS, LABELS[:5]), {}, "has 24 images and 5 labels"),
        ((PIXELS, LABELS.float()), {}, "its label is Tensor of torch.float32.*index of its class"),
        ((PIXELS, torch.eye(24) * 0.9), {}, r"its label is Tensor of torch.float32, shape \(24,\).* or one-hot"),
        ((PIXELS, LABELS - 1), {}, r"its label is .*0 or more"),
        ((PIXELS, LABELS * 0), {}, r"only one class \(0\)"),
        ((PIXELS, LABELS), {"classes": ["a", "b"]}, "has 2 names, and a label is 2"),
        ((PIXELS[:0], LABELS[:0]), {}, "train: has no images"),
        (PIXELS, {}, "train: is Tensor of torch.uint8, shape .*; it must be a pair of images and labels"),
        (7, {}, "train: is 7; it must be"),
        ([{"image": 1}], {}, r"train\[0\]: is of type dict; it must be a pair"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_one_line(train, options, message):
    with pytest.raises(UserError, match=message) as caught:
        image_data(train, **options)
    assert "\n" not in str(caught.value)


def test_many_images_are_mapped_from_a_file_without_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(from_python, "_IN_MEMORY", 0)
    done = Preprocessing(12, (10, 12))
    mapped = image_data(FORMS["tensors"], (PIXELS, LABELS), preprocessing=done, scratch=tmp_path)
    assert mapped.preprocessing == done
    assert isinstance(mapped.train.sources, Pixels)
    assert isinstance(mapped.train.sources.pixels.base, np.memmap)
    assert torch.equal(decoded(mapped.train, done), PIXELS)
    kept = image_data(FORMS["tensors"], (PIXELS, LABELS), scratch=tmp_path)
    assert isinstance(kept.train.sources, Records)
    assert isinstance(kept.train.sources.data, np.memmap)
    assert [image_preprocessing.decode(encoded(source)).tolist() for source in kept.train.sources] == PIXELS.tolist()
    assert [path for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_it_tells_how_far_the_reading_is():
    told: list[float] = []
    image_data((PIXELS.repeat(10, 1, 1, 1), LABELS.repeat(10)), told=told.append)
    assert told == sorted(told)
    assert told[0] == 0
    assert told[-1] > 0.5


@pytest.mark.parametrize("kind", PICTURE_FILES)
def test_a_picture_gives_the_pixels_of_its_file(kind):
    file = PICTURE_FILES[kind]
    with Image.open(io.BytesIO(file)) as opened:
        data = image_data([(opened, 0), (opened, 1)], (PIXELS[:6], LABELS[:6]))
    white = 65535 if kind.startswith("32") else None
    kept = encoded(data.train.sources[0])
    assert torch.equal(
        image_preprocessing.decode(kept, pixel_max=white), image_preprocessing.decode(file, pixel_max=white)
    )


def test_a_picture_that_is_prepared_is_not_turned_and_its_deep_greys_are_not_cut_off():
    grey = Preprocessing(4, (4, 4), (0.5,), (0.5,))
    values = np.arange(16, dtype=np.uint16).reshape(4, 4)
    picture = Image.fromarray(values * 257)
    picture.getexif()[ExifTags.Base.Orientation] = 6
    assert image_preprocessing.upright(picture) is not picture
    held = [(picture, label) for label in (0, 1)]
    source = image_data(held, held, preprocessing=grey).train.sources[0]
    assert np.array_equal(np.asarray(source), [values])


def test_a_picture_that_cannot_be_read_is_named():
    broken = Image.open(io.BytesIO(PICTURE_FILES["turned"][:-200]))
    with pytest.raises(UserError, match=r"^train\[1\]: the image is truncated or broken"):
        image_data([(PIXELS[0], 0), (broken, 1)])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["first", "last", "picture"])
def test_images_of_one_to_four_channels_are_read_as_they_are(channels, form):
    pixels = np.random.default_rng(channels).integers(0, 256, (4, channels, 10, 12), dtype=np.uint8)
    rows = list(pixels) if form == "first" else [image.transpose(1, 2, 0) for image in pixels]
    if form == "picture":
        rows = [Image.fromarray(image[..., 0] if channels == 1 else image) for image in rows]
    data = image_data(list(zip(rows, [0, 1, 0, 1], strict=True)), [(rows[0], 0)])
    for source, expected in zip(data.train.sources, pixels, strict=True):
        assert torch.equal(image_preprocessing.decode(encoded(source), channels), torch.from_numpy(expected))
