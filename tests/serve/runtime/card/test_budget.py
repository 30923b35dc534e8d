"""What a stranger's images may cost: pixels, seconds and memory, and that only she pays for it."""

from __future__ import annotations

import gc
import io
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from benchmarks.hostile import bombs
from benchmarks.hostile.pictures import encoded, picture
from serve.runtime.card.budget import SERVING, Account, Backlog, Budget
from serve.runtime.errors import ImageError, Refusal, UserError
from serve.runtime.images.headers import opened, read_header
from serve.runtime.images.image_preprocessing import decode
from serve.runtime.images.structure import plain_jpeg, plain_webp
from serve.runtime.outputs import Outputs
from serve.runtime.service.image_loading import Loaded, load_items
from serve.runtime.service.predictor import Predictor
from serve.runtime.tasks.base import Outcome
from tests.programs import Programs
from tests.serve import artifacts
from tests.serve.artifacts import jpeg

MILLION = 1_000_000


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.torchscript(tmp_path_factory.mktemp("budget") / "script")


@pytest.fixture(scope="module")
def predictor(artifact: Path) -> Predictor:
    predictor = Predictor(artifact, max_batch=4, budget=SERVING)
    predictor.warm_up(range(1, 5))
    return predictor


def statuses(outcomes: list[Outcome]) -> list[int]:
    return [outcome.status if isinstance(outcome, Refusal) else 200 for outcome in outcomes]


@pytest.mark.parametrize("name", bombs.BOMBS)
def test_a_bomb_of_any_kind_is_413_within_milliseconds(name: str) -> None:
    data = bombs.bomb(name)
    taken = []
    for _ in range(5):
        started = time.thread_time()  # of this thread: other processes use these cores too
        with pytest.raises(ImageError) as caught:
            read_header(data, SERVING)
        taken.append(time.thread_time() - started)
    assert caught.value.status == 413
    assert "\n" not in str(caught.value)
    assert min(taken) < 0.03


def rewritten(tiff: bytes, *, big: bool) -> bytes:
    """A TIFF of `bombs` as one whose numbers are big-endian, or as a BigTIFF; what follows its directory stays."""
    (tags,) = struct.unpack_from("<H", tiff, 8)
    end = 10 + 12 * tags
    entries = list(struct.iter_unpack("<HHII", tiff[10:end]))
    if big:
        head = b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, tags)
        return head + b"".join(struct.pack("<HHQQ", *entry) for entry in entries) + bytes(8) + tiff[end:]
    directory = b"".join(
        struct.pack(">HHI", kind, number, count) + struct.pack(">HH" if number == 3 else ">I", *value)
        for kind, number, count, told in entries
        for value in [(told, 0) if number == 3 else (told,)]
    )
    return b"MM\0*" + struct.pack(">IH", 8, tags) + directory + tiff[end:]


@pytest.mark.parametrize("name", [name for name in bombs.BOMBS if name.startswith("tiff")])
@pytest.mark.parametrize("big", [False, True])
def test_a_tiff_is_bounded_however_its_numbers_are_written(name: str, big: bool) -> None:
    image = picture(1) if big else picture(1).convert("I;16B")
    honest = encoded(image, "TIFF", big_tiff=big)
    assert honest[:4] == (b"II+\0" if big else b"MM\0*")
    assert read_header(honest, SERVING).mode == image.mode
    bomb = rewritten(bombs.bomb(name), big=big)
    started = time.thread_time()
    with pytest.raises(ImageError) as caught:
        read_header(bomb, SERVING)
    assert caught.value.status == 413
    assert time.thread_time() - started < 0.03


