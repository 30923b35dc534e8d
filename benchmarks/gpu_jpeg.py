"""From JPEG bytes to JSON as it is served, with every decoder of the runtime; a part of `benchmarks.gpu`."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_http import SERVERS, Ask, Classes, ask_over_http, best_class
from benchmarks.gpu_subjects import Subject, jpegs
from benchmarks.gpu_ways import Unavailable
from serve.runtime.card.budget import Budget
from serve.runtime.card.card import Preprocessing, load_card
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import SERVING_FILE, Serving
from serve.runtime.decoders.base import CPU, Decoder, open_decoder
from serve.runtime.engines.base import execution_id, unavailable
from serve.runtime.errors import PipelineError, Refusal, first_line
from serve.runtime.images.headers import read_header
from serve.runtime.service.image_loading import load_items
from serve.runtime.service.pending_request import Answered
from serve.runtime.service.protocol import answer, parse
from serve.runtime.service.service import Service, open_service

_TOP = 5
_MOST_BATCH = 128
_COMPARED = 64  # images that pixels and answers are compared on, or as many as the networks are

# What every decoder feeds: the first of these that works here.
_ENGINES = ("torch-cudagraph", "exported")


@dataclass(frozen=True)
class Pixels:
    """How far prepared images are from those of the runtime's own decoder, in levels of 255."""

    mean: float
    most: int


#: Where requests are answered, by the word for it in the tables.
PLACES = ("in process", *SERVERS)


