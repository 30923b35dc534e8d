"""Class maps from logits: scaled back to the picture, in every form, compared with known ones."""

from __future__ import annotations

import base64
import io
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from PIL import Image

from serve.runtime.card.card import Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.card.known_answer import KnownAnswer
from serve.runtime.card.serving import Serving
from serve.runtime.errors import CardError, Refusal, RequestError
from serve.runtime.images.placement import Placement
from serve.runtime.tasks.base import Task
from serve.runtime.tasks.segmentation import Segmented, map_of, png_of, preferred, rle_of
from tests.serve import artifacts

#: A picture of 8 rows and 16 columns, of which the network sees the middle half, at half the scale.
CROPPED = Preprocessing(resize=4, crop=(4, 4))
TASK: Task = artifacts.task_of(task="segmentation", preprocessing=CROPPED)
WIDE = Placement.of(8, 16, CROPPED)
MAPS = arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.integers(0, 3))


def answered(logits: torch.Tensor) -> Segmented:
    (answer,) = TASK.answers(TASK.ending((logits,)), ["png"], [WIDE])
    assert isinstance(answer, Segmented)
    return answer


def logits_of(classes: Any) -> torch.Tensor:
    """Logits of one image whose best class at each pixel is that of a map."""
    return torch.nn.functional.one_hot(torch.as_tensor(classes), 5).permute(2, 0, 1)[None].float()


def unpacked(counts: str, height: int, width: int) -> NDArray[np.bool_]:
    """The mask of COCO's compressed run lengths, by the description of its format."""
    runs: list[int] = []
    place = 0
    while place < len(counts):
        value, shift = 0, 0
        while True:
            bits = ord(counts[place]) - 48
            place += 1
            value |= (bits & 31) << shift
            shift += 5
            if not bits & 32:
                break
        if bits & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return flat.reshape(width, height).T


def test_a_map_has_the_size_of_the_picture_and_says_what_the_network_did_not_see() -> None:
    seen = [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 4, 4], [2, 2, 4, 4]]
    answer = answered(logits_of(seen))
    expected = np.full((8, 16), 255)
    expected[:, 4:12] = np.kron(seen, np.ones((2, 2)))
    np.testing.assert_array_equal(answer.classes, expected)
    assert answer.classes.dtype == np.uint8


def test_of_equal_logits_the_first_class_is_taken_and_an_image_without_numbers_is_refused() -> None:
    logits = torch.zeros(3, 5, 4, 4)
    logits[1, 2, 3, 3] = float("nan")
    logits[2, 0] = float("-inf")
    first, *others = TASK.answers(TASK.ending((logits,)), ["png"] * 3, [WIDE] * 3)
    assert isinstance(first, Segmented)
    assert set(np.unique(first.classes)) == {0, 255}
    for other in others:
        assert isinstance(other, Refusal)
        assert other.status == 500


def test_json_has_the_classes_in_the_picture_and_a_png_with_their_numbers() -> None:
    answer = answered(logits_of([[3] * 4, [3] * 4, [3] * 4, [1] * 4]))
    document = json.loads(TASK.json(answer))
    assert {name: document[name] for name in ("height", "width", "unseen")} == {"height": 8, "width": 16, "unseen": 0.5}
    assert document["classes"] == [
        {"label": "dog", "index": 3, "share": 0.375},
        {"label": "bee", "index": 1, "share": 0.125},
    ]
    with Image.open(io.BytesIO(base64.b64decode(document["mask"]))) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "P", (16, 8))
        np.testing.assert_array_equal(np.asarray(image), answer.classes)
        # The first colours of PASCAL VOC: black, dark red, dark green.
        assert image.getpalette()[:9] == [0, 0, 0, 128, 0, 0, 0, 128, 0]  # type: ignore[index]
    assert TASK.lines(document) == [" 37.50%     3  dog", " 12.50%     1  bee"]
    assert TASK.body(answer) == (TASK.json(answer).encode(), "application/json")


def test_the_png_can_be_the_whole_body() -> None:
    answer = Segmented(np.array([[0, 1], [255, 4]], np.uint8), "image")
    body, kind = TASK.body(answer)
    assert kind == "image/png"
    with Image.open(io.BytesIO(body)) as image:
        np.testing.assert_array_equal(np.asarray(image), answer.classes)
    assert "mask" in json.loads(TASK.json(answer))  # among several images


