"""The servers themselves, asked over HTTP by the load generator; a part of `benchmarks.gpu` that needs all that serves.

Where that is not installed, or a server does not come up, it says so by `ImportError` or `PipelineError`.
"""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from serve.load.generator_process import measure
from serve.load.plan import Plan, Target
from serve.load.workload import Item, Workload
from serve.runtime.card.card import read_card
from serve.runtime.card.serving import read_serving
from serve.runtime.errors import PipelineError

#: Servers by the word for them in the tables.
SERVERS: dict[str, Literal["own", "torchserve"]] = {"own server": "own", "TorchServe": "torchserve"}

#: Images, requests at once and seconds to a figure.
Ask = Callable[[Sequence[bytes], int, float], dict[str, Any]]

#: Images to the indices of their best classes.
Classes = Callable[[Sequence[bytes]], list[int]]

_TIMEOUT_S = 60.0


@contextmanager
def ask_over_http(where: str, folder: Path, device: torch.device, processes: int = 1) -> Iterator[tuple[Ask, Classes]]:
    """A running server of an artifact: what asks it for a figure, and for the best classes of images.

    Args:
        where: of `SERVERS`.
        folder: of the artifact, with its ``serving.json``.
        device: where it runs; a server takes the first GPU.
        processes: of our own server.

    Raises:
        ImportError: what serves is not installed.
        PipelineError: the server does not come up.
    """
    from serve.tune.servers import pack, serving

    if device.index:
        raise PipelineError(f"servers take the first GPU, not {device}: set CUDA_VISIBLE_DEVICES")
    told, task = read_serving(folder), read_card(folder).task
    assert told is not None
    with tempfile.TemporaryDirectory(prefix="bench-gpu-http-") as scratch:
        archive = pack(folder, told, Path(scratch), "measured")
        gpus = None if device.type == "cuda" else 0
        kind, archives = SERVERS[where], {"measured": archive}
        with serving(kind, archives, Path(scratch), told.queue_limit, gpus=gpus, processes=processes) as live:

            def ask(files: Sequence[bytes], clients: int, seconds: float) -> dict[str, Any]:
                items = tuple(Item(str(number), data, "image/jpeg") for number, data in enumerate(files))
                workload = Workload(items, task).save(Path(scratch) / f"workload-{clients}")
                plan = Plan(live.target, clients, seconds=seconds, warm_s=seconds / 4, timeout_s=_TIMEOUT_S)
                found = measure(plan, workload)
                if bad := found.bad + found.counts.get("rejected", 0):
                    raise PipelineError(f"{bad} requests failed, {next(iter(found.faults), '')}")
                return {
                    "images_s": found.throughput,
                    "p50_ms": found.latency.percentile(50),
                    "p99_ms": found.latency.percentile(99),
                    "load_cpu": found.cpu_s / found.seconds,
                }

            yield ask, lambda files: [best_class(*_post(live.target, data)) for data in files]


def best_class(status: int, body: bytes) -> int:
    """The index of the best class of an answer.

    Raises:
        PipelineError: it is none.
    """
    if status != 200:
        raise PipelineError(f"an image was answered with status {status}: {body[:120]!r}")
    return int(json.loads(body)[0]["index"])


def _post(target: Target, data: bytes) -> tuple[int, bytes]:
    headers = {"Content-Type": "image/jpeg", **target.headers}
    request = urllib.request.Request(f"http://{target.address}{target.path}", data, headers)
    # Whatever proxies the environment names, the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as came:
            return came.status, came.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
