"""An opened artifact for many threads: images are decoded beside the engine, and batches form while it runs.

A pool of threads decodes (the decoders release Python's lock), and one thread owns the engine. The module depends on no
server.
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

# Waiting for more images pays if a full batch costs at most this part of as many single images.
_BATCHING_PAYS = 0.8

# A batch stalls if it takes this many times its warm-up time, and this many seconds. An image in a decode thread stalls
# after the seconds alone.
_STALLS_TIMES, _STALLS_S = 10, 5.0

_CLOSED = Refusal(503, "the server is shutting down: try again later")


class QueueFull(PipelineError):  # noqa: N818 - named like `queue.Full`
    """The queue is full or closed. Answer 503 at once."""


class Service:
    """An opened artifact that many threads may call. All methods are thread-safe.

    A pool decodes the images, in turns between requests. The engine takes whatever is decoded as soon as it is idle.
    The budget in ``serving`` limits each image, each request, and everything that is held at once, like a batch.

    Attributes:
        here_s: fewest seconds that the engine took for one image. Infinite if the calling thread may not run it.

    Args:
        predictor: the artifact. Nobody else may use its engine if that is bound to one thread.
        serving: the serving settings. An idle engine waits at most ``max_batch_delay_ms`` for images that are being
            decoded, and only if a full batch is cheaper than single images.
        decode_threads: threads that decode. None: as in ``serving``, or else one for each available core, at most 8.
        queue_limit: most requests that are accepted and not answered yet. None: as in ``serving``.
        owner: the thread that opened the engine (see `open_service`). None: a new one.
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
        self._max_batch = predictor.max_batch
        self._queues = Queues(
            self._budget,
            most=self._max_batch,
            together=predictor.decoder.batch if predictor.decoder is not None else 1,
            decode_threads=self.decode_threads,
            hands_over=predictor.decoder is not None,
            answer_bytes=predictor.task.answer_bytes(serving),
        )
        self._lock = self._queues.lock
        self._all_answered = threading.Condition(self._lock)
        self._accepted: dict[int, PendingRequest] = {}  # the accepted requests without an answer, by their futures
        self._refusing = False
        # The job of each thread by its identity: a unique number, and its start in `time.monotonic`.
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
            self._owner.run(lambda: self._prepare_engine(threads)).result()
        except BaseException:
            self.close()
            raise
        self._owner.run(self._infer_for_ever)

    @property
    def waiting(self) -> int:
        """Number of requests that were accepted and are not answered yet."""
        return len(self._accepted)

    @property
    def full(self) -> str | None:
        """Why no further request is accepted now. None: it is. `submit` refuses it then; a caller may check first."""
        count = len(self._accepted)
        return f"{count} requests are already waiting: try again later" if count >= self.queue_limit else None

    @property
    def broken(self) -> str | None:
        """Why no request can be answered any more, so that the process must end. None: requests are answered."""
        return None if self._broken is None else str(self._broken)

    @property
    def stalls(self) -> bool:
        """Whether requests wait for a batch or for all decode threads, for much longer than either should take.

        Send requests elsewhere until it continues.
        """
        engine, decoding = self._at()
        if engine is not None:
            return time.monotonic() - engine[1] > self._stalls_s
        return bool(decoding) and time.monotonic() - max(began for _, began in decoding) > _STALLS_S

    @property
    def holding(self) -> int | None:
        """Number of the job that all others wait for. As long as it is the same, nothing progresses.

        It is the engine's job. If the engine is idle and every decode thread is busy, it is their oldest job. None:
        there is none.
        """
        engine, decoding = self._at()
        if engine is not None:
            return engine[0]
        return min(number for number, _ in decoding) if decoding else None

    def _at(self) -> tuple[tuple[int, float] | None, list[tuple[int, float]]]:
        """Return the engine's job, and the jobs of the decode threads if none of them is idle."""
        jobs = dict(self._jobs)
        engine = jobs.pop(self._engine, None)
        return engine, [*jobs.values()] if len(jobs) == self.decode_threads else []

    def submit(self, request: Request, *, deadline: float | None = None, here: bool = False) -> Future[Answered]:
        """Submit a request.

        Args:
            request: a result of `protocol.parse`.
            deadline: in seconds of `time.monotonic`. What is not computed by then gets a refusal with status 504.
            here: whether the calling thread may compute the answer before this returns. That saves two switches of
                threads. It does so if the image is small, nothing else waits, and any thread may run the engine. See
                `compute_alone`.

        Returns:
            A future with the answer. If it is cancelled before its batch runs, nothing more is computed. Its exception
            is a BrokenError if the device was lost.

        Raises:
            QueueFull: `queue_limit` requests wait already, or the service shuts down.
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
        """Answer several requests together, and wait. Requests that are not accepted are refused.

        They form one batch if they fit, because nobody gets an answer before all are done and two batches cost more
        than one.

        Raises:
            BrokenError: the device is lost to this process.
        """
        futures: list[Future[Answered] | QueueFull] = []
        with self._queues.in_step() if len(requests) > 1 else nullcontext():
            for request in requests:
                try:
                    futures.append(self.submit(request, here=len(requests) == 1))  # the calling thread would only wait
                except QueueFull as full:
                    futures.append(full)
            return [
                refused(request, Refusal(503, str(future))) if isinstance(future, QueueFull) else future.result()
                for request, future in zip(requests, futures, strict=True)
            ]

    def drain(self, timeout_s: float) -> bool:
        """Stop accepting requests, and wait for the accepted ones.

        Returns:
            Whether all of them were answered in time.
        """
        with self._lock:
            self._refusing = True
            return self._all_answered.wait_for(lambda: not self._accepted, timeout_s)

    def close(self) -> None:
        """End all threads. Requests without an answer are refused with 503, so call `drain` first."""
        with self._lock:
            self._end()
        for thread in self._decoders:
            thread.join()
        self._owner.end()
        self._refuse([*self._accepted.values()], _CLOSED)

    def __enter__(self) -> Service:
        """Return the service. It is closed at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the service."""
        self.close()

    # Decoding.

    def _decode_for_ever(self, started: threading.Barrier) -> None:
        compute_alone()
        started.wait()
        while works := self._queues.next_works():
            self._decode_some(works)

    def _decode_some(self, works: Sequence[PendingRequest], most: int | None = None) -> None:
        """Read the headers of some requests if necessary, and decode an image of each.

        Args:
            works: the requests.
            most: most pixels of an image. If one is larger, the decode threads do the work. None: no limit.
        """
        thread = threading.get_ident() if most is None else self._engine  # or the one that acts for it
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
        """Read the headers of all images of a request, and check them against the budget."""
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

    def _prepare_engine(self, threads: int) -> None:
        """Start in the engine's thread: set torch's threads, and warm up the missing batch sizes."""
        self._engine = threading.get_ident()
        torch.set_num_threads(threads)
        missing = set(warm_sizes(self.predictor.execution.buckets, self._max_batch)) - self.predictor.seconds.keys()
        self.predictor.warm_up(missing, repeats=2)
        seconds = self.predictor.seconds
        lone = seconds.get(1, seconds[min(seconds)])
        self.here_s = lone if self.predictor.any_thread else math.inf
        self._stalls_s = max(_STALLS_S, _STALLS_TIMES * seconds[self._max_batch])
        self._batching_pays = seconds[self._max_batch] <= _BATCHING_PAYS * self._max_batch * lone

    def _infer_for_ever(self) -> None:
        while batch := self._next_batch():
            self._run(batch)
            del batch

    def _answer_here(self, work: PendingRequest) -> None:
        """Compute a lone request in place of the waiting engine thread. A large image goes to the decode threads."""
        try:
            self._decode_some([work], SMALL)
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
        except Exception as error:  # noqa: BLE001 - see `_decode_some`
            _LOG.exception("a batch failed: %s", one_line(error))
            self._refuse([ready.work for ready in batch], FAILED)
        finally:
            del self._jobs[self._engine]

    def _next_batch(self) -> list[ReadyImage]:
        """Wait for the next batch. Empty: the service has ended."""
        while (lone := self._queues.lone()) is not None:
            self._decode_some([lone], SMALL)
        if not self._batching_pays:
            return self._queues.next_batch(0.0, 0.0)
        return self._queues.next_batch(self.serving.max_batch_delay_ms / 1e3, self.predictor.seconds[self._max_batch])

    def _infer(self, batch: list[ReadyImage]) -> None:
        alive: list[ReadyImage] = []
        for ready in batch:
            if (refusal := ready.work.refusal()) is not None:
                self._settle(ready.work, {ready.index: refusal})
            elif runs(ready.work.future):
                alive.append(ready)
        if not alive:
            return
        options = [ready.work.request.options for ready in alive]
        found = self.predictor.compute([ready.image for ready in alive], options)
        done: list[PendingRequest] = []
        if len(alive) == 1 and found.infer < self.here_s < math.inf:
            self.here_s = found.infer  # the machine may be busy while a model is opened
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
        """End all threads, and accept nothing more. The caller holds the lock."""
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
        """Record outcomes of some images of a request. Answer it if these were the last."""
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
        """Answer requests with a refusal in place of each missing outcome."""
        for work in works:
            with self._lock:
                work.outcomes = [refusal if outcome is None else outcome for outcome in work.outcomes]
            self._finish([work])

    def _answered(self, future: Future[Answered]) -> None:
        with self._lock:
            self._queues.answered(self._accepted.pop(id(future)))
            if future.cancelled():  # its images leave the backlog
                self._queues.drop_cancelled()
            if not self._accepted:
                self._all_answered.notify_all()


def open_service(
    folder: Path, gpu: int | None, *, decode_threads: int | None = None, queue_limit: int | None = None
) -> Service:
    """Open an unpacked archive as its ``serving.json`` says, in the thread that will run it; see `open_served`.

    Args:
        folder: folder of the archive.
        gpu: index of the GPU assigned to this process. None: no GPU.
        decode_threads: see `Service`.
        queue_limit: see `Service`.

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
