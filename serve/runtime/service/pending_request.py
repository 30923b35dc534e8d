"""One request in a service: its state, its times, and the future of its answer."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from ..card.budget import Account, Budget
from ..errors import BrokenError, Refusal
from ..images.headers import Header
from ..images.placement import PlacedImage
from ..tasks.base import Outcome
from .protocol import Request
from .stages import Stages

#: Pixels from which an image may not take the last idle decode thread from smaller ones. More than phones produce.
LARGE = 16_000_000

LATE = Refusal(504, "the request's deadline passed before the server computed it")
FAILED = Refusal(500, "the server failed on the image; see the reason in its log")


@dataclass(frozen=True)
class Answered:
    """The answer to a request: an outcome for each image, in order.

    ``batch_size`` is the size of the largest batch with one of its images. 0 if none was in a batch.
    """

    outcomes: tuple[Outcome, ...]
    stages: Stages
    batch_size: int


class PendingRequest:
    """An unanswered request. Change its fields only under the service's lock.

    Attributes:
        deadline: in seconds of `time.monotonic`. None: there is none.
        future: the future of the answer.
        outcomes: the outcome of each image. None: not known yet.
        left: number of images without an outcome.
        headers: headers of the images that are not decoded yet, by index.
        todo: indices of images that no thread decodes yet. None: their headers are not read.
        undecoded: number of admitted images that are not decoded.
        pixels: pixels of the admitted images in the backlog, and their answers' bytes.
        batch_size: see `Answered`.
    """

    def __init__(self, request: Request, deadline: float | None, budget: Budget) -> None:
        self.request = request
        self.deadline = deadline
        self.account = Account(budget)
        self.future: Future[Answered] = Future()
        self.outcomes: list[Outcome | None] = [
            image if isinstance(image, Refusal) else None for image in request.images
        ]
        self.left = self.outcomes.count(None)
        self.begun = time.perf_counter()
        self.headers: dict[int, Header] = {}
        self.todo: deque[int] | None = None
        self.undecoded = 0
        self.pixels = 0
        self.decode = self.preprocess = self.infer = self.postprocess = 0.0
        self.batch_size = 0

    def refusal(self) -> Refusal | None:
        """Return the refusal for a passed deadline. None: it has not passed."""
        return LATE if self.deadline is not None and time.monotonic() >= self.deadline else None

    @property
    def large(self) -> bool:
        """Whether its next image is a large one."""
        return bool(self.todo) and self.headers[self.todo[0]].pixels > LARGE  # type: ignore[index]

    def answer(self) -> None:
        """Resolve the future. An image without an outcome has failed."""
        spent = self.decode + self.preprocess + self.infer + self.postprocess
        queue = max(0.0, time.perf_counter() - self.begun - spent)
        stages = Stages(*(part * 1e3 for part in (queue, self.decode, self.preprocess, self.infer, self.postprocess)))
        outcomes = tuple(FAILED if outcome is None else outcome for outcome in self.outcomes)
        resolve(self.future, Answered(outcomes, stages, self.batch_size))


@dataclass(frozen=True)
class ReadyImage:
    """A decoded image that waits for the engine, with its request and its index there."""

    work: PendingRequest
    index: int
    image: PlacedImage


def refused(request: Request, refusal: Refusal) -> Answered:
    """Return the answer to a request for which nothing was computed."""
    outcomes = tuple(image if isinstance(image, Refusal) else refusal for image in request.images)
    return Answered(outcomes, Stages(0, 0, 0, 0, 0), 0)


def runs(future: Future[Answered]) -> bool:
    """Whether the answer is still wanted. From then on it cannot be cancelled."""
    return future.running() or (not future.done() and future.set_running_or_notify_cancel())


def resolve(future: Future[Answered], found: Answered | BrokenError) -> None:
    """Resolve a future, unless it was cancelled or resolved before."""
    with suppress(InvalidStateError):  # two threads may get here at once if one of them gives up
        if not runs(future):
            return
        if isinstance(found, BrokenError):
            future.set_exception(found)
        else:
            future.set_result(found)
