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


def stages(kind: ServerKind, usual: Serving, most_cores: int | None = None) -> tuple[Stage, ...]:
    """What is tried, in order: what decides most comes first.

    Args:
        kind: our own server has one process; TorchServe has workers, and no decode threads that were measured to pay
            with several of them.
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
    found = [Stage("engine and its threads", engines)]
    if kind == "torchserve":
        found.append(Stage("workers", field("workers", counts)))
    found += [
        Stage("decode threads", field("decode_threads", [*(count for count in counts if count < usually), None])),
        Stage("batch size", field("batch_size", (1, 4, 8, 16, 32))),
        Stage("batch delay", field("max_batch_delay_ms", (1, 2, 5))),
    ]
    return tuple(found)


def _with(base: Serving, name: str, value: Any) -> Serving:
    return dataclasses.replace(base, **{name: value})


def told(serving: Serving) -> str:
    """A way to serve, in one line."""
    execution = serving.executions[0]
    words = [
        f"{execution_id(execution)} x{execution.cores}",
        f"decode x{serving.decoding_threads}",
        f"batch {serving.batch_size}",
        f"{serving.max_batch_delay_ms} ms",
    ]
    return ", ".join([*words, *([f"{serving.workers} workers"] if serving.workers > 1 else [])])
