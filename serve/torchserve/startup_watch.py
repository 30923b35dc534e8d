"""Watches a starting TorchServe until every model answers, and reports why one does not."""

from __future__ import annotations

import io
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil
from PIL import Image

from serve.runtime.card.known_answer import KnownAnswer
from serve.runtime.device.cores import cores
from serve.runtime.errors import CardError, PipelineError
from serve.runtime.tasks.base import tasks
from serve.torchserve.client import Client, ServerError

CONSOLE_LOG = "console.log"

#: Called with the elapsed share of a usual start (above 1: it takes longer), and the number of answering models.
Progressed = Callable[[float, str], None]

_POLL_S = 0.25
# Only for the displayed time left. Measured on 2 cores: Java answers after 3 s. A worker imports torch, loads and warms
# up in about 6 s of CPU time, on one core.
_JAVA_S, _WORKER_S = 3.0, 6.0
_LINES = 12

# TorchServe's thread names: W-9000-resnet18-ptq_1.0, with -stdout or -stderr for the worker's output.
_STOPPED = re.compile(r" W-\d+-(?P<model>\S+)_(?P<version>[\d.]+) \S+ - \S+ State change \S+ -> WORKER_STOPPED")
_REFUSED = re.compile(r"Failed to load model: (?P<model>\S+)@(?P<version>[\d.]+)\.mar")
_WRITTEN = r"^\S+ \[\w+ *\] W-\d+-{model}_{version}-std(?:out|err) \S+ - (?P<text>.*)$"
_NOISE = re.compile(
    r"s_name_part|Listening on|\[PID\]|Torch worker started|Python runtime|Connection accepted"
    r"|Successfully loaded|model_name: .* batchSize|\[METRICS\]|Warning: |^ *warnings\.warn\("
)
# The worker's own error, not TorchServe's "500 - Unknown exception" around it.
_CAUSE = re.compile(r"^ *(?P<cause>[\w.]*(?:Error|Exception): (?!\d+ - ).{1,300})", re.MULTILINE)


class StartError(PipelineError):
    """TorchServe, or one of its workers, did not start. ``reason`` is the message without the worker's output."""

    def __init__(self, reason: str, written: str = "") -> None:
        super().__init__(f"{reason}; it wrote:\n{written}" if written else reason)
        self.reason = reason


@dataclass(frozen=True)
class Awaited:
    """The version of a model that must answer, and its known answer if it has one."""

    version: str
    known: KnownAnswer | None = None


@dataclass(frozen=True)
class Log:
    """TorchServe's logs from a point in time. Earlier lines belong to other starts of workers."""

    folder: Path
    before: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_now(cls, folder: Path) -> Self:
        """Return the logs from now on."""
        return cls(folder, {path.name: path.stat().st_size for path in folder.glob("*.log")})

    def read(self, name: str) -> str:
        """Return what was written to a log since then, or all of a log that was started again."""
        try:
            with (self.folder / name).open("rb") as stream:
                before = self.before.get(name, 0)
                stream.seek(before if before <= os.fstat(stream.fileno()).st_size else 0)
                return stream.read().decode("utf-8", "replace")
        except OSError:
            return ""


