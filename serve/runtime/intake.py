"""The images of a batch on their way to the network: headers first, then one decoded at a time, within a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .budget import Accounts, Budget, admit
from .card import Preprocessing
from .errors import ImageError, Refusal
from .headers import Header, read_header
from .images import load

# The server's fault, not the image's: with less to do beside it, it would be answered.
_NO_MEMORY = Refusal(503, "the server has too little memory for the image now: try again later")


def take_in(
    items: Sequence[bytes], owners: Sequence[int], preprocessing: Preprocessing, budget: Budget
) -> Iterator[tuple[int, torch.Tensor | Refusal]]:
    """Load encoded images within ``budget``; see `budget.admit` for whose come first.

    An image is decoded when it is asked for, so that a caller holds no more of them than it keeps.

    Args:
        items: encoded images (see `images.decode`).
        owners: the number of the request that each came with.
        preprocessing: what the network takes.
        budget: what all this may cost.

    Yields:
        The index of an item, and its ``uint8`` image of shape ``preprocessing.shape`` or why there is none;
        each item once, the refused ones in any order.
    """
    accounts = Accounts(budget)
    headers: dict[int, Header] = {}
    claims: dict[int, list[int]] = {}
    for index, (item, owner) in enumerate(zip(items, owners, strict=True)):
        with accounts.charged(owner):
            header = accounts.late(owner) or _header_or_refusal(item, budget)
        if isinstance(header, Refusal):
            yield index, header
        else:
            headers[index] = header
            claims.setdefault(owner, []).append(header.pixels)
    admission = admit(budget, claims)
    for index in headers:
        if (refusal := admission.refused.get(owners[index])) is not None:
            yield index, refusal
    place = {owner: position for position, owner in enumerate(admission.order)}
    for index in sorted((index for index in headers if owners[index] in place), key=lambda i: place[owners[i]]):
        with accounts.charged(owners[index]):
            image = accounts.late(owners[index]) or _image_or_refusal(
                items[index], preprocessing, budget, headers[index]
            )
        yield index, image


def _header_or_refusal(item: bytes, budget: Budget) -> Header | Refusal:
    try:
        return read_header(item, budget)
    except ImageError as error:
        return error.refusal
    except MemoryError:
        return _NO_MEMORY


def _image_or_refusal(
    item: bytes, preprocessing: Preprocessing, budget: Budget, header: Header
) -> torch.Tensor | Refusal:
    try:
        return load(item, preprocessing, budget, header)
    except ImageError as error:
        return error.refusal
    except MemoryError:
        return _NO_MEMORY
