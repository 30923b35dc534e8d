"""An archive's runtime without a server, in a process of its own: bytes to JSON, one after the other or pipelined.

Reads lines of JSON, ``{"clients": N, "seconds": S}``, and answers each with what it found.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from serve.load.answer_check import GOOD, Checker
from serve.load.histogram import Histogram
from serve.load.workload import Item, Workload
from serve.runtime.card.serving import Serving
from serve.runtime.service.execution_chain import open_served
from serve.runtime.service.pending_request import Answered
from serve.runtime.service.protocol import Request, answer, parse
from serve.runtime.service.service import open_service
from serve.runtime.tasks.base import Task


class _Tally:
    """What came back. ``take`` may be called by several threads."""

    def __init__(self, workload: Workload) -> None:
        self.lock = threading.Lock()
        self.checker = Checker(workload.task, workload.tolerance)
        self.latency, self.stages, self.bad, self.until = Histogram(), dict[str, float](), 0, 0.0
        self.faults: list[str] = []

    def take(self, item: Item, begun: float, status: int, body: bytes, stages: dict[str, float]) -> None:
        now = time.perf_counter()
        with self.lock:
            verdict, fault = self.checker.check(item, status, body)
            if verdict not in GOOD:
                self.bad += 1
                self.faults = [*self.faults, f"{item.name}: {fault}"][:4]
            elif now < self.until:
                self.latency.add((now - begun) * 1e3)
                for name, value in stages.items():
                    self.stages[name] = self.stages.get(name, 0.0) + value

    def found(self, seconds: float, cpu_s: float) -> dict[str, Any]:
        count = len(self.latency)
        return {
            "throughput": count / seconds,
            "latency": self.latency.to_json(),
            "stages": {name: value / count for name, value in self.stages.items()} if count else {},
            "cpu_s": cpu_s,
            "bad": self.bad,
            "faults": self.faults,
        }


def _request(item: Item, task: Task, serving: Serving) -> Request:
    return parse({"body": item.body}, task, serving, says_json=False, request_type=item.content_type)


def _serial(folder: Path) -> Callable[[list[Item], int, float, _Tally], None]:
    predictor, serving = open_served(folder, None)
    task = predictor.task

    def run(items: list[Item], clients: int, until: float, tally: _Tally) -> None:
        number = 0
        while (begun := time.perf_counter()) < until:
            item = items[number % len(items)]
            number += 1
            request = _request(item, task, serving)
            images = [image for image in request.images if isinstance(image, bytes)]
            reply = answer(task, request, predictor.predict(images, request.options))
            tally.take(item, begun, reply.status, reply.body, {})

    return run


def _pipelined(folder: Path) -> Callable[[list[Item], int, float, _Tally], None]:
    service = open_service(folder, None)
    task = service.predictor.task

    def run(items: list[Item], clients: int, until: float, tally: _Tally) -> None:
        free = threading.Semaphore(clients)

        def send(item: Item) -> None:
            begun, request = time.perf_counter(), _request(item, task, service.serving)

            def done(future: Future[Answered]) -> None:
                found = future.result()
                reply = answer(task, request, found.outcomes)
                tally.take(item, begun, reply.status, reply.body, vars(found.stages))
                free.release()

            service.submit(request).add_done_callback(done)

        number = 0
        while time.perf_counter() < until:
            free.acquire()
            send(items[number % len(items)])
            number += 1
        for _ in range(clients):
            free.acquire()

    return run


def main() -> int:
    """``python -m benchmarks.serve_in_process serial|pipelined ARCHIVE SCRATCH``."""
    way, archive, scratch = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(scratch)
    run = (_serial if way == "serial" else _pipelined)(scratch)
    workloads: dict[str, Workload] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        workload = workloads.setdefault(job["workload"], Workload.load(Path(job["workload"])))
        items = list(workload.items)
        warm = _Tally(workload)
        run(items, job["clients"], time.perf_counter() + job["warm_s"], warm)
        tally = _Tally(workload)
        cpu, begun = time.process_time(), time.perf_counter()
        tally.until = begun + job["seconds"]
        run(items, job["clients"], tally.until, tally)
        print(json.dumps(tally.found(job["seconds"], time.process_time() - cpu)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
