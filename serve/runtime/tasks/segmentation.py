"""``segmentation``: an image gets a class map of its own size.

A request's header ``Accept`` chooses the form: JSON with a PNG in base64 (the default), ``application/json; rle=1``
for COCO's run lengths in place of the PNG, or ``image/png`` for the PNG alone. Several images in one request are
answered in JSON. The serving setting ``accept`` is the header of requests that leave the form open.

With ``application/json; lists=1`` as that setting, an answer is what TorchServe's own image_segmenter gives: the class
and its probability for each pixel of the network's input, ``[H, W, 2]``.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..card import fields
from ..errors import CardError, Refusal, RequestError
from .base import Outcome, Task, TensorType, register

if TYPE_CHECKING:  # see `base`
    from ..card.card import Card
    from ..card.known_answer import KnownAnswer
    from ..card.serving import Serving
    from ..images.placement import Placement
    from ..outputs import Outputs

ClassMap = NDArray[np.uint8]
#: ``png``, ``rle`` and ``lists`` in JSON, and the PNG alone.
Form = Literal["png", "rle", "lists", "image"]

#: The value of pixels that the network does not see, because the preprocessing crops them.
UNSEEN: Final = 255
#: Largest allowed share of the known image's pixels with another class. Two engines round differently, which changes
#: pixels at borders.
TOLERANCE: Final = 0.05

_NOT_FINITE = Refusal(500, "the network returned NaN or infinity for the image")
_JSON, _PNG = "application/json", "image/png"
#: About so many bytes of memory writing a pixel as lists takes: two numbers of 24, their texts, and brackets.
_LIST_BYTES = 120
# Writing an answer takes milliseconds, so a thread does it; see `Task.size`.
_LONG = 1 << 20


#: About so many pixels of a picture's map exist at once while it is written, and so many runs.
_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, eq=False)
class Segmented:
    """An answer: a class map, and the form in which it is written.

    The picture may have a thousand times the pixels of the network's input, and a file of some kilobytes. So its own
    map exists only in parts, while it is written.

    Attributes:
        seen: the classes of the network's input, ``uint8 (h, w)``.
        form: see `Form`.
        placement: how the picture lies on that input. None: they are the same.
        sure: the probability of each class of ``seen``, ``float32 (h, w)``. None: it is not known.
    """

    seen: ClassMap
    form: Form = "png"
    placement: Placement | None = None
    sure: NDArray[np.float32] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.seen.shape if self.placement is None else self.placement.picture

    @property
    def classes(self) -> ClassMap:
        """The class map of the picture, ``uint8 (H, W)``."""
        return np.concatenate([strip for _, strip in self.strips()])

    def strips(self) -> Iterator[tuple[slice, ClassMap]]:
        """Yield the class map of the picture in parts: some of its rows, and their classes."""
        height, width = self.size
        step = max(1, _AT_ONCE // width)
        for start in range(0, height, step):
            rows = slice(start, min(start + step, height))
            yield rows, self.seen[rows] if self.placement is None else self._scaled(self.placement, rows)

    def _scaled(self, placement: Placement, rows: slice) -> ClassMap:
        import torch  # see `base`

        found: ClassMap = placement.map_to_picture(torch.from_numpy(self.seen), UNSEEN, rows).numpy()
        return found

    def taken(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which row of ``seen`` each row of the picture is, and the same of columns.

        The number behind the last one is for those that the network does not see.
        """
        if self.placement is None:
            height, width = self.seen.shape
            return np.arange(height), np.arange(width)
        rows, columns = (
            np.where((places >= 0) & (places < size), places, size)
            for places, size in zip(map(np.asarray, self.placement.taken), self.seen.shape, strict=True)
        )
        return rows, columns

    def counts(self) -> NDArray[np.int64]:
        """Return how many pixels of the picture have each value, ``(256,)``."""
        each = [
            np.bincount(places, minlength=size + 1) for places, size in zip(self.taken(), self.seen.shape, strict=True)
        ]
        weights = np.outer(each[0][:-1], each[1][:-1]).astype(np.float64)  # exact below 2**53
        found = np.bincount(self.seen.ravel(), weights.ravel(), UNSEEN + 1).astype(np.int64)
        found[UNSEEN] += self.size[0] * self.size[1] - found.sum()
        return found


