"""Other decoders than the runtime's own: what they are given, what they may fail at, and what is told of them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.hostile import bombs
from benchmarks.hostile.pictures import encoded, picture
from serve.common.options import ServingOptions
from serve.load.reference_answers import known_answers
from serve.load.reference_answers import opened as known_opened
from serve.runtime.card.budget import SERVING, Budget
from serve.runtime.card.card import Preprocessing, load_card
from serve.runtime.card.serving import Serving
from serve.runtime.decoders.base import (
    TINY_JPEG,
    Decoder,
    DecoderType,
    DeviceDecoder,
    check_decoder,
    check_tiny,
    decoders,
    open_decoder,
    register,
)
from serve.runtime.engines.base import chain_for
from serve.runtime.errors import BrokenError, EngineError, Refusal, UserError
from serve.runtime.images.headers import read_header
from serve.runtime.images.image_preprocessing import decode, load
from serve.runtime.images.placement import Placement
from serve.runtime.images.structure import whole_jpeg
from serve.runtime.service.image_loading import load_items
from serve.runtime.service.predictor import Predictor
from serve.runtime.service.protocol import Request
from serve.runtime.service.service import Service
from tests.serve import artifacts
from tests.serve.artifacts import PREPROCESSING, jpeg
from tests.serve.torchserve.test_handler import context_of, opened

CPU = torch.device("cpu")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def test_an_extra_installs_what_the_gpus_decoders_run_with_in_pinned_versions() -> None:
    root = Path(__file__).parents[4]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {requirement.partition(">")[0] for requirement in extras["gpu"]}
    pinned = {line.partition("==")[0] for line in (root / "constraints.txt").read_text().splitlines()}
    needed = {library for entry in decoders().values() if entry.device == "cuda" for library in entry.libraries}
    assert needed == {"nvidia-nvimgcodec-cu13", "torchcodec"}
    assert needed <= installed <= pinned


class Partner(DeviceDecoder):
    """What a decoder on a GPU does, on the host: gives None for a bad item, or raises for its whole batch."""

    def __init__(self, decode_one: Callable[[bytes], torch.Tensor | None], *, raises: bool = False) -> None:
        super().__init__("partner", CPU, batch=4)
        self.decode_one, self.raises = decode_one, raises
        self.seen: list[bytes] = []
        self.batches: list[int] = []

    def decode(self, items: Sequence[bytes]) -> list[torch.Tensor | None]:
        self.seen += items
        self.batches.append(len(items))
        found: list[torch.Tensor | None] = []
        for item in items:
            try:
                found.append(self.decode_one(item))
            except Exception:
                if self.raises:
                    raise
                found.append(None)
        return found


def loaded(decoder: Decoder | None, items: Sequence[bytes]) -> list[torch.Tensor | Refusal]:
    headers = [read_header(item, SERVING) for item in items]
    found = [entry.image for entry in load_items(items, PREPROCESSING, SERVING, headers, decoder)]
    return [image if isinstance(image, Refusal) else image.pixels for image in found]


GOOD = [jpeg(seed, (60 + seed, 45)) for seed in range(3)]
CUT_OFF = jpeg(7, (300, 200))[:900]
WITHOUT_TABLES = jpeg(7, (300, 200)).replace(b"\xff\xdb", b"\xff\xee")
# It has all its parts, and asks for tables of quantization that are called otherwise there.
BROKEN = jpeg(7, (300, 200)).replace(b"\xff\xdb\x00\x43\x00", b"\xff\xdb\x00\x43\x02")
OTHERS = [
    encoded(picture(4), "PNG"),
    encoded(picture(5).convert("L"), "JPEG"),
    encoded(picture(6).convert("CMYK"), "JPEG"),
]


@pytest.mark.parametrize("raises", [False, True])
def test_a_bad_item_gets_the_error_of_the_cpu_and_its_neighbours_their_images(raises: bool) -> None:
    decoder = Partner(decode, raises=raises)
    items = [GOOD[0], BROKEN, *OTHERS, GOOD[1]]
    found = loaded(decoder, items)
    own = loaded(None, items)
    assert isinstance(own[1], Refusal)
    assert found[1] == own[1]
    assert BROKEN in decoder.seen
    for mine, theirs in zip(found, own, strict=True):
        if not isinstance(theirs, Refusal):
            assert isinstance(mine, torch.Tensor)
            assert torch.equal(mine, theirs)
    assert decoder.batches == ([3, 1, 1, 1] if raises else [3])
    assert not set(decoder.seen) & set(OTHERS), "only colour JPEGs go to the device"


def test_what_the_device_cannot_decode_the_cpu_does() -> None:
    for image, item in zip(loaded(Partner(lambda item: None), GOOD), GOOD, strict=True):
        assert isinstance(image, torch.Tensor)
        assert torch.equal(image, load(item, PREPROCESSING))


def test_what_is_not_whole_is_left_to_the_cpu_whatever_the_device_would_make_of_it() -> None:
    decoder = Partner(lambda item: torch.zeros(3, 200, 300, dtype=torch.uint8))
    bad = [CUT_OFF, WITHOUT_TABLES]
    assert loaded(decoder, bad) == loaded(None, bad)
    assert all(isinstance(refused, Refusal) for refused in loaded(decoder, bad))
    assert decoder.seen == []
    padded = GOOD[0] + bytes(32)
    loaded(decoder, [*bad, padded])
    assert decoder.seen == [padded]


@given(seed=st.integers(0, 2), kept=st.integers(0, 2000), behind=st.binary(max_size=80))
def test_a_jpeg_is_whole_with_little_behind_its_end_and_not_without_it(seed: int, kept: int, behind: bytes) -> None:
    whole = GOOD[seed]
    assert whole_jpeg(whole + behind[:60])
    cut = whole[: min(kept, len(whole) - 1)]
    assert not whole_jpeg(cut)
    assert not whole_jpeg(b"\xff\xd8" + behind), "no room for tables"


def test_an_image_of_another_size_than_its_header_told_is_decoded_again() -> None:
    (found,) = loaded(Partner(lambda item: torch.zeros(3, 46, 60, dtype=torch.uint8)), GOOD[:1])
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, load(GOOD[0], PREPROCESSING))


def service_of(artifact: Path, decoder: Decoder, budget: Budget = SERVING) -> Service:
    serving = Serving(chain_for(load_card(artifact)), budget=budget)
    predictor = Predictor(artifact, max_batch=8, budget=serving.allowance, decoder=decoder)
    return Service(predictor, serving, decode_threads=2)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.torchscript(tmp_path_factory.mktemp("decoders") / "script", device="cpu")


def test_no_byte_beyond_the_budget_reaches_a_decoder(artifact: Path) -> None:
    decoder = Partner(decode)
    refused = [bombs.jpeg_that_claims(60_000), bombs.bomb("progressive jpeg"), jpeg(1, (400, 400)), b"no image", b""]
    with service_of(artifact, decoder, replace(SERVING, image_pixels=100_000, request_pixels=200_000)) as service:
        found = service.submit(Request((*refused, GOOD[0]), 2, listed=True)).result(30)
        many = service.submit(Request((jpeg(1, (300, 300)),) * 3, 2, listed=True)).result(30)
    assert [getattr(outcome, "status", 200) for outcome in found.outcomes] == [413, 413, 413, 415, 400, 200]
    assert [getattr(outcome, "status", 200) for outcome in many.outcomes] == [413] * 3
    assert decoder.seen == [GOOD[0]]


def test_the_images_of_several_requests_are_decoded_together_and_answered_apart(artifact: Path) -> None:
    decoder = Partner(decode)
    expected = Predictor(artifact).predict(GOOD, 2)
    with service_of(artifact, decoder) as service:
        futures = [service.submit(Request((GOOD[i % 3], BROKEN), 2, listed=True)) for i in range(30)]
        futures += [service.submit(Request((*GOOD, *OTHERS), 2, listed=True))]
        answers = [future.result(30).outcomes for future in futures]
    for number, (good, bad) in enumerate(answers[:-1]):
        assert isinstance(good, list)
        assert isinstance(bad, Refusal)
        wanted = expected[number % 3]
        assert isinstance(wanted, list)
        assert [label.index for label in good] == [label.index for label in wanted]
    assert all(isinstance(outcome, list) for outcome in answers[-1])
    assert max(decoder.batches) > 1
    assert (service._queues.backlog._pixels, service._queues.backlog._requests) == (0, 0)


def test_a_decoder_that_loses_its_device_ends_the_service(artifact: Path) -> None:
    def lose(item: bytes) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with service_of(artifact, Partner(lose, raises=True)) as service:
        with pytest.raises(BrokenError, match="partner: cpu can no longer be used by this process"):
            service.submit(Request((GOOD[0],), 2, listed=False)).result(30)
        with pytest.raises(BrokenError):
            service.submit(Request((GOOD[0],), 2, listed=False))


def test_a_decoder_that_lacks_memory_leaves_its_batch_to_the_cpu() -> None:
    def starve(item: bytes) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert all(isinstance(image, torch.Tensor) for image in loaded(Partner(starve, raises=True), GOOD))


@without_cuda
@pytest.mark.parametrize("name", ["nvimgcodec", "torchcodec"])
def test_a_decoder_for_a_gpu_is_passed_over_without_one_and_told(name: str, artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"the decoder {name} needs cuda, but the engine runs on cpu"):
        open_decoder(name, CPU)
    with pytest.raises(EngineError, match=f"the decoder {name} does not work here: "):
        open_decoder(name, torch.device("cuda:0"))
    handler = opened(context_of(artifact, tmp_path, None, decoder=name))
    described = handler.describe_handle()
    assert described["decoder"] == "cpu"
    passed = {entry["execution"]: entry["reason"] for entry in described["passed_over"]}
    assert passed == {f"decoder {name}": f"the decoder {name} needs cuda, but the engine runs on cpu"}
    with pytest.raises(EngineError, match="is strict, so no other engine may"):
        opened(context_of(artifact, tmp_path / "strict", None, decoder=name, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["nvimgcodec", "torchcodec"])
def test_a_decoder_on_a_gpu_gives_nearly_the_pixels_of_the_cpu(name: str) -> None:
    pytest.importorskip({"nvimgcodec": "nvidia.nvimgcodec", "torchcodec": "torchcodec.decoders"}[name])
    decoder: Any = open_decoder(name, torch.device("cuda:0"))
    own = loaded(None, [*GOOD, WITHOUT_TABLES, CUT_OFF])
    found = loaded(decoder, [*GOOD, WITHOUT_TABLES, CUT_OFF])
    assert found[3:] == own[3:]
    assert all(isinstance(refused, Refusal) for refused in own[3:])
    assert [tuple(image.shape) for image in decoder.decode(GOOD)] == [(3, 45, 60 + number) for number in range(3)]
    for mine, theirs in zip(found[:3], own[:3], strict=True):
        assert isinstance(mine, torch.Tensor)
        assert isinstance(theirs, torch.Tensor)
        assert (mine.cpu().int() - theirs.int()).abs().float().mean() < 3


def test_decoders_are_found_by_their_files_and_an_unknown_one_is_named_with_those_that_are() -> None:
    assert set(decoders()) >= {"nvimgcodec", "reduced", "torchcodec"}
    assert open_decoder("cpu", CPU) is None
    with pytest.raises(UserError, match=r"unknown decoder 'nvimgcodek'.*did you mean nvimgcodec.*known: cpu, "):
        check_decoder("nvimgcodek")
    with pytest.raises(UserError, match="unknown decoder 'turbo'"):
        ServingOptions(decoder="turbo")
    with pytest.raises(ValueError, match="runtime's own"):
        register(DecoderType("cpu", open=lambda device: Partner(decode), device="cpu"))


def test_the_probe_tells_a_decoder_that_decodes_wrongly() -> None:
    assert check_tiny(decode(TINY_JPEG)).shape == (3, 16, 16)
    with pytest.raises(EngineError, match="it decodes the colour"):
        check_tiny(decode(TINY_JPEG).flip(0))
    with pytest.raises(EngineError, match="cannot decode"):
        check_tiny(None)


# The decoder of large JPEGs at a smaller scale.

LARGE = Preprocessing(resize=64, crop=(56, 56))


@pytest.mark.parametrize(
    ("image", "accepted"),
    [
        (picture(1, (300, 256)), True),
        (picture(1, (300, 255)), False),
        (picture(1, (256, 300)).convert("L"), True),
        (picture(1, (256, 256 * 9)), False),
        (picture(1, (300, 256)).convert("CMYK"), False),
    ],
)
def test_reduced_takes_jpegs_of_four_times_the_size_and_no_others(image: Image.Image, accepted: bool) -> None:
    decoder = open_decoder("reduced", CPU)
    assert decoder is not None
    assert decoder.accepts(read_header(encoded(image, "JPEG"), SERVING), LARGE) == accepted
    if image.mode != "CMYK":
        assert not decoder.accepts(read_header(encoded(image, "PNG"), SERVING), LARGE)


@pytest.mark.parametrize("side", [256, 300, 601, 1300])
@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("channels", [3, 1])
def test_reduced_gives_nearly_the_picture_of_a_whole_decoding(side: int, orientation: int, channels: int) -> None:
    decoder = open_decoder("reduced", CPU)
    assert decoder is not None
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(side, (side * 3 // 2, side)), "JPEG", quality=90, exif=exif)
    wanted = LARGE if channels == 3 else replace(LARGE, mean=(0.5,), std=(0.5,))
    header = read_header(data, SERVING)
    assert decoder.accepts(header, wanted)
    (found,) = decoder.load([data], [header], wanted)
    assert found is not None
    assert (found.pixels.dtype, found.pixels.shape) == (torch.uint8, wanted.shape)
    height, width = (side, side * 3 // 2) if orientation != 6 else (side * 3 // 2, side)
    assert found.placement == Placement.of(height, width, wanted)
    difference = (found.pixels.int() - load(data, wanted).int()).abs().float()
    assert difference.mean() < 1
    assert difference.max() < 16


def test_known_answers_are_those_of_the_decoder_that_serves(artifact: Path, tmp_path: Path) -> None:
    handler = opened(context_of(artifact, tmp_path, None, decoder="reduced"))
    image, served = jpeg(3, (800, 600)), handler._opened()
    (labels,) = served.predictor.predict([image], 2)
    assert isinstance(labels, list)
    (known,) = known_answers(known_opened(artifact, served.serving), [image])
    assert [(entry["index"], entry["probability"]) for entry in known.answer[:2]] == [
        (label.index, label.probability) for label in labels
    ]
    (whole,) = known_answers(Predictor(artifact), [image])
    assert known != whole, "an image on which it makes a difference"


def test_a_broken_large_jpeg_gets_the_error_of_a_whole_decoding(artifact: Path, tmp_path: Path) -> None:
    handler = opened(context_of(artifact, tmp_path, None, decoder="reduced"))
    assert handler.describe_handle()["decoder"] == "reduced"
    large = jpeg(1, (800, 600))
    own, cut = Predictor(artifact), large[: len(large) // 2]
    mine = handler._opened().predictor.predict([large, cut, b"no"], 2)
    theirs = own.predict([large, cut, b"no"], 2)
    assert mine[1:] == theirs[1:]
    assert isinstance(mine[0], list)
    assert isinstance(theirs[0], list)
    assert mine[0][0].index == theirs[0][0].index
