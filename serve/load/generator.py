"""The generator's loop: one thread, one process, persistent connections, closed or open loop.

In the open loop requests are due at the times of a Poisson process, whether or not earlier ones were answered. A
latency counts from when its request was due. Otherwise a stalling server would also stop the clock that measures it
(Gil Tene's "coordinated omission").
"""

from __future__ import annotations

import random
import selectors
import time
from collections import Counter, deque
from dataclasses import dataclass

from serve.load.answer_check import GOOD, Checker, Verdict
from serve.load.histogram import Histogram
from serve.load.http_connection import BrokenWireError, Wire, stages
from serve.load.plan import Plan, Result
from serve.load.workload import Item, Workload, request_bytes
from serve.runtime.tasks.base import find_task

# Seconds after which an idle connection is opened again. Servers close idle ones (uvicorn after 5 s), and a request
# sent at that moment would count as lost.
_STALE_S = 2.0
_MOST_FAULTS = 8


@dataclass
class _Sent:
    """A sent request: its item, when it was due, and when it was sent."""

    item: Item
    due: float
    sent: float


class _Run:
    def __init__(self, plan: Plan, workload: Workload) -> None:
        self._plan = plan
        self._checker = Checker(workload.task, workload.tolerance)
        # Two generators: the next item is drawn when it is sent, which must not change when others are due.
        self._gaps, self._order = random.Random(plan.seed), random.Random(f"order {plan.seed}")
        self._items = list(workload.items)
        self._weights = [item.weight for item in self._items]
        target = plan.target
        host = "localhost" if target.address.startswith("unix:") else target.address
        task = find_task(workload.task)
        headers = {**target.headers, **task.to_headers(task.readable)}
        self._requests = {item.name: request_bytes(item, target.path, host, headers) for item in workload.items}
        if len(self._requests) < len(self._items):
            raise ValueError("two items have the same name")
        self._selector = selectors.DefaultSelector()
        self._idle: list[tuple[Wire, float]] = []
        self._under_way: dict[Wire, _Sent] = {}
        self._waiting: deque[float] = deque()
        self._deck: list[Item] = []
        self._counts: Counter[str] = Counter()
        self._latency, self._rejection = Histogram(), Histogram()
        self._stage_totals: dict[str, list[float]] = {}
        self._faults: list[str] = []
        self._arrived = 0
        self._from = self._until = self._next = self._looked = self._late = 0.0

    def run(self) -> Result:
        plan = self._plan
        start = time.perf_counter()
        self._from, self._until = start + plan.warm_s, start + plan.warm_s + plan.seconds
        self._next = start
        cpu_at = time.process_time() if plan.warm_s == 0 else None
        gave_up, ended = False, self._until
        if plan.rate is None:
            self._waiting.extend([start] * plan.clients)
        while True:
            now = time.perf_counter()
            if cpu_at is None and now >= self._from:
                cpu_at = time.process_time()
            if plan.rate is not None:
                self._queue_due(now, plan.rate)
            if now >= self._until:
                break
            self._send(now)
            if plan.give_up_ms is not None and now - self._oldest(now) > plan.give_up_ms / 1e3:
                gave_up, ended = True, now
                break
            due = self._next if plan.rate is not None else self._until
            self._wait(min(due, self._until) - now)
        cpu = time.process_time() - (cpu_at if cpu_at is not None else time.process_time())
        if not gave_up:
            self._drain()
        self._close()
        return Result(
            seconds=max(0.0, ended - self._from),
            counts=dict(self._counts),
            latency=self._latency,
            rejection=self._rejection,
            cpu_s=cpu,
            came=self._arrived,
            stages={name: total / count for name, (total, count) in self._stage_totals.items()},
            faults=tuple(self._faults),
            gave_up=gave_up,
            late_ms=self._late * 1e3,
        )

    def _queue_due(self, now: float, rate: float) -> None:
        """Queue what is due by now. This includes requests due before the end that a delayed process notices late."""
        if self._next <= min(now, self._until):
            self._late = max(self._late, now - self._next)
        while self._next <= now and self._next < self._until:
            self._waiting.append(self._next)
            self._next += self._gaps.expovariate(rate)

    def _oldest(self, now: float) -> float:
        """Return when the longest waiting request was due."""
        due = [sent.due for sent in self._under_way.values()]
        return min([now, *due, *([self._waiting[0]] if self._waiting else [])])

    def _send(self, now: float) -> None:
        while self._waiting and (self._idle or len(self._under_way) < self._plan.clients):
            due = self._waiting.popleft()
            item = self._draw()
            try:
                wire = self._connection(now)
            except OSError as error:
                self._count("lost", due, f"{item.name}: no connection ({error})", now)
                if self._plan.rate is None:
                    self._waiting.append(now)
                time.sleep(0.01)  # no server listens: do not retry as fast as the processor can
                return
            if self._plan.rate is None:
                due = time.perf_counter()
            self._under_way[wire] = _Sent(item, due, now)
            try:
                if not wire.start(self._requests[item.name]):
                    self._selector.modify(wire.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, wire)
            except BrokenWireError as broken:
                self._drop(wire, broken, now)

    def _draw(self) -> Item:
        """Return the next item. Items come in a random order by weight, none more often than its share."""
        if not self._deck:
            total = sum(self._weights)
            size = max(len(self._items), 64)
            shares = (weight / total * size for weight in self._weights)
            counts = [int(share) + (self._order.random() < share % 1) for share in shares]
            self._deck = [item for item, count in zip(self._items, counts, strict=True) for _ in range(count)]
            self._deck = self._deck or self._order.choices(self._items, self._weights)
            self._order.shuffle(self._deck)
        return self._deck.pop()

    def _connection(self, now: float) -> Wire:
        spread = self._plan.spread
        while self._idle and len(self._idle) + len(self._under_way) >= spread:
            wire, since = self._idle.pop(0 if spread else -1)
            if now - since < _STALE_S:
                return wire
            self._forget(wire)
        wire = Wire(self._plan.target.address)
        self._selector.register(wire.socket, selectors.EVENT_READ, wire)
        return wire

    def _forget(self, wire: Wire) -> None:
        self._selector.unregister(wire.socket)
        wire.close()

    def _wait(self, seconds: float) -> None:
        """Process answers that arrive within ``seconds``. Return after the first ones."""
        if not self._selector.get_map():
            time.sleep(max(0.0, min(seconds, 0.05)))
            return
        for key, events in self._selector.select(max(0.0, min(seconds, 0.25))):
            wire: Wire = key.data
            now = time.perf_counter()
            try:
                if events & selectors.EVENT_WRITE and wire.push():
                    self._selector.modify(wire.socket, selectors.EVENT_READ, wire)
                if not events & selectors.EVENT_READ or (answer := wire.pull()) is None:
                    continue
            except BrokenWireError as broken:
                self._drop(wire, broken, now)
                continue
            sent = self._under_way.pop(wire, None)
            if answer.closes or sent is None:
                self._forget(wire)
            else:
                self._idle.append((wire, now))
            if sent is not None:
                self._record(sent, answer.status, answer.body, answer.timing, now)
        self._drop_late()

    def _drop_late(self) -> None:
        now = time.perf_counter()
        if now - self._looked < 0.25:
            return
        self._looked = now
        for wire, sent in list(self._under_way.items()):
            if now - sent.sent > self._plan.timeout_s:
                self._drop(wire, BrokenWireError(f"no answer in {self._plan.timeout_s:g} s"), now)

    def _record(self, sent: _Sent, status: int, body: bytes, timing: str, now: float) -> None:
        verdict, fault = self._checker.check(sent.item, status, body)
        self._arrived += verdict in GOOD and self._in_time(now)
        if self._counts_in(sent.due, now):
            milliseconds = (now - sent.due) * 1e3
            if verdict in GOOD:
                self._latency.add(milliseconds)
                for name, duration in stages(timing).items() if timing else ():
                    total = self._stage_totals.setdefault(name, [0.0, 0.0])
                    total[0] += duration
                    total[1] += 1
            elif verdict == "rejected":
                self._rejection.add(milliseconds)
        self._count(verdict, sent.due, f"{sent.item.name}: {fault}" if fault else "", now)
        if self._plan.rate is None and now < self._until:
            self._waiting.append(now)

    def _drop(self, wire: Wire, broken: BrokenWireError, now: float) -> None:
        self._forget(wire)
        self._idle = [(other, since) for other, since in self._idle if other is not wire]
        sent = self._under_way.pop(wire, None)
        if sent is None:
            return  # an idle connection may be closed
        self._count("lost", sent.due, f"{sent.item.name}: {broken}", now)
        if self._plan.rate is None and now < self._until:
            self._waiting.append(now)

    def _counts_in(self, due: float, now: float) -> bool:
        """Whether a request counts: in the open loop by when it was due, in the closed loop by when it ended."""
        return self._in_time(due if self._plan.rate is not None else now)

    def _in_time(self, moment: float) -> bool:
        return self._from <= moment < self._until

    def _count(self, verdict: Verdict, due: float, fault: str, now: float) -> None:
        # Wrong answers count at any time, the others only within the counted seconds.
        if self._counts_in(due, now) or verdict in ("wrong", "failed", "lost"):
            self._counts[verdict] += 1
            if fault and verdict != "rejected" and len(self._faults) < _MOST_FAULTS:
                self._faults.append(f"{verdict}: {fault}")

    def _drain(self) -> None:
        """Wait for sent requests, and send those that were due."""
        end = time.perf_counter() + self._plan.timeout_s
        while (self._under_way or (self._waiting and self._plan.rate is not None)) and time.perf_counter() < end:
            if self._plan.rate is not None:
                self._send(time.perf_counter())
            self._wait(0.05)
        now = time.perf_counter()
        for due in self._waiting if self._plan.rate is not None else ():
            self._count("lost", due, "it could not be sent when it was due", now)
        for wire in list(self._under_way):
            self._drop(wire, BrokenWireError("no answer when the run ended"), now)

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()


def generate(plan: Plan, workload: Workload) -> Result:
    """Send a workload as planned, in this thread, until the time is over and all is answered.

    Raises:
        UserError: the address is invalid.
    """
    return _Run(plan, workload).run()
