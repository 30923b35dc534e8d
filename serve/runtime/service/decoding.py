"""The work of a service's decode threads: read headers, and decode images one by one or together.

Nothing here changes a request. The service does that, under its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from ..card.budget import Budget
from ..errors import BrokenError, Refusal, one_line
from ..images.headers import Header
from .image_loading import Loaded, header_of, load_items
from .pending_request import FAILED, LATE, PendingRequest
from .predictor import Predictor

_LOG = logging.getLogger(__name__)


def read_headers(work: PendingRequest, budget: Budget) -> tuple[dict[int, Header], dict[int, Refusal]] | None:
    """Return the headers of a request's images by index, and a refusal for each without one. None: it was cancelled."""
    headers: dict[int, Header] = {}
    refused: dict[int, Refusal] = {}
    for index, image in enumerate(work.request.images):
        if isinstance(image, Refusal):
            continue
        if work.future.cancelled():
            return None
        with work.account.charged():
            header = work.refusal() or work.account.late() or header_of(image, budget)
        if isinstance(header, Refusal):
            refused[index] = header
        else:
            headers[index] = header
    return headers, refused


def load(jobs: Sequence[tuple[PendingRequest, int]], predictor: Predictor, budget: Budget) -> list[Loaded]:
    """Load images of some requests by their indices. Cancelled and late ones get a refusal.

    Raises:
        BrokenError: the decoder's device is lost to this process.
    """
    found: dict[int, Loaded] = {}
    for number, (work, _) in enumerate(jobs):
        late = LATE if work.future.cancelled() else work.refusal() or work.account.late()
        if late is not None:
            found[number] = Loaded(late)
    wanted = [number for number in range(len(jobs)) if number not in found]
    with ExitStack() as charged:
        for work in {id(work): work for work, _ in (jobs[number] for number in wanted)}.values():
            charged.enter_context(work.account.charged())
        try:
            loaded = load_items(
                [work.request.images[index] for work, index in (jobs[number] for number in wanted)],  # type: ignore[misc]
                predictor.card.preprocessing,
                budget,
                [work.headers[index] for work, index in (jobs[number] for number in wanted)],
                predictor.decoder,
            )
        except BrokenError:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign decoder may raise anything; the counts must stay right
            _LOG.exception("decoding failed: %s", one_line(error))
            loaded = [Loaded(FAILED)] * len(wanted)
    found |= zip(wanted, loaded, strict=True)
    return [found[number] for number in range(len(jobs))]
