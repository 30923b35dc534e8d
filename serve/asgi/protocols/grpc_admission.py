"""Limits how many gRPC messages are read at once. grpc reports a message's size only when all of it is in memory.

Of a message that is not being read, grpc holds no more than the first window of HTTP/2, 64 kB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve.asgi.http.messages import RefusedError, try_again

#: Seconds that a request waits until the longest reader must give up its turn.
_PATIENCE_S = 1.0


class MessageAdmission:
    """Turns to read a message, first come, first served. Use it in one event loop.

    A slow client keeps its turn as long as nobody else needs it, and at least ``_PATIENCE_S``.

    Args:
        turns: messages that may be read at once.
        seconds: time for a message to arrive, including the wait for its turn.
    """

    def __init__(self, turns: int, seconds: float) -> None:
        self._turns = asyncio.Semaphore(turns)
        self._seconds = seconds
        self._readers: dict[asyncio.Timeout, float] = {}  # when each reader began, in order

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and hold it for the block.

        Raises:
            RefusedError: 408, the message did not arrive in time, or too slowly while others waited. 503, no turn was
                free in time.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._seconds
        await self._wait(ends)
        limit = asyncio.timeout_at(ends)
        try:
            async with limit:
                self._readers[limit] = loop.time()
                yield
        except TimeoutError:
            if loop.time() < ends:
                raise RefusedError(408, "the message arrived too slowly while others waited", "slow-client") from None
            raise RefusedError(408, f"the message did not arrive within {self._seconds:g} s", "slow-client") from None
        finally:
            self._readers.pop(limit, None)
            self._turns.release()

    async def _wait(self, ends: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(min(ends, loop.time() + _PATIENCE_S)):
                    await self._turns.acquire()
                return
            except TimeoutError:
                if loop.time() >= ends:
                    raise try_again("too many messages are arriving at once: try again later", "memory") from None
            longest = next(((limit, since) for limit, since in self._readers.items() if not limit.expired()), None)
            if longest is not None and loop.time() - longest[1] >= _PATIENCE_S:
                del self._readers[longest[0]]
                longest[0].reschedule(loop.time())