@register
class Segmentation(Task):
    """Options are the form of the answer. An answer is a `Segmented`."""

    name = "segmentation"
    parameters = ("accept",)
    headers: ClassVar[Mapping[str, str]] = {"accept": "accept"}
    complete: ClassVar[Mapping[str, str]] = {"accept": f"{_JSON}; rle=0"}
    readable = complete
    ended = ("classes", "total")

    def __init__(self, card: Card) -> None:
        super().__init__(card)
        if not 1 <= len(card.classes) <= UNSEEN:
            raise CardError(
                f"{card.name}: a segmentation needs 1 to {UNSEEN} classes, the card has {len(card.classes)}"
            )
        self.reading = "a logit for each class, in the order of `labels.txt`, and pixel of the input; the largest wins"
        if card.ending:
            self.reading += ". `classes` has the winner of each pixel, so ask for this output alone"
        self.tensors = {"mask": TensorType("UINT8", (-1, -1))}

    def described(self) -> dict[str, Any]:
        """Return the names of the classes in the order of a map's values."""
        return {"classes": list(self.card.classes), "unseen": UNSEEN}

    def options(self, parameters: Mapping[str, Any], serving: Serving | None = None) -> Form:
        """Return the form that the header ``Accept`` prefers, or that of the serving settings if it names none."""
        usual = "png" if serving is None else preferred(serving.accept)
        form = preferred(str(parameters.get("accept", "")), usual)
        if form == "lists" and usual != "lists":
            raise RequestError("Accept: lists=1 is only for an archive whose serving setting accept says so")
        return form

    def widely(self, serving: Serving) -> bool:
        """See `Task`. Lists have the probability of each class."""
        return preferred(serving.accept) == "lists"

    def answer_bytes(self, serving: Serving) -> int:
        """Return a byte for each pixel of the network's input, or five with probabilities."""
        return math.prod(self.card.preprocessing.crop) * (5 if self.widely(serving) else 1)

    def size(self, options: Form) -> int:
        """Return a number that makes any answer a long one."""
        return _LONG

    @staticmethod
    def ending(outputs: Outputs) -> Outputs:
        """Return the best class of each pixel, of equal ones the first, ``uint8 (N, H, W)``, and the logits' sum.

        The sum, ``float32 (N,)``, is finite if all logits are.
        """
        logits = outputs[0]
        # torch's `max` takes a fifth of the time of `argmax` (2.14, CPU).
        return logits.max(1)[1].byte(), logits.flatten(1).float().sum(1)

    @classmethod
    def wide_ending(cls, outputs: Outputs) -> Outputs:
        """Return what `ending` does, and the probability of each of these classes, ``float32 (N, H, W)``."""
        logits = outputs[0].float()
        return *cls.ending(outputs), (logits.amax(1) - logits.logsumexp(1)).exp()

    def answers(self, outputs: Outputs, options: Sequence[Form], placements: Sequence[Placement]) -> list[Outcome]:
        """Return the class map of each image. It is scaled to the picture's size while it is written."""
        maps, totals, *sure = outputs
        found: list[Outcome] = []
        for place, finite in enumerate(totals.isfinite().tolist()):
            form = options[place]
            # A part of a tensor would keep the whole batch.
            own = sure[0][place].numpy().copy() if form == "lists" and sure else None
            classes = maps[place].numpy().copy()
            found.append(Segmented(classes, form, placements[place], own) if finite else _NOT_FINITE)
        return found

    def body(self, answer: Segmented) -> tuple[bytes, str]:
        """See `Task`. It may be the PNG alone."""
        return (png_of(answer), _PNG) if answer.form == "image" else super().body(answer)

    def json(self, answer: Segmented) -> str:
        """Return size, map, and the classes present with their shares of the pixels, largest first.

        ``{"height": …, "width": …, "classes": [{"label", "index", "share"}, …], "unseen": …, "mask": "<base64>"}``.
        With run lengths each class has ``rle`` instead of the mask. ``unseen`` is the share of pixels without a class.
        Lists are ``[[[class, probability], …], …]``, row by row of the network's input.
        """
        if answer.form == "lists" and answer.sure is not None:
            lines = zip(answer.seen.astype(np.float32), answer.sure, strict=True)
            return f"[{', '.join(json.dumps(np.stack(line, 1).tolist()) for line in lines)}]"
        height, width = answer.size
        counts = answer.counts()
        shares = (counts / max(1, height * width)).round(6).tolist()
        present = [index for index in np.argsort(-counts, kind="stable").tolist() if counts[index] and index != UNSEEN]
        found = [{"label": self.card.classes[index], "index": index, "share": shares[index]} for index in present]
        document: dict[str, Any] = {"height": height, "width": width, "classes": found, "unseen": shares[UNSEEN]}
        if answer.form == "rle":
            rows, columns = answer.taken()
            padded = np.pad(answer.seen, ((0, 1), (0, 1)), constant_values=UNSEEN)[rows]
            for entry in found:
                entry["rle"] = {"size": [height, width], "counts": rle_of(padded == entry["index"], columns)}
        else:
            document["mask"] = base64.b64encode(png_of(answer)).decode()
        return json.dumps(document)

    @classmethod
    def lines(cls, answer: Any) -> list[str]:
        """Return share, number and name of each class in the picture."""
        return [f"{entry['share']:7.2%}  {entry['index']:4d}  {entry['label']}" for entry in answer["classes"]]

    def tensor(self, name: str, answers: Sequence[Segmented], options: Form) -> tuple[tuple[int, ...], Any]:
        """Return the class maps. The pictures of a request must have one size.

        Raises:
            RequestError: they have not.
        """
        sizes = {answer.size for answer in answers}
        if len(sizes) > 1:
            shown = " and ".join(f"{height}x{width}" for height, width in sorted(sizes)[:2])
            raise RequestError(f"the pictures have different sizes ({shown}): send each size in a request of its own")
        maps = np.empty((len(answers), *answers[0].size), np.uint8)
        for own, answer in zip(maps, answers, strict=True):
            for rows, strip in answer.strips():
                own[rows] = strip
        return answers[0].size, maps.ravel()

    def body_bytes(self, answer: Segmented) -> int:
        """See `Task`. Only lists take many."""
        return answer.seen.size * _LIST_BYTES if answer.form == "lists" else 0

    def tensor_size(self, name: str, answers: Sequence[Segmented]) -> int:
        """Return the number of pixels."""
        return sum(height * width for height, width in (answer.size for answer in answers))

    def known(self, outputs: Outputs, placement: Placement) -> dict[str, Any]:
        """Return the size of the picture, its class map as a PNG in base64, and the tolerance."""
        (answer,) = self.answers(outputs, ["png"], [placement])
        if isinstance(answer, Refusal):
            raise CardError(answer.message)
        height, width = answer.size
        mask = base64.b64encode(png_of(answer)).decode()
        return {"height": height, "width": width, "mask": mask, "tolerance": TOLERANCE}

    def check_known(self, known: KnownAnswer) -> None:
        """See `Task`. Each pixel must have a class of the card."""
        super().check_known(known)
        highest = int(_seen(map_of(known.facts)).max(initial=0))
        if highest >= len(self.card.classes):
            raise CardError(f"has a class {highest}, and there are {len(self.card.classes)} classes")

    @classmethod
    def compared(cls, facts: Mapping[str, Any], answer: Any) -> tuple[str, str]:
        """Compare the classes of all pixels with the known ones."""
        tolerance = facts.get("tolerance", TOLERANCE)
        fields.number("known: tolerance", tolerance, 0.0, 1.0)
        share = _different(map_of(facts), map_of(answer))
        said = f"{share:.2%} of the pixels have another class"
        fault = f"{said}, more than the allowed {tolerance:.2%}" if share > tolerance else ""
        return fault, f"{said}, allowed {tolerance:.2%}"

    @classmethod
    def fault(cls, reference: Any, answer: Any, tolerance: float) -> str:
        """Compare the classes of all pixels. The tolerance is the share that may differ."""
        share = _different(map_of(reference), map_of(answer))
        return f"{share:.2%} of the pixels have another class" if share > tolerance else ""


