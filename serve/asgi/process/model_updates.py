"""Updates the served models: new versions are opened and warm before they get a request."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from serve.archive.verification import Policy
from serve.asgi.http.served_models import Models, Served
from serve.asgi.process.model_loader import load
from serve.asgi.process.serving_plan import Wanted
from serve.runtime.card.card import sha256_file
from serve.runtime.errors import EngineError
from serve.runtime.service.garbage_collection import freeze_heap

_LOG = logging.getLogger(__name__)


class ModelUpdates:
    """Changes `Models`, one change after the other. Use it in the event loop.

    Args:
        models: the models to change.
        gpu: see `load`.
        queue: see `load`.
        policy: see `load`.
        drain_s: seconds for an old version to answer its accepted requests.
        on_loaded: called with each opened version and the seconds that this took.
        on_left_out: called with each version that was left out, and the reason.
    """

    def __init__(
        self,
        models: Models,
        *,
        gpu: int | None,
        queue: int | None,
        policy: Policy,
        drain_s: float,
        on_loaded: Callable[[Served, float], None],
        on_left_out: Callable[[Wanted, EngineError], None],
    ) -> None:
        self._models = models
        self._load = functools.partial(load, gpu=gpu, queue=queue, policy=policy)
        self._drain_s = drain_s
        self._on_loaded = on_loaded
        self._on_left_out = on_left_out
        self._changing = asyncio.Lock()
        self._closing: list[threading.Thread] = []  # of engines that did not answer in time
        self._closings: set[asyncio.Task[bool]] = set()

    @property
    def left_open(self) -> bool:
        """Whether a removed engine still runs. At exit Python would wait for it, or a library abort."""
        return any(thread.is_alive() for thread in self._closing)

    async def change(self, wanted: Sequence[Wanted], *, leave_out: bool = False) -> None:
        """Serve ``wanted`` and nothing else.

        A version with an unchanged archive stays. Other versions are opened beside the served ones. When all are warm,
        they take over at once. A removed version answers its accepted requests and is closed. During the change both
        are in memory.

        Args:
            wanted: the versions to serve.
            leave_out: continue without a version that no engine can run here, if another is left and its model is not
                served now.

        Raises:
            PipelineError: a version cannot be opened. Then nothing changes.
        """
        async with self._changing:
            opened: list[Served] = []
            found: dict[str, list[Served]] = {}
            weights: list[tuple[Served, int]] = []
            try:
                for entry in wanted:
                    served = await self._unchanged(entry)
                    if served is None:
                        started = time.perf_counter()
                        try:
                            served = await asyncio.to_thread(self._load, entry)
                        except EngineError as error:
                            served_now = self._models.versions(entry.name)
                            if not leave_out or served_now or (entry is wanted[-1] and not found):
                                raise
                            self._on_left_out(entry, error)
                            continue
                        opened.append(served)
                        self._on_loaded(served, time.perf_counter() - started)
                    found.setdefault(entry.name, []).append(served)
                    weights.append((served, entry.weight))
            except BaseException:
                for served in opened:
                    await asyncio.to_thread(served.service.close)
                raise
            for served, weight in weights:  # also of those that stay, but only now
                served.weight = weight
            for old in self._models.replace(found):
                task = asyncio.ensure_future(self._close_version(old))
                self._closings.add(task)
                task.add_done_callback(self._forget_closing)
            if opened:
                freeze_heap()

    async def end(self, within_s: float | None = None) -> bool:
        """Answer the accepted requests, and close everything.

        Args:
            within_s: seconds for that, removed versions included. None: ``drain_s``.

        Returns:
            Whether all of them were answered in time.
        """
        seconds = self._drain_s if within_s is None else within_s
        async with self._changing:
            leaving = [asyncio.ensure_future(self._close_version(old, seconds)) for old in self._models.replace({})]
            over, late = await asyncio.wait(self._closings, timeout=seconds) if self._closings else (set(), set())
            answered = await asyncio.gather(*leaving)
        return all(answered) and all(task.result() for task in over) and not late

    async def _unchanged(self, wanted: Wanted) -> Served | None:
        """Return the served version that was opened from the same bytes. None: there is none."""
        for served in self._models:
            if (served.name, served.version) == (wanted.name, wanted.version):
                digest = await asyncio.to_thread(sha256_file, wanted.archive)
                return served if digest == served.digest else None
        return None

    def _forget_closing(self, task: asyncio.Task[bool]) -> None:
        self._closings.discard(task)
        freeze_heap()  # frees what it held; at shutdown this would only take time

    async def _close_version(self, served: Served, within_s: float | None = None) -> bool:
        answered = True
        ends = time.monotonic() + (self._drain_s if within_s is None else within_s)
        try:
            async with asyncio.timeout(ends - time.monotonic()):
                await served.released()
        except TimeoutError:
            answered = False
        answered &= await asyncio.to_thread(served.service.drain, max(0.0, ends - time.monotonic()))
        if answered:
            await asyncio.to_thread(served.service.close)
        else:  # a hanging engine never closes, so neither this nor the exit waits for it
            self._closing.append(threading.Thread(target=served.service.close, name="close", daemon=True))
            self._closing[-1].start()
        _LOG.info(
            "closed",
            extra={"fields": {"model": served.name, "version": served.version, "all_answered": answered}},
        )
        return answered