@given(MAPS)
def test_run_lengths_give_the_mask_of_each_class(classes: NDArray[np.uint8]) -> None:
    document = json.loads(TASK.json(Segmented(classes, "rle")))
    assert "mask" not in document
    assert {entry["index"] for entry in document["classes"]} == set(classes.ravel().tolist())
    for entry in document["classes"]:
        assert entry["rle"]["size"] == list(classes.shape)
        np.testing.assert_array_equal(unpacked(entry["rle"]["counts"], *classes.shape), classes == entry["index"])


@given(
    st.tuples(st.integers(1, 30), st.integers(1, 30)),
    st.sampled_from([(4, (4, 4)), ((6, 3), (6, 3)), ("letterbox", (5, 7)), (9, (3, 5))]),
    st.randoms(use_true_random=False),
)
def test_every_form_has_the_map_of_the_pictures_own_size(size: tuple[int, int], way: Any, random: Any) -> None:
    wanted = Preprocessing(resize=way[0], crop=way[1])
    seen = np.array([random.randrange(5) for _ in range(way[1][0] * way[1][1])], np.uint8).reshape(way[1])
    placement = Placement.of(*size, wanted)
    expected = placement.map_to_picture(torch.from_numpy(seen), 255).numpy()
    counts = np.bincount(expected.ravel(), minlength=256)
    for form in ("png", "rle"):
        answer = Segmented(seen, form, placement)
        np.testing.assert_array_equal(answer.counts(), counts)
        document = json.loads(TASK.json(answer))
        assert (document["height"], document["width"]) == size
        assert document["unseen"] == pytest.approx(counts[255] / expected.size, abs=1e-6)
        assert {entry["index"] for entry in document["classes"]} == set(expected.ravel().tolist()) - {255}
        if form == "png":
            np.testing.assert_array_equal(map_of(document), expected)
        for entry in document["classes"] if form == "rle" else []:
            np.testing.assert_array_equal(unpacked(entry["rle"]["counts"], *size), expected == entry["index"])


def test_a_map_of_16_megapixels_is_written_in_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    scaled = Segmented._scaled
    monkeypatch.setattr(
        Segmented,
        "_scaled",
        lambda *given: parts.append((part := scaled(*given)).size) or part,  # type: ignore[func-returns-value]
    )
    seen = np.random.default_rng(0).integers(0, 5, (64, 64), np.uint8)
    for form in ("png", "rle", "image"):
        answer = Segmented(seen, form, Placement.of(4000, 4000, Preprocessing(resize=(64, 64), crop=(64, 64))))
        tracemalloc.start()
        try:
            body, _ = TASK.body(answer)
            assert tracemalloc.get_traced_memory()[1] < 12e6
        finally:
            tracemalloc.stop()
        assert len(body) < 2e6
    assert max(parts) <= 1 << 20


def test_an_answer_does_not_keep_the_maps_of_its_batch() -> None:
    outputs = TASK.ending((torch.zeros(8, 5, 4, 4),))
    first, *_ = TASK.answers(outputs, ["png"] * 8, [WIDE] * 8)
    assert isinstance(first, Segmented)
    assert first.seen.base is None
    assert TASK.answer_bytes(Serving((Execution("any"),))) == 16


def test_long_runs_take_several_characters() -> None:
    mask = np.zeros((300, 400), bool)
    mask[10:200, 30:350] = True
    np.testing.assert_array_equal(unpacked(rle_of(mask), 300, 400), mask)
    # By hand, of 3 columns of 2: outside 1, inside 2, outside 3.
    assert rle_of(np.array([[False, True, False], [True, False, False]])) == "123"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "png"),
        ("*/*", "png"),
        ("application/json", "png"),
        ("application/json; rle=1", "rle"),
        ("APPLICATION/JSON;RLE=1", "rle"),
        ("image/png", "image"),
        ("image/png;q=0.5, application/json", "png"),
        ("application/json;q=0.5, image/png", "image"),
        ("text/html,application/xhtml+xml;q=0.9,image/webp,*/*;q=0.8", "png"),
        ("image/png;q=0", "png"),
    ],
)
def test_the_header_accept_chooses_the_form(accept: str, form: str) -> None:
    assert TASK.options(TASK.from_headers({"accept": accept})) == form