def preferred(accept: str, usual: Form = "png") -> Form:
    """Return the form that an ``Accept`` header prefers (RFC 9110, 12.5.1).

    Args:
        accept: the header's value.
        usual: the form for unknown types, which count as ``*/*``, and for JSON without ``rle`` and ``lists``, if it is
            one in JSON.

    Raises:
        RequestError: a quality, ``rle`` or ``lists`` is not a number of its range.
    """
    best, found = 0.0, usual
    for part in accept.split(",")[:32]:
        kind, *words = (word.strip().lower() for word in part.split(";"))
        settings = dict(word.partition("=")[::2] for word in words)
        try:
            quality = float(settings.get("q", "1"))
        except ValueError:
            quality = -1.0
        if not 0 <= quality <= 1:
            raise RequestError(f"Accept: the quality q must be a number from 0 to 1, got {part.strip()[:40]!r}")
        asked = {form: settings.get(form) for form in ("rle", "lists")}
        for name, value in asked.items():
            if value not in (None, "0", "1"):
                raise RequestError(f"Accept: {name} must be 0 or 1, got {part.strip()[:40]!r}")
        if kind and quality > best:
            best = quality
            found = usual if kind != _PNG else "image"
            if kind == _JSON:
                found = _of_json(asked, usual)
    return found


def _of_json(asked: Mapping[str, str | None], usual: Form) -> Form:
    """Return the form of JSON with the parameters ``rle`` and ``lists``, which may be missing."""
    if asked["lists"] == "1":
        return "lists"
    if asked["rle"] == "1":
        return "rle"
    return "png" if usual == "image" or set(asked.values()) != {None} else usual


