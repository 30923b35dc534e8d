"""One request under way in a service: what is known of it, where its time goes, and its answer to come."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

import torch

from ..card.budget import Account, Budget
from ..errors import BrokenError, Refusal
from ..images.headers import Header
from .predictor import Outcome
from .protocol import Request
from .stages import Stages

#: Pixels from which an image may not take the last idle decode thread from smaller ones: above what phones make.
LARGE = 16_000_000

LATE = Refusal(504, "the request's deadline passed before it was computed")
FAILED = Refusal(500, "the server failed on the image; its log says why")


@dataclass(frozen=True)
class Answered:
    """What became of a request: an outcome for each image, in order.

    ``batch_size`` counts the images of the largest batch that one of its own went through the network with; 0 if
    none did.
    """

    outcomes: tuple[Outcome, ...]
    stages: Stages
    batch_size: int


class PendingRequest:
    """A request under way. Its fields are changed under the service's lock.

    Attributes:
        deadline: `time.monotonic` seconds; None: there is none.
        future: the answer to come.
        outcomes: what became of each image; None: nothing yet.
        left: how many images nothing became of yet.
        headers: of the images that are still to be decoded, by index.
        todo: indices of images that no thread decodes yet; None: their headers are not read.
        undecoded: how many of those admitted are not decoded.
        pixels: of those admitted.
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
        """Why nothing more of it is computed."""
        return LATE if self.deadline is not None and time.monotonic() >= self.deadline else None

    @property
    def large(self) -> bool:
        """Whether its next image is a large one."""
        return bool(self.todo) and self.headers[self.todo[0]].pixels > LARGE  # type: ignore[index]

    def answer(self) -> None:
        """Give the answer; an image of which nothing is known by now has failed."""
        spent = self.decode + self.preprocess + self.infer + self.postprocess
        queue = max(0.0, time.perf_counter() - self.begun - spent)
        stages = Stages(*(part * 1e3 for part in (queue, self.decode, self.preprocess, self.infer, self.postprocess)))
        outcomes = tuple(FAILED if outcome is None else outcome for outcome in self.outcomes)
        resolve(self.future, Answered(outcomes, stages, self.batch_size))


@dataclass(frozen=True)
class ReadyImage:
    """A decoded image that waits for the engine: of which request, and which of its images."""

    work: PendingRequest
    index: int
    image: torch.Tensor


def refused(request: Request, refusal: Refusal) -> Answered:
    """The answer to a request of which nothing was computed."""
    outcomes = tuple(image if isinstance(image, Refusal) else refusal for image in request.images)
    return Answered(outcomes, Stages(0, 0, 0, 0, 0), 0)


def runs(future: Future[Answered]) -> bool:
    """Whether the answer is still wanted; from then on it cannot be cancelled."""
    return future.running() or (not future.done() and future.set_running_or_notify_cancel())


def resolve(future: Future[Answered], found: Answered | BrokenError) -> None:
    """Give an answer, unless it was cancelled or given before."""
    with suppress(InvalidStateError):  # two threads may come at once where one of them gives up
        if not runs(future):
            return
        if isinstance(found, BrokenError):
            future.set_exception(found)
        else:
            future.set_result(found)
