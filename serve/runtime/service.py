"""An opened artifact that many threads may ask: images are decoded beside the engine, and batches form while it runs.

A pool of threads decodes (the decoders release Python's lock), one thread owns the engine. It knows requests and
outcomes, and no server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from .buckets import warm_sizes
from .budget import Accounts, Backlog
from .chain import open_served
from .errors import BrokenError, PipelineError, Refusal, one_line
from .headers import Header
from .intake import Loaded, header_of, load_items
from .predictor import Outcome, Predictor
from .protocol import Request
from .serving import Serving

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

#: Pixels from which an image may not take the last idle decode thread from smaller ones: above what phones make.
_LARGE = 16_000_000

# Waiting for more images is worth it where a full batch costs at most this part of as many lone images.
_BATCHING_PAYS = 0.8

_LATE = Refusal(504, "the request's deadline passed before it was computed")
_CLOSED = Refusal(503, "the server is shutting down: try again later")
_FAILED = Refusal(500, "the server failed on the image; its log says why")


class QueueFull(PipelineError):  # noqa: N818 - what it is, as `queue.Full`
    """More requests wait than are taken, or none are taken any more: answer 503 at once."""


@dataclass(frozen=True)
class Stages:
    """Where the time of one request went, in milliseconds.

    Attributes:
        queue: in which nothing of it was worked on: it waited for a decode thread, the engine or other images.
        decode: reading headers and decoding, its images added up.
        preprocess: resizing and cropping, its images added up.
        infer: in the engine, with normalising and copying, whole batches.
        postprocess: ranking classes, whole batches.
    """

    queue: float
    decode: float
    preprocess: float
    infer: float
    postprocess: float


@dataclass(frozen=True)
class Answered:
    """What became of a request: an outcome for each image, in order.

    ``batch_size`` counts the images of the largest batch that one of its own went through the network with; 0 if
    none did.
    """

    outcomes: tuple[Outcome, ...]
    stages: Stages
    batch_size: int


class EngineThread:
    """A thread that runs what it is given, one after the other: the one that an engine is opened, warmed and run in.

    CUDA graphs inside compiled code may not change threads (torch 2.14, pytorch 123177), and each thread that calls
    libgomp has a team of its own there.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon: what was not closed does not keep the process from ending.
        self._thread = threading.Thread(target=self._run_all, name="engine", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Run ``job`` there, after whatever was given before."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def end(self) -> None:
        """End it once all jobs are done, and wait for that."""
        self._jobs.put(None)
        self._thread.join()

    def _run_all(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                future.set_exception(error)
            del future, job, entry


class _Work:
    """A request under way. Its fields are changed under the service's lock."""

    def __init__(self, request: Request, deadline: float | None, accounts: Accounts) -> None:
        self.request = request
        self.deadline = deadline
        self.accounts = accounts
        self.future: Future[Answered] = Future()
        self.outcomes: list[Outcome | None] = [
            image if isinstance(image, Refusal) else None for image in request.images
        ]
        self.left = self.outcomes.count(None)
        self.begun = time.perf_counter()
        self.headers: dict[int, Header] = {}
        self.todo: deque[int] | None = None  # images to decode, once their headers are read
        self.undecoded = 0  # of those admitted
        self.pixels = 0
        self.decode = self.preprocess = self.infer = self.postprocess = 0.0
        self.batch_size = 0

    def refusal(self) -> Refusal | None:
        """Why nothing more of it is computed."""
        return _LATE if self.deadline is not None and time.monotonic() >= self.deadline else None

    @property
    def large(self) -> bool:
        """Whether its next image is a large one."""
        return bool(self.todo) and self.headers[self.todo[0]].pixels > _LARGE  # type: ignore[index]


@dataclass(frozen=True)
class _Ready:
    work: _Work
    index: int
    image: torch.Tensor


class Service:
    """An opened artifact that many threads may ask. Every method is safe to call from several threads.

    A request's images are decoded by a pool, in turns with those of other requests, and go through the engine as soon
    as it is idle, with whatever has been decoded by then. The budget of ``serving`` holds: for each image, for each
    request, and for what lies here at once as it does for a batch.

    Args:
        predictor: the artifact. Nobody else may use its engine any more if that is bound to one thread.
        serving: how it is served; ``max_batch_delay_ms`` is the most that an idle engine waits for images that are
            being decoded, where a full batch is cheaper than lone images.
        decode_threads: threads that decode, if not as many as ``serving`` says; where that says nothing, one for each
            core that this process may use, at most 8.
        queue_limit: requests that may be accepted and not answered yet, if not as many as ``serving`` says.
        owner: the thread that owns the engine, where it was opened in one (see `open_service`); else one is made.
    """

    def __init__(
        self,
        predictor: Predictor,
        serving: Serving,
        *,
        decode_threads: int | None = None,
        queue_limit: int | None = None,
        owner: EngineThread | None = None,
    ) -> None:
        self.predictor = predictor
        self.serving = serving
        self.queue_limit = queue_limit or serving.queue_limit
        self.decode_threads = decode_threads or serving.decoding_threads
        self._budget = serving.allowance
        self._most = predictor.max_batch
        self._together = predictor.decoder.batch if predictor.decoder is not None else 1
        self._lock = threading.Lock()
        self._to_decode = threading.Condition(self._lock)
        self._to_infer = threading.Condition(self._lock)
        self._emptied = threading.Condition(self._lock)
        self._works: deque[_Work] = deque()
        self._ready: deque[_Ready] = deque()
        self._backlog = Backlog(self._budget)
        self._accepted: dict[int, _Work] = {}  # and not answered, by their futures
        self._decoding = self._large = 0  # decode threads that have work, and that have a large image
        self._refusing = self._closed = False
        self._broken: BrokenError | None = None
        self._owner = owner or EngineThread()
        threads = self._owner.run(torch.get_num_threads).result() if owner else torch.get_num_threads()
        started = threading.Barrier(self.decode_threads + 1)
        self._decoders = [
            threading.Thread(target=self._decode_for_ever, args=(started,), name=f"decode-{number}", daemon=True)
            for number in range(self.decode_threads)
        ]
        for thread in self._decoders:
            thread.start()
        started.wait()
        try:
            self._owner.run(lambda: self._own(threads)).result()
        except BaseException:
            self.close()
            raise
        self._owner.run(self._infer_for_ever)

    @property
    def waiting(self) -> int:
        """Requests that were accepted and are not answered yet."""
        return len(self._accepted)

    @property
    def broken(self) -> str | None:
        """Why no request will be answered any more: the process must end. None: they will be."""
        return None if self._broken is None else str(self._broken)

    def submit(self, request: Request, *, deadline: float | None = None) -> Future[Answered]:
        """Have a request answered.

        Args:
            request: what `protocol.parse` gives.
            deadline: `time.monotonic` seconds; what has not been computed by then gets a refusal of status 504.

        Returns:
            The answer to come. Cancelled before its batch is run, nothing more of it is computed. Its exception is a
            BrokenError where the device was lost.

        Raises:
            QueueFull: `queue_limit` requests wait already, or the service is being shut down.
            BrokenError: the device is lost to this process.
        """
        work = _Work(request, deadline, Accounts(self._budget))
        with self._lock:
            if self._broken is not None:
                raise BrokenError(str(self._broken))
            if self._refusing:
                raise QueueFull(_CLOSED.message)
            if len(self._accepted) >= self.queue_limit:
                raise QueueFull(f"{len(self._accepted)} requests wait already: try again later")
            if len(self._works) > self.queue_limit:  # cancelled ones, while all threads decode large images
                for other in [other for other in self._works if other.future.cancelled()]:
                    self._works.remove(other)
                    self._forget(other)
            self._accepted[id(work.future)] = work
            if work.left:
                self._works.append(work)
                self._to_decode.notify()
        work.future.add_done_callback(self._answered)
        if not work.left:
            self._finish([work])
        return work.future

    def answer_batch(self, requests: Sequence[Request]) -> list[Answered]:
        """Have several requests answered, and wait; what cannot be accepted is refused.

        Raises:
            BrokenError: the device is lost to this process.
        """
        futures: list[Future[Answered] | QueueFull] = []
        for request in requests:
            try:
                futures.append(self.submit(request))
            except QueueFull as full:
                futures.append(full)
        return [
            _refused(request, Refusal(503, str(future))) if isinstance(future, QueueFull) else future.result()
            for request, future in zip(requests, futures, strict=True)
        ]

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests, and wait for those that were accepted.

        Returns:
            Whether all of them were answered in time.
        """
        with self._lock:
            self._refusing = True
            return self._emptied.wait_for(lambda: not self._accepted, timeout_s)

    def close(self) -> None:
        """End all threads. What was accepted and is not answered is refused with 503; `drain` first."""
        with self._lock:
            self._end()
        for thread in self._decoders:
            thread.join()
        self._owner.end()
        self._refuse([*self._accepted.values()], _CLOSED)

    def __enter__(self) -> Service:
        """Itself; it is closed at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    # Decoding.

    def _decode_for_ever(self, started: threading.Barrier) -> None:
        torch.set_num_threads(1)  # of this thread; what it resizes is small
        started.wait()
        while works := self._next_works():
            try:
                for work in works:
                    if work.todo is None:
                        self._open(work)
                self._decode(works)
            except BrokenError as error:
                _LOG.critical("%s", error)
                self._break(error)
            except Exception as error:  # noqa: BLE001 - a thread that dies would answer nobody any more
                _LOG.exception("requests failed: %s", one_line(error))
                self._refuse(works, _FAILED)
            finally:
                with self._lock:
                    self._decoding -= 1
                    if self._decoding == 0:
                        self._to_infer.notify()

    def _next_works(self) -> list[_Work]:
        """The next requests of which something is to be decoded, one but for a decoder of batches; empty: no more."""
        room = max(2 * self._most, self._most + self.decode_threads * self._together)
        with self._lock:
            while not self._closed:
                if self._works and len(self._ready) < room:
                    work = self._works.popleft()
                    if work.large and self._large >= max(1, self.decode_threads - 1):
                        for place, other in enumerate(self._works):
                            if not other.large:
                                self._works[place] = work
                                work = other
                                break
                    self._decoding += 1
                    more = min(self._together - 1, len(self._works))
                    return [work, *(self._works.popleft() for _ in range(more))]
                self._to_decode.wait()
        return []

    def _open(self, work: _Work) -> None:
        """Read the headers of all images of a request, and see what the budget has for them."""
        started = time.perf_counter()
        refused: dict[int, Refusal] = {}
        for index, image in enumerate(work.request.images):
            if isinstance(image, Refusal):
                continue
            if work.future.cancelled():
                return
            with work.accounts.charged(0):
                header = work.refusal() or work.accounts.late(0) or header_of(image, self._budget)
            if isinstance(header, Refusal):
                refused[index] = header
            else:
                work.headers[index] = header
        pixels = [header.pixels for header in work.headers.values()]
        with self._lock:
            work.decode += time.perf_counter() - started
            if work.headers and (refusal := self._backlog.admit(pixels)) is not None:
                refused |= dict.fromkeys(work.headers, refusal)
                work.headers.clear()
            work.todo, work.undecoded, work.pixels = deque(work.headers), len(work.headers), sum(pixels)
        if refused:
            self._settle(work, refused)

    def _decode(self, works: Sequence[_Work]) -> None:
        """Decode an image of each request (several of a lone one, for a decoder of batches).

        Its other images may meanwhile be decoded by other threads.
        """
        jobs: list[tuple[_Work, int]] = []
        with self._lock:
            share = max(1, self._together // len(works))
            for work in works:
                todo = work.todo or ()
                jobs += [(work, todo.popleft()) for _ in range(min(share, len(todo)))]  # type: ignore[union-attr]
                if todo and not self._closed:
                    self._works.append(work)
                    self._to_decode.notify()
            large = any(work.headers[index].pixels > _LARGE for work, index in jobs)
            self._large += large
        try:
            found = self._load(jobs)
        finally:
            with self._lock:
                self._large -= large
                for work, _ in jobs:
                    work.undecoded -= 1
                    self._forget(work)
        refused: list[tuple[_Work, int, Refusal]] = []
        with self._lock:
            for (work, index), loaded in zip(jobs, found, strict=True):
                work.decode += loaded.decode
                work.preprocess += loaded.fit
                if isinstance(loaded.image, Refusal):
                    refused.append((work, index, loaded.image))
                elif not self._closed:
                    self._ready.append(_Ready(work, index, loaded.image))
            self._to_infer.notify()
        for work, index, refusal in refused:
            self._settle(work, {index: refusal})

    def _load(self, jobs: Sequence[tuple[_Work, int]]) -> list[Loaded]:
        """The images of some requests, by their indices; of those only that anybody still waits for.

        Raises:
            BrokenError: the decoder's device is lost to this process.
        """
        found: dict[int, Loaded] = {}
        for number, (work, _) in enumerate(jobs):
            late = _LATE if work.future.cancelled() else work.refusal() or work.accounts.late(0)
            if late is not None:
                found[number] = Loaded(late)
        wanted = [number for number in range(len(jobs)) if number not in found]
        with ExitStack() as charged:
            for work in {id(work): work for work, _ in (jobs[number] for number in wanted)}.values():
                charged.enter_context(work.accounts.charged(0))
            try:
                loaded = load_items(
                    [work.request.images[index] for work, index in (jobs[number] for number in wanted)],  # type: ignore[misc]
                    self.predictor.card.preprocessing,
                    self._budget,
                    [work.headers[index] for work, index in (jobs[number] for number in wanted)],
                    self.predictor.decoder,
                )
            except BrokenError:
                raise
            except Exception as error:  # noqa: BLE001 - a decoder of somebody else's; the books must be kept
                _LOG.exception("decoding failed: %s", one_line(error))
                loaded = [Loaded(_FAILED)] * len(wanted)
        found |= zip(wanted, loaded, strict=True)
        return [found[number] for number in range(len(jobs))]

    def _forget(self, work: _Work) -> None:
        """Take a request off the backlog, if none of its images will be decoded any more. Under the lock."""
        if work.todo and work.future.cancelled():
            work.undecoded -= len(work.todo)
            work.todo.clear()
        if work.headers and work.undecoded == 0:
            work.headers.clear()
            self._backlog.leave(work.pixels)

    # The engine.

    def _own(self, threads: int) -> None:
        """Begin in the thread that owns the engine: give it torch's threads, and see that it is warm there."""
        torch.set_num_threads(threads)
        missing = set(warm_sizes(self.predictor.execution.buckets, self._most)) - self.predictor.seconds.keys()
        self.predictor.warm_up(missing, repeats=2)
        seconds = self.predictor.seconds
        self._pays = seconds[self._most] <= _BATCHING_PAYS * self._most * seconds.get(1, seconds[min(seconds)])

    def _infer_for_ever(self) -> None:
        while batch := self._next_batch():
            try:
                self._infer(batch)
            except BrokenError as error:
                _LOG.critical("%s", error)
                self._break(error)
                return
            except Exception as error:  # noqa: BLE001 - as above
                _LOG.exception("a batch failed: %s", one_line(error))
                self._refuse([ready.work for ready in batch], _FAILED)
            del batch

    def _next_batch(self) -> list[_Ready]:
        """What is ready for the engine, as much as goes through it at once; empty: there will be nothing."""
        with self._lock:
            while not self._ready:
                if self._closed:
                    return []
                self._to_infer.wait()
            if self._pays:
                until = time.monotonic() + self.serving.max_batch_delay_ms / 1e3
                # Not for requests that may come: only for images that are on their way.
                while len(self._ready) < self._most and (self._decoding or self._works) and not self._closed:
                    left = until - time.monotonic()
                    if left <= 0 or not self._to_infer.wait(left):
                        break
            batch = [self._ready.popleft() for _ in range(min(self._most, len(self._ready)))]
            self._to_decode.notify(len(batch))
            return batch

    def _infer(self, batch: list[_Ready]) -> None:
        alive: list[_Ready] = []
        for ready in batch:
            if (refusal := ready.work.refusal()) is not None:
                self._settle(ready.work, {ready.index: refusal})
            elif _runs(ready.work.future):
                alive.append(ready)
        if not alive:
            return
        found = self.predictor.classify([ready.image for ready in alive], [ready.work.request.k for ready in alive])
        done: list[_Work] = []
        with self._lock:
            for work in {id(ready.work): ready.work for ready in alive}.values():
                work.infer += found.infer
                work.postprocess += found.postprocess
                work.batch_size = max(work.batch_size, len(alive))
            for ready, outcome in zip(alive, found.outcomes, strict=True):
                ready.work.outcomes[ready.index] = outcome
                ready.work.left -= 1
                if ready.work.left == 0:
                    done.append(ready.work)
        self._finish(done)

    def _end(self) -> None:
        """Have all threads end, and take nothing more. Under the lock."""
        self._refusing = self._closed = True
        self._works.clear()
        self._ready.clear()
        self._to_decode.notify_all()
        self._to_infer.notify_all()

    def _break(self, error: BrokenError) -> None:
        with self._lock:
            self._broken = error
            self._end()
            lost = [*self._accepted.values()]
        for work in lost:
            _resolve(work.future, error)

    # Answers.

    def _settle(self, work: _Work, outcomes: dict[int, Refusal]) -> None:
        """Note what became of some images of a request, and answer it if these were the last."""
        with self._lock:
            for index, outcome in outcomes.items():
                work.outcomes[index] = outcome
            work.left -= len(outcomes)
            done = work.left == 0
        if done:
            self._finish([work])

    def _finish(self, works: Iterable[_Work]) -> None:
        for work in works:
            spent = work.decode + work.preprocess + work.infer + work.postprocess
            queue = max(0.0, time.perf_counter() - work.begun - spent)
            stages = Stages(
                *(part * 1e3 for part in (queue, work.decode, work.preprocess, work.infer, work.postprocess))
            )
            outcomes = tuple(_FAILED if outcome is None else outcome for outcome in work.outcomes)
            _resolve(work.future, Answered(outcomes, stages, work.batch_size))

    def _refuse(self, works: Sequence[_Work], refusal: Refusal) -> None:
        """Answer requests with a refusal in place of each outcome that is missing."""
        for work in works:
            with self._lock:
                work.outcomes = [refusal if outcome is None else outcome for outcome in work.outcomes]
            self._finish([work])

    def _answered(self, future: Future[Answered]) -> None:
        with self._lock:
            del self._accepted[id(future)]
            if not self._accepted:
                self._emptied.notify_all()


def open_service(
    folder: Path, gpu: int | None, *, decode_threads: int | None = None, queue_limit: int | None = None
) -> Service:
    """Open an unpacked archive as its ``serving.json`` says, in the thread that will run it; see `open_served`.

    Args:
        folder: of the archive.
        gpu: index of the GPU that the server assigned to this process; None: no GPU.
        decode_threads: as of `Service`.
        queue_limit: as of `Service`.

    Raises:
        CardError: a file does not match the card, or there is no ``serving.json``.
        EngineError: no execution works here.
    """
    owner = EngineThread()
    try:
        predictor, serving = owner.run(lambda: open_served(folder, gpu)).result()
    except BaseException:
        owner.end()
        raise
    return Service(predictor, serving, decode_threads=decode_threads, queue_limit=queue_limit, owner=owner)


def _refused(request: Request, refusal: Refusal) -> Answered:
    """A request of which nothing was computed."""
    outcomes = tuple(image if isinstance(image, Refusal) else refusal for image in request.images)
    return Answered(outcomes, Stages(0, 0, 0, 0, 0), 0)


def _runs(future: Future[Answered]) -> bool:
    """Whether the answer is still wanted; from then on it cannot be cancelled."""
    return future.running() or (not future.done() and future.set_running_or_notify_cancel())


def _resolve(future: Future[Answered], found: Answered | BrokenError) -> None:
    """Give an answer, unless it was cancelled or given before."""
    with suppress(InvalidStateError):  # two threads may come at once where one of them gives up
        if not _runs(future):
            return
        if isinstance(found, BrokenError):
            future.set_exception(found)
        else:
            future.set_result(found)