def wait_until_ready(
    process: psutil.Process,
    client: Client,
    log: Log,
    models: Mapping[str, Awaited],
    *,
    deadline_s: float,
    on_ready: Callable[[str], None] = lambda model: None,
    give_up: Callable[[str, StartError], None] | None = None,
    progressed: Progressed = lambda fraction, message: None,
) -> None:
    """Wait until each model has all its workers loaded and one has answered a real prediction, its known one if any.

    TorchServe restarts a worker that dies while it loads, again and again for minutes. Here its first death fails the
    model.

    Args:
        process: TorchServe's Java process.
        client: a client of it.
        log: its logs, from when the models were registered.
        models: the models that must answer, by name.
        deadline_s: most seconds to wait.
        on_ready: called with each model's name when it answers.
        give_up: called with the name of a model that does not start, and the reason. If it returns, the others are
            waited for. None raises.
        progressed: called repeatedly meanwhile.

    Raises:
        StartError: the server or a worker died, or the time is over. The message has the last lines of output.
    """
    begun = time.monotonic()
    until = begun + deadline_s
    usual_s = _JAVA_S + _WORKER_S * math.ceil(len(models) / cores())
    image = _probe_image()
    waiting = dict(models)

    def drop(model: str, error: StartError) -> None:
        if give_up is None:
            raise error
        del waiting[model]
        give_up(model, error)

    while waiting:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise StartError(f"TorchServe stopped while it was starting:\n{_tail(log.read(CONSOLE_LOG))}")
        for model, error in _failed_models(log, {model: awaited.version for model, awaited in waiting.items()}).items():
            drop(model, error)
        for model, awaited in list(waiting.items()):
            if _is_loaded(client, model, awaited.version):
                if (fault := _fault_of_answer(client, model, awaited, image)) is not None:
                    drop(model, fault)
                    continue
                del waiting[model]
                on_ready(model)
        now = time.monotonic()
        progressed((now - begun) / usual_s, f"{len(models) - len(waiting)} of {len(models)} answer")
        if now > until:
            for model, awaited in list(waiting.items()):
                lines = worker_lines(log, model, awaited.version) or _tail(log.read(CONSOLE_LOG))
                drop(model, StartError(f"{model}: not ready after {deadline_s:.0f} s", lines))
        time.sleep(_POLL_S if waiting else 0)


def worker_lines(log: Log, model: str, version: str, count: int = _LINES) -> str:
    """Return the last lines of a model's workers, without TorchServe's prefixes, indented."""
    written = re.compile(_WRITTEN.format(model=re.escape(model), version=re.escape(version)))
    matches = (written.match(line) for line in log.read("model_log.log").splitlines())
    lines = [match["text"] for match in matches if match and not _NOISE.search(match["text"])]
    return "\n".join(f"    {line}" for line in lines[-count:])


def _is_loaded(client: Client, model: str, version: str) -> bool:
    try:
        workers = client.workers(model, version)
    except ServerError:
        return False  # the port is not open yet, or the model is not registered yet
    return bool(workers) and all(worker["status"] == "READY" for worker in workers)


def _fault_of_answer(client: Client, model: str, awaited: Awaited, image: bytes) -> StartError | None:
    known = awaited.known
    # The archive may have a task of its own, which is not installed here. Its workers check the known answer then.
    task = tasks().get(known.task) if known is not None else None
    try:
        if known is None or task is None:
            client.predict(model, image, version=awaited.version)
        else:
            headers = task.to_headers(task.complete)
            answer = client.predict(model, known.image, headers=headers, version=awaited.version)
            task.check_answer(known, answer)
    except ServerError as error:
        return StartError(f"{model} is loaded but does not answer: {error}")
    except CardError as error:
        return StartError(f"{model} is loaded, but {error}")
    return None


def _failed_models(log: Log, models: Mapping[str, str]) -> dict[str, StartError]:
    """Return the models whose archive was refused or whose worker ended, with the output."""
    text = log.read("ts_log.log")
    found: dict[str, StartError] = {}
    for refused in _REFUSED.finditer(text):
        if models.get(refused["model"]) == refused["version"]:
            following = text[refused.start() :].splitlines()[:3]
            lines = "\n".join(f"    {line}" for line in following)
            found[refused["model"]] = StartError(f"TorchServe refused the archive of {refused['model']}", lines)
    stopped = {match["model"] for match in _STOPPED.finditer(text) if models.get(match["model"]) == match["version"]}
    if stopped - found.keys():
        time.sleep(1.0)  # another thread reads the worker's last lines
    for model in sorted(stopped - found.keys()):
        lines = worker_lines(log, model, models[model]) or "    (no output: it was killed, or ran out of memory)"
        causes = _CAUSE.findall(worker_lines(log, model, models[model], count=200))
        cause = f" ({causes[-1]})" if causes else ""
        found[model] = StartError(f"the worker of {model} died while it was loading{cause}", lines)
    return found


def _probe_image() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), (127, 127, 127)).save(stream, "PNG")
    return stream.getvalue()


def _tail(text: str, count: int = _LINES) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-count:])