def measure_jpeg(
    subject: Subject,
    device: torch.device,
    *,
    clients: Sequence[int],
    seconds: float,
    names: Sequence[str],
    places: Sequence[str],
    processes: int = 1,
    done: Callable[[str], bool],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure what is served, with decoders, in process and over HTTP.

    Args:
        subject: the network.
        device: where it runs.
        clients: requests of one image that are under way at once.
        seconds: for each figure.
        names: of decoders.
        places: of `PLACES`.
        processes: of our own server.
        done: whether a key was measured before.

    Yields:
        A key ``where, decoder|clients``, and images a second, latencies, the share of top-1 classes that are those of
        the runtime's own decoder in process, and how far pixels are from that one's; or why there are none.
    """
    work = subject.work / "jpeg"
    compared = min(_COMPARED, len(subject.wanted))
    files = jpegs(subject, max(compared, *clients))
    wanted: list[int] | None = None
    # The runtime's own decoder in process comes first, asked for or not: the others' answers are compared with its.
    for name, where in dict.fromkeys(((CPU, PLACES[0]), *product(names, places))):
        together = processes if SERVERS.get(where) == "own" else 1
        told_where = where if together == 1 else f"{where} of {together} processes"
        keys = {count: f"{told_where}, {name}|{count}" for count in clients}
        if wanted is not None and all(map(done, keys.values())):
            continue
        failed = ""
        try:
            decoder = open_decoder(name, device)
            pixels = difference(files[:compared], decoder, subject.preprocessing)
            folder, execution = served(subject, device, name, max(clients), work / f"{where} {name}")
            inside = where == PLACES[0]
            opened = in_process(folder, device) if inside else ask_over_http(where, folder, device, together)
            with opened as (ask, classes):
                top = classes(files[:compared])
                wanted = wanted or top
                told = {
                    "network": execution,
                    "top1": float(np.mean([one == other for one, other in zip(top, wanted, strict=True)])),
                    "pixels_mean": pixels.mean,
                    "pixels_max": pixels.most,
                }
                for count, key in keys.items():
                    if not done(key):
                        yield key, {**ask(files, count, seconds), **told}
        except (Unavailable, PipelineError, ImportError) as error:
            failed = str(error)
        except Exception as error:  # noqa: BLE001 - whatever one decoder does, the others are measured
            failed = f"{type(error).__name__}: {first_line(error)}"
        if failed:
            yield from ((key, {"failed": failed}) for key in keys.values() if not done(key))


def served(subject: Subject, device: torch.device, decoder: str, most: int, folder: Path) -> tuple[Path, str]:
    """An artifact folder with its ``serving.json``, strict: what does not work is not replaced; and what runs it.

    Raises:
        Unavailable: no engine for the device works here.
    """
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    reasons = [(engine, unavailable(engine, device.type)) for engine in _ENGINES]
    engine = next((engine for engine, reason in reasons if reason is None), None)
    if engine is None:
        raise Unavailable("; ".join(f"{engine}: {reason}" for engine, reason in reasons))
    batch = min(_MOST_BATCH, 1 << max(0, most - 1).bit_length())
    buckets = tuple(1 << power for power in range(batch.bit_length())) if engine == "torch-cudagraph" else ()
    execution = Execution(engine, device.type, buckets=buckets)
    serving = Serving((execution,), strict=True, batch_size=batch, decoder=decoder, queue_limit=2 * most + batch)
    shutil.copytree(subject.artifact("exported_program", dtype), folder, dirs_exist_ok=True)
    (folder / SERVING_FILE).write_text(serving.text, encoding="utf-8")
    named = execution_id(Execution(engine, device.type))
    return folder, f"{named}, {load_card(folder).precision}, batches to {batch}"


def difference(files: Sequence[bytes], decoder: Decoder | None, preprocessing: Preprocessing) -> Pixels:
    """How far the prepared images of a decoder are from those of the runtime's own, which is None here."""
    budget = Budget()
    headers = [read_header(data, budget) for data in files]
    images = [
        [entry.image for entry in load_items(files, preprocessing, budget, headers, one)] for one in (None, decoder)
    ]
    total, most, count = 0.0, 0, 0
    for own, found in zip(*images, strict=True):
        if isinstance(own, Refusal) or isinstance(found, Refusal):
            raise PipelineError("an image of the benchmark was refused")
        apart = (own.pixels.to(torch.int16) - found.pixels.cpu().to(torch.int16)).abs()
        total, most, count = total + float(apart.sum()), max(most, int(apart.max())), count + apart.numel()
    return Pixels(total / count, most)


@contextmanager
def in_process(folder: Path, device: torch.device) -> Iterator[tuple[Ask, Classes]]:
    """The service that every server holds, without a server: what asks it, and what gives images' best classes."""
    with open_service(folder, (device.index or 0) if device.type == "cuda" else None) as service:
        inside = _InProcess(service)
        yield inside.ask, inside.classes


class _InProcess:
    """Request bytes to JSON bytes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._task = service.predictor.task

    def _submit(self, data: bytes, done: Callable[[int, bytes], None]) -> None:
        parameters = {"body": data, "k": str(_TOP)}
        request = parse(parameters, self._task, self._service.serving, says_json=False, request_type="image/jpeg")

        def answered(future: Future[Answered]) -> None:
            try:
                reply = answer(self._task, request, future.result().outcomes)
                done(reply.status, reply.body)
            except Exception as error:  # noqa: BLE001 - nobody else would hear of it
                done(500, str(error).encode())

        self._service.submit(request).add_done_callback(answered)

    def classes(self, files: Sequence[bytes]) -> list[int]:
        found: dict[int, tuple[int, bytes]] = {}
        for number, data in enumerate(files):
            came = threading.Event()

            def done(status: int, body: bytes, number: int = number, came: threading.Event = came) -> None:
                found[number] = status, body
                came.set()

            self._submit(data, done)
            came.wait()
        return [best_class(*found[number]) for number in range(len(files))]

    def ask(self, files: Sequence[bytes], clients: int, seconds: float) -> dict[str, Any]:
        self._round(files, clients, seconds / 4)  # warms up
        latencies, elapsed = self._round(files, clients, seconds)
        return {
            "images_s": len(latencies) / elapsed,
            "p50_ms": float(np.percentile(latencies, 50)),
            "p99_ms": float(np.percentile(latencies, 99)),
        }

    def _round(self, files: Sequence[bytes], clients: int, seconds: float) -> tuple[list[float], float]:
        """Milliseconds of each request, ``clients`` of them under way at once; and the seconds that all of it took.

        Each file is asked at least once, however short the time.
        """
        free, latencies, faults = threading.Semaphore(clients), list[float](), list[str]()
        begun = time.perf_counter()
        number = 0
        while time.perf_counter() - begun < seconds or number < max(len(files), 2 * clients):
            free.acquire()
            sent = time.perf_counter()

            def done(status: int, body: bytes, sent: float = sent) -> None:
                latencies.append((time.perf_counter() - sent) * 1e3)
                if status != 200:
                    faults.append(f"{status}: {body[:120]!r}")
                free.release()

            self._submit(files[number % len(files)], done)
            number += 1
        for _ in range(clients):
            free.acquire()
        if faults:
            raise PipelineError(f"{len(faults)} of {number} requests failed, {faults[0]}")
        return latencies, time.perf_counter() - begun
