"""The queues between a service's threads: requests to decode, images for the engine, and the order of both.

Only the bookkeeping: nothing here decodes, computes or answers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..card.budget import Backlog, Budget
from ..errors import Refusal
from ..images.headers import Header
from .image_loading import Loaded
from .pending_request import LARGE, PendingRequest, ReadyImage

#: Most pixels that an idle engine's thread decodes itself (in about 7 ms). A lone request then switches threads once,
#: not twice.
SMALL = 1_000_000
_SMALL_BYTES = 1 << 19


class Queues:
    """Requests and images on their way to an engine. All methods are thread-safe.

    Args:
        budget: limits for everything that is queued.
        most: most images in an engine's batch.
        together: most images in a decoder's batch.
        decode_threads: number of decode threads.
        hands_over: whether the engine's thread decodes nothing, not even a lone request.
        answer_bytes: see `tasks.base.Task`. If there are some, a request counts until it is answered.

    Attributes:
        lock: guards everything here and the service's own state. A caller that holds it must not call a method that
            takes it.
        works: requests with images that no thread decodes yet.
        ready: decoded images.
        decoding: number of threads that decode.
        backlog: pixels that are admitted and not decoded, and answers that are kept.
        closed: whether nothing more is accepted.
    """

    def __init__(
        self, budget: Budget, *, most: int, together: int, decode_threads: int, hands_over: bool, answer_bytes: int = 0
    ) -> None:
        self.lock = threading.Lock()
        self.works: deque[PendingRequest] = deque()
        self.ready: deque[ReadyImage] = deque()
        self.backlog = Backlog(budget)
        self.decoding = 0
        self.closed = False
        self._to_decode = threading.Condition(self.lock)
        self._to_infer = threading.Condition(self.lock)
        self._largest, self._together, self._decode_threads = most, together, decode_threads
        # Most images that are decoded ahead of the engine.
        self._ready_limit = max(2 * most, most + decode_threads * together)
        self._engine_decodes_nothing = hands_over
        self._answer_bytes = answer_bytes
        self._lone: PendingRequest | None = None  # the request that the engine's thread must decode
        self._idle = False  # whether that thread waits
        self._here = False  # whether another thread decodes and infers in its place
        self._large = 0  # decode threads with a large image
        self._in_step = 0  # callers that submit requests to be answered together

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark a block of requests that are answered together, so that none of them is finished early by itself."""
        with self.lock:
            self._in_step += 1
        try:
            yield
        finally:
            with self.lock:
                self._in_step -= 1

    # The caller holds the lock.

    def add(self, work: PendingRequest) -> None:
        """Add a request with images to decode. The caller holds the lock."""
        if self._idle and self._is_lone(work):
            self._lone, self._idle = work, False
            self.decoding += 1
            self._to_infer.notify()
        else:
            self.works.append(work)
            self._to_decode.notify()

    def begin_here(self, work: PendingRequest) -> bool:
        """Let the calling thread compute a lone request, and return whether it may. The caller holds the lock.

        It counts as if `lone` had returned the request. The caller must then call `done` and `end_here`.
        """
        if not (self._idle and self._is_lone(work)):
            return False
        self._here, self._idle = True, False
        self.decoding += 1
        return True

    def drop_cancelled(self) -> None:
        """Remove the cancelled requests. The caller holds the lock."""
        for other in [other for other in self.works if other.future.cancelled()]:
            self.works.remove(other)
            self._leave_backlog(other)

    def answered(self, work: PendingRequest) -> None:
        """Remove an answered request from the backlog if its answers counted there. The caller holds the lock."""
        self._leave_backlog(work)

    def end(self) -> None:
        """Wake all waiting threads to end, and accept nothing more. The caller holds the lock."""
        self.closed = True
        self.works.clear()
        self.ready.clear()
        self._to_decode.notify_all()
        self._to_infer.notify_all()

    # For the decode threads.

    def next_works(self) -> list[PendingRequest]:
        """Return the next requests to decode: one, or several for a decoder of batches. Empty: the service has ended.

        The caller must call `done` afterwards.
        """
        with self.lock:
            while not self.closed:
                if self.works and len(self.ready) < self._ready_limit:
                    work = self.works.popleft()
                    if work.large and self._large >= max(1, self._decode_threads - 1):
                        for place, other in enumerate(self.works):
                            if not other.large:
                                self.works[place] = work
                                work = other
                                break
                    self.decoding += 1
                    more = min(self._together - 1, len(self.works))
                    return [work, *(self.works.popleft() for _ in range(more))]
                self._to_decode.wait()
        return []

    def admit(self, work: PendingRequest, headers: dict[int, Header], seconds: float) -> dict[int, Refusal]:
        """Record a request's headers, and check its images against the budget: all or none are admitted.

        Args:
            work: the request.
            headers: headers of its readable images, by index.
            seconds: time to read them.

        Returns:
            The refusals by index, if they are not admitted.
        """
        pixels = [header.pixels for header in headers.values()]
        answers = self._answer_bytes * len(pixels)
        refused: dict[int, Refusal] = {}
        with self.lock:
            work.decode += seconds
            if headers and (refusal := self.backlog.admit(pixels, answers)) is not None:
                refused = dict.fromkeys(headers, refusal)
            work.headers = {} if refused else headers
            work.todo, work.undecoded = deque(work.headers), len(work.headers)
            work.pixels = 0 if refused else sum(pixels) + answers
        return refused

    def leave(self, works: Sequence[PendingRequest]) -> None:
        """Leave requests to the decode threads."""
        with self.lock:
            self.works.extend(works)
            self._to_decode.notify()

    def begin(self, works: Sequence[PendingRequest]) -> list[tuple[PendingRequest, int]]:
        """Return an image of each request to decode now, or several of a lone one for a decoder of batches.

        Other threads may decode its other images meanwhile.
        """
        jobs: list[tuple[PendingRequest, int]] = []
        with self.lock:
            share = max(1, self._together // len(works))
            for work in works:
                todo = work.todo or ()
                jobs += [(work, todo.popleft()) for _ in range(min(share, len(todo)))]  # type: ignore[union-attr]
                if todo and not self.closed:
                    self.works.append(work)
                    self._to_decode.notify()
            self._large += _has_large(jobs)
        return jobs

    def put(
        self, jobs: Sequence[tuple[PendingRequest, int]], found: Sequence[Loaded] | None
    ) -> list[tuple[PendingRequest, int, Refusal]]:
        """Record the results of started images (None: they failed), and wake the engine.

        Returns:
            The refused images.
        """
        refused: list[tuple[PendingRequest, int, Refusal]] = []
        with self.lock:
            self._large -= _has_large(jobs)
            for work, _ in jobs:
                work.undecoded -= 1
                self._leave_backlog(work)
            for (work, index), loaded in zip(jobs, found or (), strict=found is not None):
                work.decode += loaded.decode
                work.preprocess += loaded.fit
                if isinstance(loaded.image, Refusal):
                    refused.append((work, index, loaded.image))
                elif not self.closed:
                    self.ready.append(ReadyImage(work, index, loaded.image))
            if not self._here:
                self._to_infer.notify()
        return refused

    def done(self) -> None:
        """End the decoding that `next_works` or `lone` started."""
        with self.lock:
            self.decoding -= 1
            if self.decoding == 0 and not self._here:
                self._to_infer.notify()

    def end_here(self) -> None:
        """Return the engine to its own thread."""
        with self.lock:
            self._here, self._idle = False, True
            if self.ready or self.closed:
                self._to_infer.notify()

    # For the engine's thread.

    def lone(self) -> PendingRequest | None:
        """Wait for decoded images or the end. Return a request that this thread must decode first, if there is one."""
        with self.lock:
            while self._here or not self.closed:
                if (lone := self._lone) is not None:
                    self._lone = None
                    return lone
                if self.ready and not self._here:
                    break
                self._idle = not self._here
                self._to_infer.wait()
                self._idle = False
            return None

    def next_batch(self, delay_s: float, patience_s: float) -> list[ReadyImage]:
        """Return the decoded images for the next batch. Empty: there are none.

        Args:
            delay_s: most seconds to wait for images that are being decoded. It does not wait for further requests.
            patience_s: the same if nobody would be answered sooner (see `in_step`).
        """
        with self.lock:
            began = time.monotonic()
            while self.ready and len(self.ready) < self._largest and (self.decoding or self.works) and not self.closed:
                left = began + (patience_s if self._in_step else delay_s) - time.monotonic()
                if left <= 0 or not self._to_infer.wait(left):
                    break
            batch = [self.ready.popleft() for _ in range(min(self._largest, len(self.ready)))]
            if self.works:  # threads woken in vain would take a core from the batch
                self._to_decode.notify(len(batch))
            return batch

    def _is_lone(self, work: PendingRequest) -> bool:
        """Whether a request is small and nothing else is queued. The caller holds the lock."""
        (image, *more) = work.request.images
        return (
            isinstance(image, bytes)
            and not more
            and len(image) <= _SMALL_BYTES
            and not (self.ready or self.works or self.decoding or self._engine_decodes_nothing or self._in_step)
        )

    def _leave_backlog(self, work: PendingRequest) -> None:
        """Remove a request from the backlog if nothing of it counts any more. The caller holds the lock."""
        if work.todo and work.future.cancelled():
            work.undecoded -= len(work.todo)
            work.todo.clear()
        if work.undecoded == 0:
            work.headers.clear()
        kept = self._answer_bytes and not work.future.done()
        if work.pixels and not work.headers and not kept:
            self.backlog.leave(work.pixels)
            work.pixels = 0


def _has_large(jobs: Sequence[tuple[PendingRequest, int]]) -> bool:
    return any(header is not None and header.pixels > LARGE for work, i in jobs for header in (work.headers.get(i),))