@pytest.mark.parametrize("usual", ["png", "rle", "lists", "image"])
def test_the_usual_form_answers_what_leaves_it_open(usual: Any) -> None:
    for accept in ("", "*/*", "text/html", "application/*"):
        assert preferred(accept, usual) == usual
    assert preferred("application/json", usual) == ("png" if usual == "image" else usual)
    for accept in ("application/json; rle=0", "application/json;lists=0"):
        assert preferred(accept, usual) == "png"
    assert preferred("application/json; rle=1", usual) == "rle"
    assert preferred("application/json; lists=1", usual) == "lists"
    assert preferred("image/png", usual) == "image"
    assert TASK.options(TASK.readable, Serving((Execution("any"),), accept="image/png")) == "png"


@given(st.text(max_size=40))
def test_any_accept_is_a_form_or_refused(accept: str) -> None:
    try:
        form = preferred(accept)
    except RequestError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - most texts are no error
    else:
        assert form in ("png", "rle", "lists", "image")


@pytest.mark.parametrize("accept", ["image/png;q=2", "image/png;q=x", "application/json;rle=2", "*/*;q=nan"])
def test_an_accept_that_means_nothing_is_refused(accept: str) -> None:
    with pytest.raises(RequestError, match="Accept: "):
        preferred(accept)


def test_one_tensor_has_the_maps_of_pictures_of_one_size() -> None:
    one, two = (Segmented(np.full((2, 3), value, np.uint8)) for value in (1, 4))
    shape, values = TASK.tensor("mask", [one, two], "png")
    assert shape == (2, 3)
    assert values.tolist() == [1] * 6 + [4] * 6
    with pytest.raises(RequestError, match="the pictures have different sizes \\(2x2 and 2x3\\)"):
        TASK.tensor("mask", [one, Segmented(np.zeros((2, 2), np.uint8))], "png")


# --- known answers


def known_of(classes: Any) -> dict[str, Any]:
    return TASK.known(TASK.ending((logits_of(classes),)), WIDE)


def test_an_answer_is_the_known_one_where_nearly_all_pixels_have_its_class() -> None:
    facts = known_of(np.zeros((4, 4), np.int64))
    known = KnownAnswer(b"x", "segmentation", "openvino", facts)
    TASK.check_known(known)
    classes = map_of(facts)
    for changed, right in ((0, True), (6, True), (7, False)):  # of 128, of which 5 % are 6.4
        answer = classes.copy()
        answer.ravel()[:changed] = 9
        document = json.loads(TASK.json(Segmented(answer.clip(0, 4)))) | {
            "mask": base64.b64encode(png_of(Segmented(answer))).decode()
        }
        assert bool(TASK.fault(facts, document, 0.05)) != right
        if right:
            assert "matches the one of openvino" in TASK.check_answer(known, document)
        else:
            with pytest.raises(CardError, match=r"measured with openvino: 5\.47% of the pixels have another class"):
                TASK.check_answer(known, document)


@pytest.mark.parametrize(
    "change", [{"mask": "eA=="}, {"mask": None}, {"height": 9}, {"tolerance": 2}, {"width": "16"}, {"tolerance": "x"}]
)
def test_facts_that_are_wrong_are_refused(change: dict[str, object]) -> None:
    facts = known_of(np.zeros((4, 4), np.int64))
    with pytest.raises(CardError):
        TASK.check_answer(KnownAnswer(b"x", "segmentation", "openvino", facts | change), facts)


def test_a_known_map_with_a_class_that_the_card_lacks_is_refused() -> None:
    other = artifacts.task_of(task="segmentation", preprocessing=CROPPED, classes=("a", "b"))
    known = KnownAnswer(b"x", "segmentation", "any", known_of(np.full((4, 4), 2)))
    with pytest.raises(CardError, match="has a class 2, and there are 2 classes"):
        other.check_known(known)


def test_a_picture_of_another_size_differs_in_all_pixels() -> None:
    one, other = (json.loads(TASK.json(Segmented(np.zeros(shape, np.uint8)))) for shape in ((2, 3), (3, 2)))
    assert TASK.fault(one, other, 0.99) == "100.00% of the pixels have another class"
    assert TASK.fault(one, one, 0.0) == ""
