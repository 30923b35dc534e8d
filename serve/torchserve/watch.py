"""Watches a starting TorchServe until every model answers, and says what it died of when one does not."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from PIL import Image

from serve.client import Client, ServerError
from serve.runtime.errors import PipelineError

CONSOLE_LOG = "console.log"

_POLL_S = 0.25
_LINES = 12

# TorchServe's thread names: W-9000-resnet18-ptq_1.0, with -stdout or -stderr for what the worker wrote.
_STOPPED = re.compile(r" W-\d+-(?P<model>\S+)_[\w.]+ \S+ - \S+ State change \S+ -> WORKER_STOPPED")
_REFUSED = re.compile(r"Failed to load model: (?P<model>\S+)")
_WRITTEN = r"^\S+ \[\w+ *\] W-\d+-{model}_[\w.]+-std(?:out|err) \S+ - (?P<text>.*)$"
_NOISE = re.compile(
    r"s_name_part|Listening on|\[PID\]|Torch worker started|Python runtime|Connection accepted"
    r"|Successfully loaded|model_name: .* batchSize|\[METRICS\]|Warning: |^ *warnings\.warn\("
)
# The worker's own words for what happened, not TorchServe's "500 - Unknown exception" around them.
_CAUSE = re.compile(r"^ *(?P<cause>[\w.]*(?:Error|Exception): (?!\d+ - ).{1,300})", re.MULTILINE)


class StartError(PipelineError):
    """TorchServe, or one of its workers, did not come up."""


def wait_until_ready(
    process: psutil.Process,
    client: Client,
    logs: Path,
    models: Sequence[str],
    *,
    deadline_s: float,
    on_ready: Callable[[str], None] = lambda model: None,
) -> None:
    """Return when each model has all its workers loaded and has answered one real prediction.

    TorchServe restarts a worker that dies while it loads, again and again for minutes; here its first
    death is the end.

    Args:
        process: TorchServe's Java process.
        client: a client of it.
        logs: the folder of its logs.
        models: names of the models that must answer.
        deadline_s: seconds until the wait is given up.
        on_ready: called with each model's name when it answers.

    Raises:
        StartError: the server or a worker died, or time is up; the message has the last lines it wrote.
    """
    until = time.monotonic() + deadline_s
    image = _small_image()
    waiting = list(models)
    while waiting:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise StartError(f"TorchServe ended while it started:\n{_tail(logs / CONSOLE_LOG)}")
        _raise_if_worker_died(logs)
        for model in list(waiting):
            if _is_loaded(client, model):
                _check_answer(client, model, image)
                waiting.remove(model)
                on_ready(model)
        if waiting and time.monotonic() > until:
            raise StartError(
                f"{', '.join(waiting)}: not ready after {deadline_s:.0f} s; last lines of the worker:\n"
                f"{worker_lines(logs, waiting[0]) or _tail(logs / CONSOLE_LOG)}"
            )
        time.sleep(_POLL_S if waiting else 0)


def worker_lines(logs: Path, model: str, count: int = _LINES) -> str:
    """The last lines that a model's workers wrote, without TorchServe's prefixes, indented."""
    written = re.compile(_WRITTEN.format(model=re.escape(model)))
    matches = (written.match(line) for line in _read(logs / "model_log.log").splitlines())
    lines = [match["text"] for match in matches if match and not _NOISE.search(match["text"])]
    return "\n".join(f"    {line}" for line in lines[-count:])


def _is_loaded(client: Client, model: str) -> bool:
    try:
        workers = client.workers(model)
    except ServerError:
        return False  # the port is not open yet, or the model is not registered yet
    return bool(workers) and all(worker["status"] == "READY" for worker in workers)


def _check_answer(client: Client, model: str, image: bytes) -> None:
    try:
        client.predict(model, image, k=1)
    except ServerError as error:
        raise StartError(f"{model} has loaded but does not answer: {error}") from None


def _raise_if_worker_died(logs: Path) -> None:
    log = _read(logs / "ts_log.log")
    if refused := _REFUSED.search(log):
        following = log[refused.start() :].splitlines()[:3]
        raise StartError("TorchServe refuses an archive:\n" + "\n".join(f"    {line}" for line in following))
    if stopped := _STOPPED.search(log):
        time.sleep(1.0)  # what the worker wrote last is read by another thread
        model = stopped["model"]
        lines = worker_lines(logs, model) or "    (nothing: it was killed, or ran out of memory)"
        causes = _CAUSE.findall(worker_lines(logs, model, count=200))
        cause = f" ({causes[-1]})" if causes else ""
        raise StartError(f"the worker of {model} died while it loaded{cause}; it wrote:\n{lines}")


def _small_image() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), (127, 127, 127)).save(stream, "PNG")
    return stream.getvalue()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _tail(path: Path, count: int = _LINES) -> str:
    return "\n".join(f"    {line}" for line in _read(path).splitlines()[-count:])
