"""An opened artifact that many threads may ask: images are decoded beside the engine, and batches form while it runs.

A pool of threads decodes (the decoders release Python's lock), one thread owns the engine. It knows requests and
outcomes, and no server.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import torch

from ..card.execution import compute_alone
from ..card.serving import Serving
from ..device.buckets import warm_sizes
from ..errors import BrokenError, PipelineError, Refusal, one_line
from .decoding import load, read_headers
from .engine_thread import EngineThread
from .execution_chain import open_served
from .pending_request import FAILED, Answered, PendingRequest, ReadyImage, refused, resolve, runs
from .predictor import Predictor
from .protocol import Request
from .queues import SMALL, Queues

_LOG = logging.getLogger(__name__)

# Waiting for more images is worth it where a full batch costs at most this part of as many lone images.
_BATCHING_PAYS = 0.8

# A batch that takes so many times what one took when it was warmed up, and so many seconds, is no slow one; an image
# in a decode thread that takes so many seconds is none either.
_STALLS_TIMES, _STALLS_S = 10, 5.0

_CLOSED = Refusal(503, "the server is shutting down: try again later")


class QueueFull(PipelineError):  # noqa: N818 - what it is, as `queue.Full`
    """More requests wait than are taken, or none are taken any more: answer 503 at once."""


class Service:
    """An opened artifact that many threads may ask. Every method is safe to call from several threads.

    A request's images are decoded by a pool, in turns with those of other requests, and go through the engine as soon
    as it is idle, with whatever has been decoded by then. The budget of ``serving`` holds: for each image, for each
    request, and for what lies here at once as it does for a batch.

    Attributes:
        here_s: the fewest seconds that the engine took for one image, where the thread that asks may run it; else
            infinite.

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
        self._queues = Queues(
            self._budget,
            most=self._most,
            together=predictor.decoder.batch if predictor.decoder is not None else 1,
            decode_threads=self.decode_threads,
            hands_over=predictor.decoder is not None,
        )
        self._lock = self._queues.lock
        self._emptied = threading.Condition(self._lock)
        self._accepted: dict[int, PendingRequest] = {}  # and not answered, by their futures
        self._refusing = False
        # What each thread is at, by its identity: a number that is given once, and when it began, of `time.monotonic`.
        self._jobs: dict[int, tuple[int, float]] = {}
        self._numbers = itertools.count()
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
    def full(self) -> str | None:
        """Why no further request is taken for now; None: one is. `submit` refuses it; so can who asks here first."""
        count = len(self._accepted)
        return f"{count} requests wait already: try again later" if count >= self.queue_limit else None

    @property
    def broken(self) -> str | None:
        """Why no request will be answered any more: the process must end. None: they will be."""
        return None if self._broken is None else str(self._broken)

    @property
    def stalls(self) -> bool:
        """Whether others wait for a batch, or for an image in each decode thread, for much longer than any takes.

        Ask elsewhere until it goes on.
        """
        engine, decoding = self._at()
        if engine is not None:
            return time.monotonic() - engine[1] > self._stalls_s
        return bool(decoding) and time.monotonic() - max(began for _, began in decoding) > _STALLS_S

    @property
    def holding(self) -> int | None:
        """The number of the job that all others wait for: for as long as it is the same, nothing goes on.

        It is what the engine is at; where that has nothing, and every decode thread something, the oldest of those.
        None: there is none.
        """
        engine, decoding = self._at()
        if engine is not None:
            return engine[0]
        return min(number for number, _ in decoding) if decoding else None

    def _at(self) -> tuple[tuple[int, float] | None, list[tuple[int, float]]]:
        """What the engine is at, and what the decode threads are at if none of them is idle."""
        jobs = dict(self._jobs)
        engine = jobs.pop(self._engine, None)
        return engine, [*jobs.values()] if len(jobs) == self.decode_threads else []

    def submit(self, request: Request, *, deadline: float | None = None, here: bool = False) -> Future[Answered]:
        """Have a request answered.

        Args:
            request: what `protocol.parse` gives.
            deadline: `time.monotonic` seconds; what has not been computed by then gets a refusal of status 504.
            here: whether the calling thread may do all of it before this returns, which saves two changes of threads.
                It does where the image is small, nothing else is to do, and the engine may be run by any thread. See
                `compute_alone`.

        Returns:
            The answer to come. Cancelled before its batch is run, nothing more of it is computed. Its exception is a
            BrokenError where the device was lost.

        Raises:
            QueueFull: `queue_limit` requests wait already, or the service is being shut down.
            BrokenError: the device is lost to this process.
        """
        work = PendingRequest(request, deadline, self._budget)
        with self._lock:
            if self._broken is not None:
                raise BrokenError(str(self._broken))
            if self._refusing:
                raise QueueFull(_CLOSED.message)
            if (full := self.full) is not None:
                raise QueueFull(full)
            self._accepted[id(work.future)] = work
            here = here and work.left > 0 and math.isfinite(self.here_s) and self._queues.begin_here(work)
            if work.left and not here:
                self._queues.add(work)
        work.future.add_done_callback(self._answered)
        if here:
            self._answer_here(work)
        elif not work.left:
            self._finish([work])
        return work.future

    def answer_batch(self, requests: Sequence[Request]) -> list[Answered]:
        """Have several requests answered, and wait; what cannot be accepted is refused.

        They go through the engine as one batch where that holds them, and not as each is decoded: nobody is answered
        before all are, and two batches cost more than one.

        Raises:
            BrokenError: the device is lost to this process.
        """
        futures: list[Future[Answered] | QueueFull] = []
        with self._queues.in_step() if len(requests) > 1 else nullcontext():
            for request in requests:
                try:
                    futures.append(self.submit(request, here=len(requests) == 1))  # who would do nothing but wait
                except QueueFull as full:
                    futures.append(full)
            return [
                refused(request, Refusal(503, str(future))) if isinstance(future, QueueFull) else future.result()
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
        compute_alone()
        started.wait()
        while works := self._queues.next_works():
            self._take_up(works)

    def _take_up(self, works: Sequence[PendingRequest], most: int | None = None) -> None:
        """Read the headers of some requests, if they are not, and decode an image of each.

        Args:
            works: the requests.
            most: pixels of an image beyond which all is left to the decode threads.
        """
        thread = threading.get_ident() if most is None else self._engine  # or who does its work
        self._jobs[thread] = next(self._numbers), time.monotonic()
        try:
            for work in works:
                if work.todo is None:
                    self._open(work)
            if most is not None and any(header.pixels > most for work in works for header in work.headers.values()):
                self._queues.leave(works)
            else:
                self._decode(works)
        except BrokenError as error:
            _LOG.critical("%s", error)
            self._break(error)
        except Exception as error:  # noqa: BLE001 - a thread that dies would answer nobody any more
            _LOG.exception("requests failed: %s", one_line(error))
            self._refuse(works, FAILED)
        finally:
            del self._jobs[thread]
            self._queues.done()

    def _open(self, work: PendingRequest) -> None:
        """Read the headers of all images of a request, and see what the budget has for them."""
        started = time.perf_counter()
        if (found := read_headers(work, self._budget)) is None:
            return
        headers, turned_away = found
        turned_away |= self._queues.admit(work, headers, time.perf_counter() - started)
        if turned_away:
            self._settle(work, turned_away)

    def _decode(self, works: Sequence[PendingRequest]) -> None:
        jobs = self._queues.begin(works)
        try:
            found = load(jobs, self.predictor, self._budget)
        except BrokenError:
            self._queues.put(jobs, None)
            raise
        for work, index, refusal in self._queues.put(jobs, found):
            self._settle(work, {index: refusal})

    # The engine.

    def _own(self, threads: int) -> None:
        """Begin in the thread that owns the engine: give it torch's threads, and see that it is warm there."""
        self._engine = threading.get_ident()
        torch.set_num_threads(threads)
        missing = set(warm_sizes(self.predictor.execution.buckets, self._most)) - self.predictor.seconds.keys()
        self.predictor.warm_up(missing, repeats=2)
        seconds = self.predictor.seconds
        lone = seconds.get(1, seconds[min(seconds)])
        self.here_s = lone if self.predictor.any_thread else math.inf
        self._stalls_s = max(_STALLS_S, _STALLS_TIMES * seconds[self._most])
        self._pays = seconds[self._most] <= _BATCHING_PAYS * self._most * lone

    def _infer_for_ever(self) -> None:
        while batch := self._next_batch():
            self._run(batch)
            del batch

    def _answer_here(self, work: PendingRequest) -> None:
        """Do a lone request as the engine's thread would, which waits; what is too large is left to the others."""
        try:
            self._take_up([work], SMALL)
            if batch := self._queues.next_batch(0.0, 0.0):
                self._run(batch)
        finally:
            self._queues.end_here()

    def _run(self, batch: list[ReadyImage]) -> None:
        self._jobs[self._engine] = next(self._numbers), time.monotonic()
        try:
            self._infer(batch)
        except BrokenError as error:
            _LOG.critical("%s", error)
            self._break(error)
        except Exception as error:  # noqa: BLE001 - as above
            _LOG.exception("a batch failed: %s", one_line(error))
            self._refuse([ready.work for ready in batch], FAILED)
        finally:
            del self._jobs[self._engine]

    def _next_batch(self) -> list[ReadyImage]:
        """What is ready for the engine, as much as goes through it at once; empty: there will be nothing."""
        while (lone := self._queues.lone()) is not None:
            self._take_up([lone], SMALL)
        if not self._pays:
            return self._queues.next_batch(0.0, 0.0)
        return self._queues.next_batch(self.serving.max_batch_delay_ms / 1e3, self.predictor.seconds[self._most])

    def _infer(self, batch: list[ReadyImage]) -> None:
        alive: list[ReadyImage] = []
        for ready in batch:
            if (refusal := ready.work.refusal()) is not None:
                self._settle(ready.work, {ready.index: refusal})
            elif runs(ready.work.future):
                alive.append(ready)
        if not alive:
            return
        found = self.predictor.classify([ready.image for ready in alive], [ready.work.request.k for ready in alive])
        done: list[PendingRequest] = []
        if len(alive) == 1 and found.infer < self.here_s < math.inf:
            self.here_s = found.infer  # a model may be opened while the machine is busy
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
        self._refusing = True
        self._queues.end()

    def _break(self, error: BrokenError) -> None:
        with self._lock:
            self._broken = error
            self._end()
            lost = [*self._accepted.values()]
        for work in lost:
            resolve(work.future, error)

    # Answers.

    def _settle(self, work: PendingRequest, outcomes: dict[int, Refusal]) -> None:
        """Note what became of some images of a request, and answer it if these were the last."""
        with self._lock:
            for index, outcome in outcomes.items():
                work.outcomes[index] = outcome
            work.left -= len(outcomes)
            done = work.left == 0
        if done:
            self._finish([work])

    def _finish(self, works: Iterable[PendingRequest]) -> None:
        for work in works:
            work.answer()

    def _refuse(self, works: Sequence[PendingRequest], refusal: Refusal) -> None:
        """Answer requests with a refusal in place of each outcome that is missing."""
        for work in works:
            with self._lock:
                work.outcomes = [refusal if outcome is None else outcome for outcome in work.outcomes]
            self._finish([work])

    def _answered(self, future: Future[Answered]) -> None:
        with self._lock:
            del self._accepted[id(future)]
            if future.cancelled():  # its images are counted no more where they were received
                self._queues.drop_cancelled()
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
