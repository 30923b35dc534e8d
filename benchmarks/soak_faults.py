"""Clients that behave badly: what `benchmarks.soak` mixes under those that behave well."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serve.load.answer_check import Checker
from serve.load.plan import Target
from serve.load.workload import Item, Workload, request_bytes

_TIMEOUT_S = 40.0
#: Ends what became of a client while a worker was killed and another one started.
DURING_A_KILL = ", while a worker was killed"
#: Clients that keep within each server's limits, and are to be answered. Our own server takes a client that shuts its
#: sending side for one that has gone (see docs/explanations/own-server.md).
ANSWERED = {"own": ("slow body",), "torchserve": ("slow body", "half-closed")}
#: Above the largest body that either server takes.
_OVERSIZED = 100 << 20


class Badly:
    """Threads that ask a server badly until they are stopped, and count what it did by kind and outcome.

    Args:
        target: the server.
        single: single images with known answers, which slow and half-closed clients must get.
    """

    def __init__(self, target: Target, single: Workload) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []
        self._target, self._items = target, single.items
        self._checker = Checker(single.task, single.tolerance)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._random = random.Random(1)
        self._kill = threading.Event()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Tell apart what becomes of clients while the block runs, in which a worker is killed and comes back."""
        self._kill.set()
        try:
            yield
        finally:
            self._kill.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let them ask for as long as the block runs."""
        kinds: dict[str, Callable[[], str]] = {
            "slow body": self._slow,
            "half-closed": self._half_closed,
            "body cut off": self._cut_off,
            "gone before the answer": self._gone,
            "oversized body": self._oversized,
            "no HTTP": self._garbage,
            "idle connection": self._idle,
        }
        threads = [threading.Thread(target=self._repeat, args=pair, daemon=True) for pair in kinds.items()]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def seconds_until_answered(self, most_s: float) -> float:
        """Seconds until a request that is sent from now on gets its known answer; infinite where none does in time."""
        began = time.monotonic()
        while time.monotonic() - began < most_s:
            with contextlib.suppress(OSError):
                item, request = self._request()
                with self._connect() as opened:
                    opened.sendall(request)
                    if self._answer(opened, item) == "as known":
                        return time.monotonic() - began
            time.sleep(0.05)
        return math.inf

    def _repeat(self, kind: str, ask: Callable[[], str]) -> None:
        while not self._stop.is_set():
            killed = self._kill.is_set()
            try:
                outcome = ask()
            except OSError as error:
                outcome = "closed" if isinstance(error, ConnectionError) else type(error).__name__
            if outcome == "status 503" and (killed or self._kill.is_set()):
                outcome += DURING_A_KILL
            with self._lock:
                self.outcomes[kind, outcome] += 1
            self._stop.wait(0.5)

    def _connect(self) -> socket.socket:
        host, _, port = self._target.address.rpartition(":")
        return socket.create_connection((host, int(port)), _TIMEOUT_S)

    def _request(self) -> tuple[Item, bytes]:
        with self._lock:
            item = self._random.choice(self._items)
        return item, request_bytes(item, self._target.path, self._target.address, self._target.headers)

    def _slow(self) -> str:
        item, request = self._request()
        with self._connect() as opened:
            step = max(1, len(request) // 30)
            for start in range(0, len(request), step):
                opened.sendall(request[start : start + step])
                if self._stop.wait(0.1):
                    return "not finished"
            return self._answer(opened, item)

    def _half_closed(self) -> str:
        item, request = self._request()
        with self._connect() as opened:
            opened.sendall(request)
            opened.shutdown(socket.SHUT_WR)
            return self._answer(opened, item)

    def _cut_off(self) -> str:
        _, request = self._request()
        with self._connect() as opened:
            opened.sendall(request[: len(request) * 2 // 3])
        return "left"

    def _gone(self) -> str:
        _, request = self._request()
        with self._connect() as opened:
            opened.sendall(request)
        return "left"

    def _oversized(self) -> str:
        item = Item("oversized", b"")
        head = request_bytes(item, self._target.path, self._target.address, self._target.headers)
        head = head.replace(b"Content-Length: 0", b"Content-Length: %d" % _OVERSIZED)
        with self._connect() as opened:
            with contextlib.suppress(ConnectionError):
                opened.sendall(head + b"\xff\xd8\xff")
                for _ in range(20):
                    if self._stop.wait(0.02):
                        break
                    opened.sendall(bytes(1 << 16))
            opened.settimeout(10)
            return self._answer(opened, None)

    def _garbage(self) -> str:
        with self._connect() as opened:
            opened.sendall(self._random.randbytes(200) + b"\r\n\r\n")
            opened.settimeout(10)
            return self._answer(opened, None)

    def _idle(self) -> str:
        with self._connect():
            self._stop.wait(5)
        return "left"

    def _answer(self, opened: socket.socket, item: Item | None) -> str:
        """What came back, as far as it counts: ``as known``, a status, ``closed``."""
        received = bytearray()
        until = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < until:
            head, found, body = bytes(received).partition(b"\r\n\r\n")
            if found and len(body) >= _length(head):
                break
            if not (data := opened.recv(1 << 16)):
                break
            received += data
        if not received:
            return "closed"
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        status = int(head[9:12]) if head.startswith(b"HTTP/1.") and head[9:12].isdigit() else 0
        if item is None or status != 200:
            return f"status {status}"
        with self._lock:
            verdict, fault = self._checker.check(item, status, body)
            if fault:
                self.faults.append(f"{item.name}: {fault}")
        return "as known" if verdict == "answered" else verdict


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
