"""Loads images for the network within a budget: all headers first, then one image at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..card.budget import Account, Backlog, Budget
from ..card.card import Preprocessing
from ..decoders.base import Decoder
from ..errors import ImageError, Refusal
from ..images.headers import Header, faults_named, read_header
from ..images.image_preprocessing import decode, place
from ..images.placement import PlacedImage

#: A fault of the server, not of the image: under less load it would be answered.
NO_MEMORY = Refusal(503, "the server does not have enough memory for the image now: try again later")


def load_within(
    items: Sequence[bytes], preprocessing: Preprocessing, budget: Budget, decoder: Decoder | None = None
) -> Iterator[tuple[int, PlacedImage | Refusal]]:
    """Load the encoded images of one request within ``budget``.

    Each image is decoded when the caller takes it. So no more of them are held than the caller keeps.

    Args:
        items: encoded images (see `image_preprocessing.decode`).
        preprocessing: the network's input.
        budget: what all this may cost.
        decoder: decodes the images that it accepts. None: only the runtime's own decoder.

    Yields:
        The index of an item, and its image for the network or its refusal. Each item occurs once, refused ones in any
        order.
    """
    account = Account(budget)
    headers: dict[int, Header] = {}
    for index, item in enumerate(items):
        with account.charged():
            header = account.late() or header_of(item, budget)
        if isinstance(header, Refusal):
            yield index, header
        else:
            headers[index] = header
    refusal = Backlog(budget).admit([header.pixels for header in headers.values()])
    for index, header in headers.items():
        found: PlacedImage | Refusal | None = refusal or account.late()
        if found is None:
            with account.charged():
                (loaded,) = load_items([items[index]], preprocessing, budget, [header], decoder)
            found = loaded.image
        yield index, found


@dataclass(frozen=True)
class Loaded:
    """One loaded image for the network, or its refusal.

    ``decode`` and ``fit`` are the seconds of each step.
    """

    image: PlacedImage | Refusal
    decode: float = 0.0
    fit: float = 0.0


def header_of(item: bytes, budget: Budget) -> Header | Refusal:
    """Read an image's header like `read_header`, but return a refusal instead of an exception. Thread-safe."""
    try:
        return read_header(item, budget)
    except ImageError as error:
        return error.refusal
    except MemoryError:
        return NO_MEMORY


def load_items(
    items: Sequence[bytes],
    preprocessing: Preprocessing,
    budget: Budget,
    headers: Sequence[Header],
    decoder: Decoder | None = None,
) -> list[Loaded]:
    """Load images whose headers were read. ``decoder`` gets those that it accepts, the others are decoded one by one.

    Thread-safe.

    Raises:
        BrokenError: the decoder's device is lost to this process.
    """
    found: dict[int, Loaded] = {}
    taken = [number for number, header in enumerate(headers) if decoder and decoder.accepts(header, preprocessing)]
    if decoder is not None and taken:
        started = time.perf_counter()
        try:
            images = decoder.load([items[i] for i in taken], [headers[i] for i in taken], preprocessing)
        except MemoryError:
            images = [None] * len(taken)  # one by one they need less
        seconds = (time.perf_counter() - started) / len(taken)
        found = {i: Loaded(image, seconds) for i, image in zip(taken, images, strict=True) if image is not None}
    return [
        found[i] if i in found else load_item(item, preprocessing, budget, headers[i]) for i, item in enumerate(items)
    ]


def load_item(item: bytes, preprocessing: Preprocessing, budget: Budget, header: Header) -> Loaded:
    """Load an image like `image_preprocessing.load`, but return a refusal instead of an exception. Thread-safe."""
    started = decoded = time.perf_counter()
    try:
        image = decode(item, preprocessing.channels, budget, header, preprocessing.pixel_max)
        decoded = time.perf_counter()
        with faults_named(budget):
            placed = place(image, preprocessing)
    except ImageError as error:
        return Loaded(error.refusal, time.perf_counter() - started)
    except MemoryError:
        return Loaded(NO_MEMORY, time.perf_counter() - started)
    return Loaded(placed, decoded - started, time.perf_counter() - decoded)
