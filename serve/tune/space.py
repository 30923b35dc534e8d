"""The serving settings to try: one setting after the other, each from the best of those before."""

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
    """One setting: its name, and its possible values for given other settings."""

    name: str
    variants: Callable[[Serving], Sequence[Serving]]


def share(kind: ServerKind, serving: Serving, most_cores: int) -> int:
    """Return the cores of each worker: an equal part for the own server's, all for TorchServe's."""
    return max(1, most_cores // serving.workers) if kind == "own" else most_cores


def runs_here(serving: Serving) -> Execution:
    """Return the execution for this machine: the first whose engine works here, or else the first."""
    found = (entry for entry in serving.executions if unavailable(entry.engine, entry.device_type) is None)
    return next(found, serving.executions[0])


def certain(way: Serving) -> Serving:
    """Return settings without a fallback for a failing engine or decoder.

    If the first execution does not even run here, the settings stay unchanged: another one is meant to serve.
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
    """Return the stages in order: the most important first.

    Args:
        kind: which server.
        usual: the artifact's present settings. Those of its executions are tried whose engines work here.
        most_cores: number of cores. None: this process's.
    """
    limit = most_cores or cores()
    counts = sorted({*(1 << power for power in range(limit.bit_length()) if 1 << power <= limit), limit})

    def all_of(count: int) -> int | None:
        return None if count == limit else count  # None, as elsewhere: one for each core

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
                # The best number for one worker with all cores is more than each of several has.
                way = dataclasses.replace(way, executions=(dataclasses.replace(first, threads=most), *others))
            tried.append(way)
        return tried

    def decode_threads(base: Serving) -> list[Serving]:
        usually = decoders_for(share(kind, base, limit))  # the meaning of None
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
    """Describe the settings of a server in one line: the execution here, and the threads of each worker."""
    execution = runs_here(serving)
    if kind == "own":  # it has at most one process for each core
        serving = dataclasses.replace(serving, workers=min(serving.workers, cores()))
    each = share(kind, serving, cores())
    words = [
        f"{execution_id(execution)} x{execution.threads or each}",
        f"decode x{serving.decode_threads or decoders_for(each)}",
        f"batch {serving.batch_size}",
        f"{serving.max_batch_delay_ms} ms",
    ]
    return ", ".join([*words, *([f"{serving.workers} workers"] if serving.workers > 1 else [])])
