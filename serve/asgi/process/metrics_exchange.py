"""Metrics that the processes of one server exchange, each at a unix socket that only this user can open.

Who scrapes the server reaches any one of them, and is to be told of all.
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

#: The label by which the series of the processes are told apart: 0, 1 …
PROCESS = "process"

_ANSWER_S = 1.0


class MetricsExchange:
    """The processes that serve together, as one of them sees them. Used in its event loop.

    Args:
        folder: where each has a socket; nobody else can enter it.
        number: of this process, from 0.
        count: of all.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        # By a descriptor of the folder, whatever its length: a unix socket's path has 107 bytes (unix(7)).
        self._descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        self._number = number
        self._count = count
        self._server: asyncio.Server | None = None

    async def listen(self, tell: Callable[[], Iterable[Metric]]) -> None:
        """Tell the others from now on what ``tell`` gives."""
        path = self._socket(self._number)
        path.unlink(missing_ok=True)  # of the process that this one replaces

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):  # who asked did not wait for so long
                writer.write(_written(tell()))
                await writer.drain()
            writer.close()

        self._server = await asyncio.start_unix_server(answer, path)

    async def close(self) -> None:
        """Tell them nothing more."""
        if self._server is not None:
            self._server.close()
            self._socket(self._number).unlink(missing_ok=True)
        os.close(self._descriptor)

    async def gather(self, own: Iterable[Metric]) -> list[Metric]:
        """The metrics of all processes, each series with the number of its process.

        A process that does not answer within a second has none; ``serve_process_up`` says so.

        Args:
            own: of this one.
        """
        numbers = [number for number in range(self._count) if number != self._number]
        answers = await asyncio.gather(*map(self._ask, numbers))
        told = {self._number: list(own)} | dict(zip(numbers, answers, strict=True))
        up = GaugeMetricFamily("serve_process_up", "1: the process answered for itself", labels=(PROCESS,))
        families: dict[str, Metric] = {up.name: up}
        for number in sorted(told):
            found = told[number]
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
                    return _read(await reader.read())
                finally:
                    writer.close()
        except (OSError, ValueError):  # it is being started, or ends
            return None

    def _socket(self, number: int) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}/{number}.sock")


def _written(metrics: Iterable[Metric]) -> bytes:
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


def _read(written: bytes) -> list[Metric]:
    found = []
    for name, documentation, kind, unit, samples in json.loads(written):
        metric = Metric(name, documentation, kind, unit)
        for sample, labels, value in samples:
            metric.add_sample(sample, labels, value)
        found.append(metric)
    return found
