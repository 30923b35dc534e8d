"""The ways to serve an artifact that are tried: one setting after the other, each from the best of those before."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve.runtime.engines.base import execution_id
from serve.runtime.serving import DECODING_THREADS, Serving
from serve.tune.servers import ServerKind


@dataclass(frozen=True)
class Stage:
    """One setting: its name, and what it may be where the others are as given."""

    name: str
    variants: Callable[[Serving], Sequence[Serving]]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def stages(usual: Serving, most_cores: int | None = None) -> tuple[Stage, ...]:
    """What is tried, in order: what decides most comes first.

    Args:
        usual: how the artifact is served now; its executions are those that are tried.
        most_cores: None: those of this process.
    """
    limit = most_cores or cores()
    counts = sorted({*(1 << power for power in range(limit.bit_length()) if 1 << power <= limit), limit})

    def all_of(count: int) -> int | None:
        return None if count == limit else count  # as it is said elsewhere: one for each core

    def engines(base: Serving) -> list[Serving]:
        tried = []
        for execution in usual.executions:
            others = [other for other in usual.executions if other != execution]
            if execution.device_type != "cpu":
                tried.append(dataclasses.replace(base, executions=(execution, *others)))
                continue
            for threads in counts:
                first = dataclasses.replace(execution, threads=all_of(threads))
                tried.append(dataclasses.replace(base, executions=(first, *others)))
        return tried

    def field(name: str, values: Iterable[int | None]) -> Callable[[Serving], list[Serving]]:
        return lambda base: [_with(base, name, value) for value in values]

    usually = min(limit, DECODING_THREADS)  # what None is
    decoding = sorted({*counts, usually})
    return (
        Stage("engine and its threads", engines),
        Stage("workers", field("workers", counts)),
        Stage("decode threads", field("decode_threads", [None if count == usually else count for count in decoding])),
        Stage("batch size", field("batch_size", (1, 4, 8, 16, 32))),
        Stage("batch delay", field("max_batch_delay_ms", (1, 2, 5))),
    )


def _with(base: Serving, name: str, value: Any) -> Serving:
    return dataclasses.replace(base, **{name: value})


def told(serving: Serving, kind: ServerKind = "own") -> str:
    """A way to serve by a server, in one line.

    Of several workers each has the threads that are told: of those that nobody counts, TorchServe's one for each core,
    our own server's one for each core of its share.
    """
    execution = serving.executions[0]
    share = max(1, cores() // serving.workers) if kind == "own" else cores()
    words = [
        f"{execution_id(execution)} x{execution.threads or share}",
        f"decode x{serving.decode_threads or min(share, DECODING_THREADS)}",
        f"batch {serving.batch_size}",
        f"{serving.max_batch_delay_ms} ms",
    ]
    return ", ".join([*words, *([f"{serving.workers} workers"] if serving.workers > 1 else [])])
