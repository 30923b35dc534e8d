"""The queues between the threads of a service: requests to decode, images for the engine, and who takes which next.

The books of a service, and none of its work: nothing here is decoded, computed or answered.
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

#: Pixels that an idle engine's thread decodes by itself at most (in about 7 ms), so that a lone request changes
#: threads once and not twice.
SMALL = 1_000_000
_SMALL_BYTES = 1 << 19


class Queues:
    """Requests and images on their way to an engine. Every method is safe to call from several threads.

    Args:
        budget: what may lie here at once.
        most: images that go through the engine at once.
        together: images that the decoder takes at once.
        decode_threads: how many threads decode.
        hands_over: whether the engine's thread decodes nothing, not even a lone request.

    Attributes:
        lock: of everything here, and of what a service keeps beside it. Nobody who has it calls a method that takes it.
        works: requests of which something is to be decoded and is not being decoded.
        ready: decoded images.
        decoding: how many threads have something to decode.
        backlog: pixels that are admitted and not decoded.
        closed: whether nothing more is taken.
    """

    def __init__(self, budget: Budget, *, most: int, together: int, decode_threads: int, hands_over: bool) -> None:
        self.lock = threading.Lock()
        self.works: deque[PendingRequest] = deque()
        self.ready: deque[ReadyImage] = deque()
        self.backlog = Backlog(budget)
        self.decoding = 0
        self.closed = False
        self._to_decode = threading.Condition(self.lock)
        self._to_infer = threading.Condition(self.lock)
        self._most, self._together, self._decode_threads = most, together, decode_threads
        # Decoded ahead of the engine, and no more.
        self._room = max(2 * most, most + decode_threads * together)
        self._hands_over = hands_over
        self._lone: PendingRequest | None = None  # that the engine's thread is to decode
        self._idle = False  # whether it waits
        self._here = False  # whether another thread decodes and infers in its place
        self._large = 0  # decode threads that have a large image
        self._in_step = 0  # how many gave requests that are answered together

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For requests that come in the block and are answered together: none of them is done sooner by itself."""
        with self.lock:
            self._in_step += 1
        try:
            yield
        finally:
            with self.lock:
                self._in_step -= 1

    # Under the lock.

    def add(self, work: PendingRequest) -> None:
        """Take in a request with something to decode. Under the lock."""
        if self._idle and self._is_lone(work):
            self._lone, self._idle = work, False
            self.decoding += 1
            self._to_infer.notify()
        else:
            self.works.append(work)
            self._to_decode.notify()

    def begin_here(self, work: PendingRequest) -> bool:
        """Have the calling thread do a lone request in place of the engine's; whether it may. Under the lock.

        It is as if `lone` had given the request. Whoever has done it says so, by `done` and then by `end_here`.
        """
        if not (self._idle and self._is_lone(work)):
            return False
        self._here, self._idle = True, False
        self.decoding += 1
        return True

    def drop_cancelled(self) -> None:
        """Take out the requests that nobody waits for. Under the lock."""
        for other in [other for other in self.works if other.future.cancelled()]:
            self.works.remove(other)
            self._forget(other)

    def end(self) -> None:
        """Have all who wait here end, and take nothing more. Under the lock."""
        self.closed = True
        self.works.clear()
        self.ready.clear()
        self._to_decode.notify_all()
        self._to_infer.notify_all()

    # For who decodes.

    def next_works(self) -> list[PendingRequest]:
        """The next requests of which something is to be decoded, one but for a decoder of batches; empty: no more.

        Who gets them says so when done, by `done`.
        """
        with self.lock:
            while not self.closed:
                if self.works and len(self.ready) < self._room:
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
        """Note a request's headers, and see what the budget has for its images: all or none.

        Args:
            work: the request.
            headers: of its images that have one, by index.
            seconds: that reading them took.

        Returns:
            Why its images are not admitted, by index.
        """
        pixels = [header.pixels for header in headers.values()]
        refused: dict[int, Refusal] = {}
        with self.lock:
            work.decode += seconds
            if headers and (refusal := self.backlog.admit(pixels)) is not None:
                refused = dict.fromkeys(headers, refusal)
            work.headers = {} if refused else headers
            work.todo, work.undecoded, work.pixels = deque(work.headers), len(work.headers), sum(pixels)
        return refused

    def leave(self, works: Sequence[PendingRequest]) -> None:
        """Leave requests to the decode threads."""
        with self.lock:
            self.works.extend(works)
            self._to_decode.notify()

    def begin(self, works: Sequence[PendingRequest]) -> list[tuple[PendingRequest, int]]:
        """An image of each request to decode now (several of a lone one, for a decoder of batches).

        Its other images may meanwhile be decoded by other threads.
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
        """Take in what became of what was begun (None: nothing), and tell the engine.

        Returns:
            The images that were refused.
        """
        refused: list[tuple[PendingRequest, int, Refusal]] = []
        with self.lock:
            self._large -= _has_large(jobs)
            for work, _ in jobs:
                work.undecoded -= 1
                self._forget(work)
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
        """Say that what `next_works` or `lone` gave is decoded, as far as it is for now."""
        with self.lock:
            self.decoding -= 1
            if self.decoding == 0 and not self._here:
                self._to_infer.notify()

    def end_here(self) -> None:
        """Leave the engine to its thread again."""
        with self.lock:
            self._here, self._idle = False, True
            if self.ready or self.closed:
                self._to_infer.notify()

    # For the engine's thread.

    def lone(self) -> PendingRequest | None:
        """Wait for images that are ready, or the end; a request that is to be decoded here before them."""
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
        """What is ready for the engine, as much as goes through it at once; empty: nothing is.

        Args:
            delay_s: the most that is waited for images that are on their way; not for requests that may come.
            patience_s: the same where nobody would be answered sooner (see `in_step`).
        """
        with self.lock:
            began = time.monotonic()
            while self.ready and len(self.ready) < self._most and (self.decoding or self.works) and not self.closed:
                left = began + (patience_s if self._in_step else delay_s) - time.monotonic()
                if left <= 0 or not self._to_infer.wait(left):
                    break
            batch = [self.ready.popleft() for _ in range(min(self._most, len(self.ready)))]
            if self.works:  # who was woken for nothing would take a core from the batch
                self._to_decode.notify(len(batch))
            return batch

    def _is_lone(self, work: PendingRequest) -> bool:
        """Whether a request is small and there is nothing else to do. Under the lock."""
        (image, *more) = work.request.images
        return (
            isinstance(image, bytes)
            and not more
            and len(image) <= _SMALL_BYTES
            and not (self.ready or self.works or self.decoding or self._hands_over or self._in_step)
        )

    def _forget(self, work: PendingRequest) -> None:
        """Take a request off the backlog, if none of its images will be decoded any more. Under the lock."""
        if work.todo and work.future.cancelled():
            work.undecoded -= len(work.todo)
            work.todo.clear()
        if work.headers and work.undecoded == 0:
            work.headers.clear()
            self.backlog.leave(work.pixels)


def _has_large(jobs: Sequence[tuple[PendingRequest, int]]) -> bool:
    return any(header is not None and header.pixels > LARGE for work, i in jobs for header in (work.headers.get(i),))