@pytest.mark.parametrize("scans", [10, 40, 100])
def test_a_jpeg_of_as_many_scans_as_encoders_may_write_is_decoded(predictor: Predictor, scans: int) -> None:
    assert statuses(predictor.predict([bombs.progressive(scans, 200)])) == [200]
    assert statuses(predictor.predict([bombs.sequential(scans, 200)])) == [200]


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 10}, {"optimize": True}, {"comment": b"x"}])
def test_a_plain_jpeg_is_known_without_pillow_and_another_one_left_to_it(options: dict[str, object]) -> None:
    colour = picture(1, (60, 45))
    assert plain_jpeg(encoded(colour, "JPEG", **options)) == (60, 45, 3)
    assert plain_jpeg(encoded(colour.convert("L"), "JPEG", **options)) == (60, 45, 1)
    assert plain_jpeg(encoded(colour.convert("CMYK"), "JPEG", **options)) is None
    data = encoded(colour, "JPEG", **options)
    frame = next(data.index(marker) for marker in (b"\xff\xc0", b"\xff\xc2") if marker in data)
    for damaged in (
        data[:frame] + data[frame : frame + 19] * 2 + data[frame + 19 :],  # two frames
        data[:2] + b"\0" + data[2:],  # a stray byte
        data[: frame + 4] + b"\x0c" + data[frame + 5 :],  # 12 bits
        data[: frame + 5] + b"\0\0" + data[frame + 7 :],  # a height that is told later
        data[: frame + 30],
        b"",
    ):
        assert plain_jpeg(damaged) is None


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"quality": 10}, {"method": 0}])
@pytest.mark.parametrize("size", [(1, 1), (60, 45), (301, 7)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_a_plain_webp_is_known_without_pillow_as_pillow_knows_it(
    options: dict[str, object], size: tuple[int, int], mode: str
) -> None:
    image = picture(1, size).convert(mode)
    if mode == "RGBA":
        image.putalpha(picture(2, size).convert("L"))
    data = encoded(image, "WEBP", **options)
    with Image.open(io.BytesIO(data)) as known:
        expected = (*known.size, known.mode == "RGBA")
    # Lossy alpha has a chunk of its own.
    assert plain_webp(data) == (None if mode == "RGBA" and "lossless" not in options else expected)
    for damaged in (data[:-1], data + b"\0\0", data[:20], b"", encoded(image, "WEBP", xmp=b"<x/>", **options)):
        assert plain_webp(damaged) is None


def test_scans_are_not_counted_where_they_are_none() -> None:
    scan = b"\xff\xda\0\x08\1\1\0\0\x3f\0"
    comment = b"\xff\xfe" + (2 + 6000 * len(scan)).to_bytes(2, "big") + scan * 6000
    for data in (jpeg(1), bombs.progressive(10, 64)):
        assert read_header(data[:2] + comment + data[2:], SERVING).format == "JPEG"  # a thumbnail has scans of its own
        assert read_header(data + scan * 500, SERVING).format == "JPEG"  # and so has what follows the end


def test_64_large_images_in_one_request_are_refused_at_once(predictor: Predictor) -> None:
    image = bombs.webp(7000)
    assert len(image) < 100
    taken = []
    for _ in range(4):
        started = time.process_time()  # of all threads here: other processes use these cores too
        outcomes = predictor.predict([image] * 64, 2)
        taken.append(time.process_time() - started)
    assert min(taken) < 0.1
    assert statuses(outcomes) == [413] * 64
    refused = outcomes[0]
    assert isinstance(refused, Refusal)
    assert f"64 images have {64 * 7000 * 7000} pixels in total, more than the limit of 200000000" in refused.message


def test_a_request_is_refused_by_what_would_be_decoded_of_it_only(artifact: Path) -> None:
    predictor = Predictor(artifact, budget=Budget(image_pixels=10_000, request_pixels=10_000))
    good = jpeg(1, (60, 45))
    assert statuses(predictor.predict([good, jpeg(1, (101, 100)), b"no image", good])) == [200, 413, 415, 200]
    assert statuses(predictor.predict([good] * 4)) == [413] * 4


def admitted(budget: Budget, *claims: list[int]) -> list[int]:
    """The status of each of some requests that come one after the other, by the pixels of its images."""
    backlog = Backlog(budget)
    return [200 if (refusal := backlog.admit(pixels)) is None else refusal.status for pixels in claims]


def test_a_request_of_ordinary_photographs_is_not_touched_by_the_serving_budget() -> None:
    phone = [12 * MILLION] * 16
    assert admitted(SERVING, phone, phone) == [200, 200]
    assert admitted(SERVING, *[[50 * MILLION]] * 8) == [200] * 8
    assert admitted(Budget(), [50 * MILLION] * 1000) == [200]


def test_what_there_is_too_little_for_is_told_to_try_again_and_the_smaller_ones_are_admitted() -> None:
    assert admitted(Budget(batch_pixels=100), [60], [10, 10], [70], [20]) == [200, 200, 503, 200]


@given(
    st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=5), max_size=12),
    st.integers(1, 400),
    st.integers(1, 900),
)
def test_pixels_are_shared_fairly(claims: list[list[int]], request_pixels: int, batch_pixels: int) -> None:
    backlog = Backlog(Budget(request_pixels=request_pixels, batch_pixels=batch_pixels))
    held: list[int] = []
    for pixels in claims:
        refusal, asked = backlog.admit(pixels), sum(pixels)
        if refusal is None:
            assert asked <= request_pixels
            # There was room, or it was no more than an equal share of all.
            assert sum(held) + asked <= batch_pixels or asked <= batch_pixels // (len(held) + 1)
            held.append(asked)
        else:
            assert refusal.status == (413 if asked > request_pixels else 503)
            # Whoever asks for no more than an equal share has nothing to fear from the others.
            assert asked > min(request_pixels, batch_pixels // (len(held) + 1))
    for pixels_held in held:
        backlog.leave(pixels_held)
    assert backlog.admit([min(request_pixels, batch_pixels)]) is None, "what has left leaves nothing behind"


def test_time_is_charged_to_the_request_that_takes_it() -> None:
    now = [0.0]
    one, other = (Account(Budget(request_seconds=2, batch_seconds=10), clock=lambda: now[0]) for _ in range(2))
    with one.charged():
        now[0] += 2
    assert other.late() is None
    late = one.late()
    assert late is not None
    assert late.status == 503
    assert "more than 2 s" in late.message
    now[0] = 10
    late = other.late()
    assert late is not None
    assert "10 s" in late.message


def test_a_slow_request_is_cut_off_between_its_images(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> list[Loaded]:
        time.sleep(1)
        return load_items(*arguments)

    monkeypatch.setattr("serve.runtime.service.image_loading.load_items", slow)
    predictor = Predictor(artifact, budget=Budget(request_seconds=0.8))
    assert statuses(predictor.predict([jpeg(0)] * 3, 1)) == [200, 503, 503]


@pytest.mark.parametrize("limit", ["image_pixels", "jpeg_scans", "request_pixels", "batch_seconds"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_that_would_refuse_everything_is_a_mistake(limit: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{limit} must be above 0"):
        Budget(**{limit: value})  # type: ignore[arg-type]


def test_no_more_images_are_held_than_go_through_the_network_at_once(artifact: Path) -> None:
    predictor = Predictor(artifact, max_batch=4)
    engine, sizes = predictor.engine, list[int]()

    class Counting:
        device, provider = engine.device, engine.provider

        def run(self, batch: torch.Tensor) -> Outputs:
            sizes.append(len(batch))
            return engine.run(batch)

    predictor.engine = Counting()
    large = encoded(Image.new("RGB", (2000, 2000)), "JPEG")
    assert statuses(predictor.predict([large] * 11, 1)) == [200] * 11
    assert sizes == [4, 4, 3]


def truncated(image: Image.Image, kind: str, **options: object) -> bytes:
    data = encoded(image, kind, **options)
    return data[: len(data) // 2]


def test_ten_thousand_refused_images_leave_nothing_behind(predictor: Predictor) -> None:
    large = picture(1, (3000, 3000))
    kinds = [
        b"no image at all",
        b"",
        bombs.bomb("png"),
        bombs.bomb("progressive jpeg"),
        *(truncated(picture(1), kind) for kind in ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP")),
    ]
    costly = [truncated(large, "JPEG"), truncated(large, "PNG", compress_level=1), truncated(large, "TIFF")]
    process = psutil.Process()
    assert 200 not in statuses(predictor.predict([*kinds, *costly]))
    gc.collect()
    before = process.memory_info().rss
    kept = predictor.predict((kinds * 1000)[:9970] + costly * 10)
    grown = process.memory_info().rss - before
    assert len(kept) == 10_000
    assert 200 not in statuses(kept)
    assert grown < 50e6


STARVED = """
import ctypes, resource, sys
# Large buffers come from the kernel and go back to it: else what glibc has kept of one may do for the next.
assert ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD
from pathlib import Path
from typing import Any
import psutil, torch
from PIL import Image
torch.set_num_threads(1)
from serve.runtime.service.predictor import Predictor
from benchmarks.hostile.pictures import encoded
from tests.serve.artifacts import jpeg
predictor = Predictor(Path(sys.argv[1]))
large = [encoded(Image.new("RGB", (4000, 4000)), kind) for kind in ("JPEG", "PNG", "WEBP", "TIFF", "BMP")]
deep = encoded(Image.new("I;16", (4000, 4000)), "PNG")
items = [*large, deep, jpeg(1)]
print([type(outcome).__name__ for outcome in predictor.predict(items)])
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + 25_000_000, resource.RLIM_INFINITY))
starved = predictor.predict(items)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print([getattr(outcome, "status", 200) for outcome in starved])
print([type(outcome).__name__ for outcome in predictor.predict(items)])
"""


@pytest.mark.slow
def test_too_little_memory_is_the_servers_fault_and_passes(torch_begun: Programs, artifact: Path) -> None:
    run = torch_begun.run("-c", STARVED, artifact)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [str(["list"] * 7), str([503] * 6 + [200]), str(["list"] * 7)]


KINDS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
SEEDS = [encoded(picture(1, (40, 30)), kind) for kind in KINDS]
SEEDS += [encoded(picture(1, (40, 30)), "JPEG", progressive=True), encoded(picture(1).convert("CMYK"), "JPEG")]
SEEDS += [encoded(picture(1), "TIFF", compression=name) for name in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")]
SEEDS += [
    encoded(picture(1).convert("I;16"), "PNG"),
    encoded(Image.fromarray(np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30)), "TIFF"),
    encoded(picture(1).quantize(16), "GIF", save_all=True, append_images=[picture(2).quantize(16)]),
    encoded(picture(1), "WEBP", save_all=True, append_images=[picture(2)]),
    encoded(picture(1), "PNG", save_all=True, append_images=[picture(2)]),
]


@given(
    st.lists(
        st.tuples(st.sampled_from(SEEDS), st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=4)))),
        min_size=1,
        max_size=4,
    ),
    st.data(),
)
@settings(max_examples=150)
def test_no_damage_raises_out_of_predict_or_takes_long(
    predictor: Predictor, drawn: list[tuple[bytes, list[tuple[float, bytes]]]], data: st.DataObject
) -> None:
    items = []
    for seed, changes in drawn:
        damaged = bytearray(seed)
        for place, value in changes:
            # Headers are where it hurts: half of the changes fall into the first 64 bytes.
            start = int(place * data.draw(st.sampled_from((min(64, len(seed)), len(seed)))))
            damaged[start : start + len(value)] = value
        items.append(bytes(damaged[: data.draw(st.integers(len(seed) // 3, len(damaged)))]))
    started = time.perf_counter()
    outcomes = predictor.predict([*items, jpeg(1)], 2)
    # An image that claims 50 megapixels may be one, and takes a second or two for each.
    assert time.perf_counter() - started < 6 * len(items)
    assert set(statuses(outcomes)) <= {200, 400, 413, 415}
    if sum(header_pixels(item) for item in items) <= 190 * MILLION:
        assert statuses(outcomes)[-1] == 200
    for outcome in outcomes:
        assert "\n" not in (outcome.message if isinstance(outcome, Refusal) else outcome[0].label)


def header_pixels(item: bytes) -> int:
    try:
        return read_header(item, SERVING).pixels
    except ImageError:
        return 0


JPEGS = [encoded(picture(1, (40, 30)), "JPEG", **options) for options in ({}, {"progressive": True}, {"quality": 10})]
JPEGS += [encoded(picture(1, (40, 30)).convert("L"), "JPEG"), bombs.sequential(3, 24), bombs.progressive(12, 24)]


@given(
    st.sampled_from(JPEGS),
    st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(range(256)) | st.sampled_from((0xC0, 0xC2, 0xDA, 0xFF)))),
    st.tuples(st.floats(0, 0.999), st.binary(max_size=12)),
)
@settings(max_examples=300)
def test_what_is_decoded_has_the_pixels_that_were_counted(
    seed: bytes, changes: list[tuple[float, int]], inserted: tuple[float, bytes]
) -> None:
    # The size is Pillow's, the pixels are torchvision's: a file that they read differently would be a hole.
    damaged = bytearray(seed)
    for place, value in changes:
        damaged[int(place * len(seed))] = value
    start = int(inserted[0] * len(seed))
    damaged[start:start] = inserted[1]
    budget = Budget(image_pixels=100_000)
    try:
        header = read_header(bytes(damaged), budget)
        with suppress(ImageError), opened(bytes(damaged), budget) as by_pillow:
            assert (header.format, header.mode, (header.width, header.height)) == (
                by_pillow.format,
                by_pillow.mode,
                by_pillow.size,
            ), "who reads plain JPEGs quickly reads them as Pillow does"
        image = decode(bytes(damaged), 3, budget, header)
    except ImageError:
        return
    assert image.shape[1] * image.shape[2] == header.pixels
