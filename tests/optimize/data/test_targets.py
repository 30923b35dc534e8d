"""Class maps beside their images, and groups of images that stay together."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from optimize.data import pixels
from optimize.data.loading import loader
from optimize.data.records import Split
from optimize.data.splits import hold_out, split_off, subset
from optimize.data.targets import ClassMaps, Labels
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import ImageError, UserError
from serve.runtime.images.placement import Placement

CPU = torch.device("cpu")
#: Twice the size, by nearest neighbour, without the outermost rows and columns: all by whole pixels.
DOUBLED = Preprocessing((16, 16), (12, 14), interpolation="nearest")
WAYS = ["memory", "file", "workers"]


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def scene(seed: int, classes: int = 5) -> tuple[bytes, np.ndarray]:
    """A picture of 8x8 pixels whose red is ten times the class of each pixel, and the classes."""
    mask = np.random.default_rng(seed).integers(0, classes, (8, 8)).astype(np.uint8)
    return encoded(Image.fromarray(np.stack([10 * mask, mask, mask], -1))), mask


def grey_png(values: np.ndarray, bits: int) -> bytes:
    """A grey PNG of 1 to 16 bits, by the specification: Pillow writes none of 2 and 4."""
    height, width = values.shape
    numbers = values.astype(">u2").view(np.uint8).reshape(height, width, 2)
    rows = [b"\0" + np.packbits(np.unpackbits(row, axis=1)[:, -bits:]).tobytes() for row in numbers]
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(rows))),
        (b"IEND", b""),
    ]
    parts = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def mapped(count: int = 10) -> Split:
    pictures, masks = zip(*map(scene, range(count)), strict=True)
    return Split(pictures, ClassMaps([encoded(Image.fromarray(mask)) for mask in masks], 5))


def whole(mask: bytes | Path | np.ndarray, classes: int = 5, values: dict[int, int] | None = None) -> list[list[int]]:
    found: list[list[int]] = ClassMaps([mask], classes, values).whole(0).tolist()
    return found


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """All ways of reading must give the same batches."""
    if request.param != "memory":
        monkeypatch.setattr(pixels, "MEMORY_LIMIT", 0)
    if request.param == "workers":
        monkeypatch.setattr(pixels, "DISK_LIMIT", 0)
    return request.param


def test_each_pixels_class_comes_with_the_pixel(way, tmp_path):
    batches = list(loader(mapped(), DOUBLED, batch_size=4, device=CPU, scratch=tmp_path))
    assert [len(images) for images, _ in batches] == [4, 4, 2]
    for images, targets in batches:
        assert targets.dtype == torch.uint8
        assert targets.shape == (len(images), 12, 14)
        assert torch.equal(images[:, 0], 10 * targets)
    assert len(batches[0][1].unique()) == 5


def test_a_mask_that_cannot_be_read_leaves_out_its_image_in_every_way_of_reading(way, tmp_path):
    good = mapped()
    gone = tmp_path / "gone.png"
    masks = [good.targets._sources[row] if row != 3 else gone for row in range(10)]  # type: ignore[attr-defined]
    split = Split(good.sources, ClassMaps(masks, 5))
    batches = loader(split, DOUBLED, batch_size=4, device=CPU, scratch=tmp_path, skip_unreadable=0.2)
    assert [rows.tolist() for rows, *_ in batches.numbered()] == [[0, 1, 2], [4, 5, 6, 7], [8, 9]]
    assert batches.left_out == {3: f"its mask {gone}: cannot be read (No such file or directory)"}
    with pytest.raises(UserError, match=r"^image 3: its mask .*gone\.png: cannot be read .*; repair it$"):
        list(loader(split, DOUBLED, batch_size=4, device=CPU, scratch=tmp_path, remedy="repair it"))


def test_the_limit_of_memory_counts_masks(monkeypatch, tmp_path):
    needed = 10 * 12 * 14 * (3 + 1)
    monkeypatch.setattr(pixels, "MEMORY_LIMIT", needed)
    assert pixels.fitted(mapped(), DOUBLED) is not None
    monkeypatch.setattr(pixels, "MEMORY_LIMIT", needed - 1)
    assert pixels.fitted(mapped(), DOUBLED) is None


def test_bars_around_a_picture_do_not_count():
    picture, mask = Image.new("RGB", (8, 4)), Image.new("L", (8, 4), 2)
    split = Split([encoded(picture)], ClassMaps([encoded(mask)], 5))
    ((_, targets),) = loader(split, Preprocessing("letterbox", (8, 8)), batch_size=1, device=CPU)
    assert targets[0].tolist() == [[255] * 8] * 2 + [[2] * 8] * 4 + [[255] * 8] * 2


def test_a_mask_that_is_read_for_finished_pixels_has_their_size():
    finished = np.zeros((3, 12, 14), np.uint8)
    mask = np.arange(12 * 14, dtype=np.uint8).reshape(12, 14) % 5
    ((_, targets),) = loader(Split([finished], ClassMaps([mask], 5)), DOUBLED, batch_size=1, device=CPU)
    assert np.array_equal(targets[0], mask)


def test_every_kind_of_png_gives_its_numbers(tmp_path):
    values = np.arange(4, dtype=np.uint8).reshape(2, 2)
    palette = Image.fromarray(values).copy()
    palette.putpalette([250, 0, 0, 0, 250, 0, 0, 0, 250, 9, 9, 9])
    file = tmp_path / "mask.png"
    file.write_bytes(encoded(palette))
    assert palette.mode == "P"
    for mask in (
        *(grey_png(values, bits) for bits in (2, 4, 8)),
        *(encoded(palette), encoded(palette, bits=2), file, values),
        encoded(Image.fromarray(values.astype(np.uint16))),
    ):
        assert whole(mask) == [[0, 1], [2, 3]]
    assert whole(grey_png(values % 2, 1)) == [[0, 1], [0, 1]]


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9), st.integers(1, 19), st.integers(0, 1 << 32))
def test_greys_of_every_depth_and_size_come_back(bits, height, width, seed):
    values = np.random.default_rng(seed).integers(0, 1 << bits, (height, width))
    found = ClassMaps([grey_png(values, bits)], 300).whole(0).numpy()
    assert np.array_equal(found, np.where(values < 300, values, 32767))


def test_what_is_no_class_does_not_count():
    mask = encoded(Image.fromarray(np.array([[0, 4, 5], [11, 254, 255]], np.uint8)))
    assert whole(mask) == [[0, 4, 255], [255, 255, 255]]
    assert whole(mask, values={5: 0, 254: 1}) == [[255, 255, 0], [255, 1, 255]]


def test_more_than_255_classes_take_16_bits():
    values = np.array([[0, 255, 299], [300, 65535, 256]], np.uint16)
    found = ClassMaps([encoded(Image.fromarray(values))], 300)
    assert found.dtype == torch.int16
    assert found.whole(0).tolist() == [[0, 255, 299], [32767, 32767, 256]]
    assert ClassMaps([np.array([[255, 254]], np.uint8)], 300).whole(0).tolist() == [[255, 254]]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (encoded(Image.new("RGB", (8, 8))), r"its mask: is of colours \(RGB\); a mask is a PNG whose greys"),
        (encoded(Image.new("LA", (8, 8))), r"its mask: is of colours \(LA\)"),
        (encoded(Image.new("L", (8, 8)), "JPEG"), "its mask: is a JPEG, which changes numbers; a mask is a PNG"),
        (encoded(Image.new("L", (8, 6))), "its mask has 8x6 pixels, the picture has 8x8"),
        (encoded(Image.effect_noise((64, 64), 50))[:1000], "its mask: the image is truncated or broken"),
        (b"no picture", "its mask: not an image"),
    ],
    ids=["colours", "alpha", "jpeg", "size", "broken", "text"],
)
def test_what_is_no_mask_of_the_picture_is_refused_in_one_line(mask, said):
    with pytest.raises(ImageError, match=rf"^{said}") as caught:
        ClassMaps([mask], 5).load(0, Placement.of(8, 8, DOUBLED))
    assert "\n" not in str(caught.value)


def test_a_fingerprint_covers_the_masks_their_meaning_and_the_groups():
    pictures, masks = zip(*map(scene, range(3)), strict=True)
    other = masks[2].copy()
    other[7, 7] = (other[7, 7] + 1) % 5
    renumbered = ClassMaps(masks, 5).renumbered(torch.tensor([1, 0, 2, 3, 4]))
    splits = [
        Split(pictures, ClassMaps(masks, 5)),
        Split(pictures, ClassMaps([*masks[:2], other], 5)),
        Split(pictures, ClassMaps(masks, 6)),
        Split(pictures, renumbered),
        Split(pictures, ClassMaps(masks, 5), groups=torch.tensor([0, 0, 1])),
        Split(pictures, ClassMaps(masks, 5), groups=torch.tensor([0, 1, 1])),
        Split(pictures, Labels(torch.zeros(3, dtype=torch.int64))),
    ]
    assert len({split.fingerprint for split in splits}) == len(splits)
    assert Split(pictures, ClassMaps([mask.copy() for mask in masks], 5)).fingerprint == splits[0].fingerprint


def test_classes_in_another_order_are_so_in_every_mask():
    maps = ClassMaps([np.array([[0, 1, 2, 3]], np.uint8)], 3).renumbered(torch.tensor([2, 0, 1]))
    assert maps.whole(0).tolist() == [[2, 0, 1, 255]]
    assert maps.renumbered(torch.tensor([1, 2, 0])).whole(0).tolist() == [[0, 1, 2, 255]]


def test_parts_have_the_masks_of_their_images():
    split = mapped(20)
    for found in (subset(split, 6, seed=1), *hold_out(split, 0.3, 2)):
        ((images, targets),) = loader(found, DOUBLED, batch_size=20, device=CPU)
        assert torch.equal(images[:, 0], 10 * targets)
    assert [len(found) for found in hold_out(split, 0.3, 2)] == [14, 6]


@given(
    groups=st.lists(st.integers(0, 6), min_size=2, max_size=40),
    share=st.floats(0.05, 0.5),
    seed=st.integers(0, 5),
)
def test_what_is_held_out_shares_no_group_with_the_rest(groups, share, seed):
    assume(len(set(groups)) > 1)
    names = tuple(str(row).encode() for row in range(len(groups)))
    split = Split(names, Labels(torch.zeros(len(groups), dtype=torch.int64)), groups=torch.tensor(groups))
    keys = [bytes(np.random.default_rng([seed, row]).bytes(8)) for row in range(len(groups))]
    for (fit, held), wanted in ((hold_out(split, share, seed), share), (split_off(split, keys), 0.2)):
        assert fit.groups is not None
        assert held.groups is not None
        assert not set(fit.groups.tolist()) & set(held.groups.tolist())
        assert sorted([*fit.sources, *held.sources]) == sorted(names)
        assert len(fit) > 0
        sizes = [groups.count(group) for group in set(groups)]
        # No group that fits is left out, unless it is the last one.
        off = abs(len(held) - wanted * len(groups))
        assert len(held) > 0
        assert off <= max(sizes)


def test_one_group_cannot_be_divided():
    split = Split((b"a", b"b"), Labels(torch.zeros(2, dtype=torch.int64)), groups=torch.tensor([4, 4]))
    with pytest.raises(UserError, match="all 2 images belong to one group, so none can be held out; name at least two"):
        hold_out(split, 0.5, 0)
