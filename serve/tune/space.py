"""The ways to serve an artifact that are tried: one setting after the other, each from the best of those before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving, decoders_for
from serve.runtime.decoders.base import open_decoder
from serve.runtime.device.cores import cores
from serve.runtime.engines.base import execution_id, unavailable
from serve.runtime.errors import PipelineError
from serve.tune.servers import ServerKind


@dataclass(frozen=True)
class Stage:
    """One setting: its name, and what it may be where the others are as given."""

    name: str
    variants: Callable[[Serving], Sequence[Serving]]


def share(kind: ServerKind, serving: Serving, most_cores: int) -> int:
    """Cores that each worker has: of our own server's an equal part of them, of TorchServe's all."""
    return max(1, most_cores // serving.workers) if kind == "own" else most_cores


def runs_here(serving: Serving) -> Execution:
    """The execution that runs on this machine: the first whose engine works here; where none does, the first."""
    found = (entry for entry in serving.executions if unavailable(entry.engine, entry.device_type) is None)
    return next(found, serving.executions[0])


def certain(way: Serving) -> Serving:
    """A way that is served as it is told or not at all: nothing takes the place of an engine or a decoder that fails.

    Where the machine has not even what it names first, it stays as it is: something else is meant to be served by.
    """
    first = way.executions[0]
    try:
        if runs_here(way) == first:
            open_decoder(way.decoder, torch.device(first.device_type))
            return dataclasses.replace(way, strict=True)
    except PipelineError:
        pass
    return way


def stages(kind: ServerKind, usual: Serving, most_cores: int | None = None) -> tuple[Stage, ...]:
    """What is tried, in order: what decides most comes first.

    Args:
        kind: which server.
        usual: how the artifact is served now; those of its executions are tried whose engines work here.
        most_cores: None: those of this process.
    """
    limit = most_cores or cores()
    counts = sorted({*(1 << power for power in range(limit.bit_length()) if 1 << power <= limit), limit})

    def all_of(count: int) -> int | None:
        return None if count == limit else count  # as it is said elsewhere: one for each core

    def engines(base: Serving) -> list[Serving]:
        tried = []
        for execution in usual.executions:
            if unavailable(execution.engine, execution.device_type) is not None:
                continue
            others = [other for other in usual.executions if other != execution]
            if execution.device_type != "cpu":
                tried.append(dataclasses.replace(base, executions=(execution, *others)))
                continue
            for threads in counts:
                first = dataclasses.replace(execution, threads=all_of(threads))
                tried.append(dataclasses.replace(base, executions=(first, *others)))
        return tried

    def workers(base: Serving) -> list[Serving]:
        first, *others = base.executions
        tried = []
        for count in counts:
            way = dataclasses.replace(base, workers=count)
            if first.threads is not None and first.threads > (most := max(1, limit // count)):
                # As many as were best of one that has all cores: more than each of several has.
                way = dataclasses.replace(way, executions=(dataclasses.replace(first, threads=most), *others))
            tried.append(way)
        return tried

    def decode_threads(base: Serving) -> list[Serving]:
        usually = decoders_for(share(kind, base, limit))  # what None is
        return [
            dataclasses.replace(base, decode_threads=None if count == usually else count)
            for count in sorted({*counts, usually})
        ]

    return (
        Stage("engine and its threads", engines),
        Stage("workers", workers),
        Stage("decode threads", decode_threads),
        Stage("batch size", lambda base: [dataclasses.replace(base, batch_size=size) for size in (1, 4, 8, 16, 32)]),
        Stage("batch delay", lambda base: [dataclasses.replace(base, max_batch_delay_ms=ms) for ms in (1, 2, 5)]),
    )


def describe(serving: Serving, kind: ServerKind = "own") -> str:
    """A way to serve by a server, in one line: what runs here, and of several workers the threads of each."""
    execution = runs_here(serving)
    if kind == "own":  # which has no more than a core for each
        serving = dataclasses.replace(serving, workers=min(serving.workers, cores()))
    each = share(kind, serving, cores())
    words = [
        f"{execution_id(execution)} x{execution.threads or each}",
        f"decode x{serving.decode_threads or decoders_for(each)}",
        f"batch {serving.batch_size}",
        f"{serving.max_batch_delay_ms} ms",
    ]
    return ", ".join([*words, *([f"{serving.workers} workers"] if serving.workers > 1 else [])])