def palette() -> list[int]:
    """Return the colours of the classes as 256 triples: those of PASCAL VOC's masks.

    Source: ``VOClabelcolormap`` of its development kit. The bits of a class's number become the high bits of red,
    green and blue in turns.
    """
    colours = []
    for index in range(256):
        channels, left = [0, 0, 0], index
        for place in range(7, -1, -1):
            for channel in range(3):
                channels[channel] |= (left >> channel & 1) << place
            left >>= 3
        colours += channels
    return colours


_PALETTE = palette()


def png_of(answer: Segmented) -> bytes:
    """Return an answer's class map as a PNG with a palette. A pixel's value is its class.

    Source: ISO/IEC 15948, 5 and 11.2. Pillow (12) needs all pixels at once.
    """
    height, width = answer.size
    # Of zlib's levels, 3 is the fastest for large areas of one class: 0.4 ms for 480x360 pixels, and level 6 0.9 ms.
    deflate = zlib.compressobj(3)
    lines = [deflate.compress(np.pad(strip, ((0, 0), (1, 0))).tobytes()) for _, strip in answer.strips()]
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, a palette, each line without a filter
    chunks = {b"IHDR": header, b"PLTE": bytes(_PALETTE), b"IDAT": b"".join([*lines, deflate.flush()]), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )


def rle_of(mask: NDArray[np.bool_], columns: NDArray[np.int64] | None = None) -> str:
    """Return a mask as the ``counts`` of COCO's compressed run lengths.

    Source: ``rleEncode`` and ``rleToString`` of pycocotools (``common/maskApi.c``). Runs go down the columns and begin
    with the pixels outside.

    Args:
        mask: ``(H, w)``.
        columns: which of its columns each column of the picture is, ``(W,)``. None: each is its own.
    """
    chosen = np.arange(mask.shape[1]) if columns is None else columns
    height = len(mask)
    of_column, row = np.nonzero((mask[1:] != mask[:-1]).T)
    counts = np.bincount(of_column, minlength=mask.shape[1])
    starts = np.cumsum(counts) - counts
    before = np.concatenate([[False], mask[-1, chosen[:-1]]])  # the last pixel of the column before
    borders: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    step = max(1, _AT_ONCE // max(1, int(counts.max(initial=0))))
    for start in range(0, len(chosen), step):
        part = chosen[start : start + step]
        places = np.arange(start, start + len(part)) * height
        each = counts[part]
        inner = np.repeat(starts[part] - (np.cumsum(each) - each), each) + np.arange(each.sum())
        tops = places[mask[0, part] != before[start : start + step]]
        borders.append(np.sort(np.concatenate([row[inner] + 1 + np.repeat(places, each), tops])))
    runs = np.diff(np.concatenate([*borders, [height * len(chosen)]]))
    # A run of no pixels between two borders exists only at the beginning, for a mask whose first pixel is inside.
    return b"".join(_characters(runs, start) for start in range(0, len(runs), _AT_ONCE)).decode()


def _characters(runs: NDArray[np.int64], start: int) -> bytes:
    """Return the characters of some runs, from one on.

    From the fourth run on, the difference to the run two before is written, in groups of five bits from the lowest on.
    The sixth bit says that another follows. 48 is added to make a character.
    """
    values = runs[start : start + _AT_ONCE].copy()
    first = max(start, 3)
    values[first - start :] -= runs[first - 2 : start + len(values) - 2]
    groups, more = [], np.ones(len(values), bool)
    while more.any():
        bits = values & 0x1F
        values >>= 5
        following = more & np.where(bits & 0x10, values != -1, values != 0)
        groups.append(np.where(more, 48 + (bits | np.where(following, 0x20, 0)), 0).astype(np.uint8))
        more = following
    found = np.stack(groups, axis=1)
    return found[found > 0].tobytes()


def map_of(document: Any) -> ClassMap:
    """Return the class map of an answer's parsed JSON, or of known facts.

    Raises:
        CardError: it has no PNG of the size that it says.
    """
    try:
        size = (document["height"], document["width"])
        with Image.open(io.BytesIO(base64.b64decode(document["mask"], validate=True)), formats=("PNG",)) as image:
            if image.mode not in ("P", "L") or (image.height, image.width) != size:
                raise ValueError(f"it is not a class map of {size[0]}x{size[1]} pixels")
            found: ClassMap = np.array(image, np.uint8)
            return found
    except (OSError, ValueError, LookupError, TypeError, binascii.Error, Image.DecompressionBombError) as error:
        raise CardError(f"the answer has no class map that can be read ({error})") from None


def _seen(classes: ClassMap) -> ClassMap:
    found: ClassMap = classes[classes != UNSEEN]
    return found


def _different(one: ClassMap, other: ClassMap) -> float:
    """Return the share of pixels with another class. All differ if the sizes do."""
    return 1.0 if one.shape != other.shape else float((one != other).mean())
