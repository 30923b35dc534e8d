"""Exchange of metrics between the processes of one server, over unix sockets that only this user can open.

A scrape reaches any one of the processes and must return the metrics of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

#: The label for the number of the process: 0, 1 …
PROCESS = "process"

_ANSWER_S = 1.0


class MetricsExchange:
    """The processes of one server, seen from one of them. Use it in its event loop.

    Args:
        folder: where each process has a socket. Nobody else can enter it.
        number: number of this process, from 0.
        count: number of processes.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        # A descriptor of the folder keeps the path short: a unix socket's path has at most 107 bytes (unix(7)).
        self._descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        self._number = number
        self._count = count
        self._server: asyncio.Server | None = None

    async def listen(self, tell: Callable[[], Iterable[Metric]]) -> None:
        """Send the metrics that ``tell`` returns to any process that asks, from now on."""
        path = self._socket(self._number)
        path.unlink(missing_ok=True)  # of the process that this one replaces

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):  # the other process has timed out
                writer.write(_to_json(tell()))
                await writer.drain()
            writer.close()

        self._server = await asyncio.start_unix_server(answer, path)

    async def close(self) -> None:
        """Stop answering the other processes."""
        if self._server is not None:
            self._server.close()
            self._socket(self._number).unlink(missing_ok=True)
        os.close(self._descriptor)

    async def gather(self, own: Iterable[Metric]) -> list[Metric]:
        """Return the metrics of all processes. Each series has the number of its process.

        A process that does not answer within a second has no metrics. ``serve_process_up`` shows it.

        Args:
            own: metrics of this process.
        """
        numbers = [number for number in range(self._count) if number != self._number]
        answers = await asyncio.gather(*map(self._ask, numbers))
        by_process = {self._number: list(own)} | dict(zip(numbers, answers, strict=True))
        up = GaugeMetricFamily("serve_process_up", "1 if the process reported its own metrics", labels=(PROCESS,))
        families: dict[str, Metric] = {up.name: up}
        for number in sorted(by_process):
            found = by_process[number]
            up.add_metric((str(number),), float(found is not None))
            for metric in found or ():
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
                )
                for sample in metric.samples:
                    family.add_sample(sample.name, {**sample.labels, PROCESS: str(number)}, sample.value)
        return list(families.values())

    async def _ask(self, number: int) -> list[Metric] | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(number))
                try:
                    return _from_json(await reader.read())
                finally:
                    writer.close()
        except (OSError, ValueError):  # the process starts or ends
            return None

    def _socket(self, number: int) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}/{number}.sock")


def _to_json(metrics: Iterable[Metric]) -> bytes:
    return json.dumps(
        [
            (
                metric.name,
                metric.documentation,
                metric.type,
                metric.unit,
                [(sample.name, sample.labels, sample.value) for sample in metric.samples],
            )
            for metric in metrics
        ]
    ).encode()


def _from_json(written: bytes) -> list[Metric]:
    found = []
    for name, documentation, kind, unit, samples in json.loads(written):
        metric = Metric(name, documentation, kind, unit)
        for sample, labels, value in samples:
            metric.add_sample(sample, labels, value)
        found.append(metric)
    return found
