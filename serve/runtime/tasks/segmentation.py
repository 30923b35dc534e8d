"""``segmentation``: an image gets a class map of its own size.

A request's header ``Accept`` chooses the form: JSON with a PNG in base64 (the default), ``application/json; rle=1``
for COCO's run lengths in place of the PNG, or ``image/png`` for the PNG alone. Several images in one request are
answered in JSON.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Mapping, Sequence
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
#: ``png`` and ``rle`` in JSON, and the PNG alone.
Form = Literal["png", "rle", "image"]

#: The value of pixels that the network does not see, because the preprocessing crops them.
UNSEEN: Final = 255
#: Largest allowed share of the known image's pixels with another class. Two engines round differently, which changes
#: pixels at borders.
TOLERANCE: Final = 0.05

_NOT_FINITE = Refusal(500, "the network returned NaN or infinity for the image")
_JSON, _PNG = "application/json", "image/png"
# Writing an answer takes milliseconds, so a thread does it; see `Task.size`.
_LONG = 1 << 20


@dataclass(frozen=True)
class Segmented:
    """An answer: the class map ``uint8 (H, W)`` of the picture's size, and the form in which it is written."""

    classes: ClassMap
    form: Form = "png"


@register
class Segmentation(Task):
    """Options are the form of the answer. An answer is a `Segmented`."""

    name = "segmentation"
    parameters = ("accept",)
    headers: ClassVar[Mapping[str, str]] = {"accept": "accept"}
    complete: ClassVar[Mapping[str, str]] = {"accept": _JSON}
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
        """Return the form that the header ``Accept`` prefers. If it names none of the three, it is JSON with a PNG."""
        return preferred(str(parameters.get("accept", "")))

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

    def answers(self, outputs: Outputs, options: Sequence[Form], placements: Sequence[Placement]) -> list[Outcome]:
        """Return the class map of each image, scaled to the picture's size."""
        maps, totals = outputs
        return [
            Segmented(placement.map_to_picture(classes, UNSEEN).numpy(), form) if finite else _NOT_FINITE
            for classes, form, placement, finite in zip(
                maps, options, placements, totals.isfinite().tolist(), strict=True
            )
        ]

    def body(self, answer: Segmented) -> tuple[bytes, str]:
        """See `Task`. It may be the PNG alone."""
        return (png_of(answer.classes), _PNG) if answer.form == "image" else super().body(answer)

    def json(self, answer: Segmented) -> str:
        """Return size, map, and the classes present with their shares of the pixels, largest first.

        ``{"height": …, "width": …, "classes": [{"label", "index", "share"}, …], "unseen": …, "mask": "<base64>"}``.
        With run lengths each class has ``rle`` instead of the mask. ``unseen`` is the share of pixels without a class.
        """
        height, width = answer.classes.shape
        counts = np.bincount(answer.classes.ravel(), minlength=UNSEEN + 1)
        shares = (counts / max(1, answer.classes.size)).round(6).tolist()
        present = [index for index in np.argsort(-counts, kind="stable").tolist() if counts[index] and index != UNSEEN]
        found = [{"label": self.card.classes[index], "index": index, "share": shares[index]} for index in present]
        document: dict[str, Any] = {"height": height, "width": width, "classes": found, "unseen": shares[UNSEEN]}
        if answer.form == "rle":
            for entry in found:
                entry["rle"] = {"size": [height, width], "counts": rle_of(answer.classes == entry["index"])}
        else:
            document["mask"] = base64.b64encode(png_of(answer.classes)).decode()
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
        sizes = {answer.classes.shape for answer in answers}
        if len(sizes) > 1:
            shown = " and ".join(f"{height}x{width}" for height, width in sorted(sizes)[:2])
            raise RequestError(f"the pictures have different sizes ({shown}): send each size in a request of its own")
        return answers[0].classes.shape, np.concatenate([answer.classes.ravel() for answer in answers])

    def known(self, outputs: Outputs, placement: Placement) -> dict[str, Any]:
        """Return the size of the picture, its class map as a PNG in base64, and the tolerance."""
        (answer,) = self.answers(outputs, ["png"], [placement])
        if isinstance(answer, Refusal):
            raise CardError(answer.message)
        height, width = answer.classes.shape
        mask = base64.b64encode(png_of(answer.classes)).decode()
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


def preferred(accept: str) -> Form:
    """Return the form that an ``Accept`` header prefers (RFC 9110, 12.5.1). Unknown types count as ``*/*``.

    Raises:
        RequestError: a quality or ``rle`` is not a number of its range.
    """
    best, found = 0.0, "png"
    for part in accept.split(",")[:32]:
        kind, *words = (word.strip().lower() for word in part.split(";"))
        settings = dict(word.partition("=")[::2] for word in words)
        try:
            quality = float(settings.get("q", "1"))
        except ValueError:
            quality = -1.0
        if not 0 <= quality <= 1:
            raise RequestError(f"Accept: the quality q must be a number from 0 to 1, got {part.strip()[:40]!r}")
        if settings.get("rle", "0") not in ("0", "1"):
            raise RequestError(f"Accept: rle must be 0 or 1, got {part.strip()[:40]!r}")
        if kind and quality > best:
            best = quality
            found = "image" if kind == _PNG else "rle" if kind == _JSON and settings.get("rle") == "1" else "png"
    return found  # type: ignore[return-value]


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


def png_of(classes: ClassMap) -> bytes:
    """Return a class map ``uint8 (H, W)`` as a PNG with a palette. A pixel's value is its class."""
    image = Image.fromarray(classes)
    image.putpalette(_PALETTE)
    stream = io.BytesIO()
    # Of zlib's levels, 3 is the fastest for large areas of one class: 0.4 ms for 480x360 pixels, and level 6 0.9 ms.
    image.save(stream, "PNG", compress_level=3)
    return stream.getvalue()


def rle_of(mask: NDArray[np.bool_]) -> str:
    """Return a mask ``(H, W)`` as the ``counts`` of COCO's compressed run lengths.

    Source: ``rleEncode`` and ``rleToString`` of pycocotools (``common/maskApi.c``). Runs go down the columns and begin
    with the pixels outside. From the third run on, the difference to the run two before is written, in groups of five
    bits from the lowest on; the sixth bit says that another follows. 48 is added to make a character.
    """
    flat = mask.ravel(order="F")
    borders = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    edges = np.concatenate([[0], borders, [flat.size]])
    runs = np.diff(edges)
    counts = [*([0] if flat.size and flat[0] else []), *runs.tolist()]
    text = []
    for place, run in enumerate(counts):
        value = run - counts[place - 2] if place > 2 else run
        more = True
        while more:
            bits = value & 0x1F
            value >>= 5
            more = value != -1 if bits & 0x10 else value != 0
            text.append(chr(48 + (bits | 0x20 if more else bits)))
    return "".join(text)


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
