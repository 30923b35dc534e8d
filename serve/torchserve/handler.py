"""The TorchServe adapter: what travels in the archive as ``handler.py``.

It turns TorchServe's batch into one call of the runtime and its outcomes into one answer per request.
It is built on nothing of TorchServe's: ``VisionHandler`` imports captum, which TorchServe 0.12 does not
declare, and ``BaseHandler``'s ONNX branch cannot run a session. TorchServe wants exactly one class here.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

if TYPE_CHECKING:
    from serve.runtime.errors import Refusal
    from serve.runtime.service.logs import RequestLog
    from serve.runtime.service.observation import Observation
    from serve.runtime.service.pending_request import Answered
    from serve.runtime.service.protocol import Request
    from serve.runtime.service.service import Service
    from serve.torchserve.metrics import Metrics

_LOG = logging.getLogger(__name__)

_FOLDER = Path(__file__).resolve().parent

# TorchServe copies the phrase into the status line by its length in characters: ASCII only.
_PHRASES = {
    200: "OK",
    400: "Bad Request",
    413: "Payload Too Large",
    415: "Unsupported Media Type",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}

_K_HEADER = "x-top-k"
_ID_HEADER = "x-request-id"

# As ``Batches.groovy`` writes it: what no client can send as a header, for no header's name may hold a colon.
_WAITED_HEADER = "serve:frontend-ms"

#: Of TorchServe's environment: "1" has each worker write a line of JSON for each request. Our starter sets it.
LOG_VARIABLE = "SERVE_LOG_REQUESTS"

# How long a worker that ends waits for TorchServe to read its last words.
_UNTIL_READ_S = 0.5


def prefer_own_runtime() -> None:
    """Make ``import serve`` find the package that lies beside this file in the archive.

    TorchServe 0.12 puts the caller's PYTHONPATH before the archive's folder, and this project may be
    installed as well: what serves must be what was packed.
    """
    own = _FOLDER / "serve"
    if not (own / "runtime").is_dir():
        return  # imported from the project itself
    sys.path.insert(0, str(_FOLDER))
    loaded = getattr(sys.modules.get("serve"), "__file__", None)
    if loaded is not None and Path(loaded).resolve().parent != own:
        for name in [name for name in sys.modules if name.partition(".")[0] == "serve"]:
            del sys.modules[name]


class ImageClassifierHandler:
    """Serves one artifact; TorchServe makes one of these in each worker process."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._metrics: Metrics | None = None
        self._log: RequestLog | None = None

    def initialize(self, context: Any) -> None:
        """Open the artifact as its ``serving.json`` says, on the GPU that TorchServe assigned if there is one.

        Raises:
            CardError: the archive's files do not match its card, or its known image is not answered as when it was
                measured.
            EngineError: the artifact cannot run here; the worker dies with the reason in its log.
        """
        # Imported here and not above: TorchServe 0.12 takes an ImportError of this module for "no such
        # file" and reports "No module named 'ts.torch_handler.handler'" in place of the cause.
        prefer_own_runtime()
        from serve.runtime.card.known_answer import read_known
        from serve.runtime.service.garbage_collection import freeze_heap
        from serve.runtime.service.logs import silence_pillow
        from serve.runtime.service.self_check import check_known
        from serve.runtime.service.service import open_service
        from serve.torchserve.metrics import Metrics

        silence_pillow()
        _keep_both_images()
        if os.environ.get(LOG_VARIABLE) == "1":
            self._log = _open_log()
        properties = context.system_properties
        folder = Path(properties["model_dir"])
        try:
            with _one_at_a_time(folder.parent):
                self._service = open_service(folder, properties.get("gpu_id"))
                if (known := read_known(folder)) is not None:
                    check_known(self._service, known, folder)
        except Exception as error:
            _say_before_dying(error)
            raise
        self._metrics = Metrics(context, self._service.predictor)
        self._metrics.begin()
        freeze_heap()

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answer a batch of requests, one body for each, with its own status.

        Everything that is one request's fault is that request's answer. An exception that leaves this
        method fails the whole batch with 503 (507 if its text contains "CUDA").

        The worker ends where its device is lost to it, so that TorchServe starts another: as an exception TorchServe
        0.12 would take that for want of memory, and answer 507 for ever.
        """
        from serve.runtime.errors import BrokenError, Refusal
        from serve.runtime.service.protocol import answer, refuse

        begun = time.monotonic()
        asked = [self._parse(parameters, context, index) for index, parameters in enumerate(data)]
        try:
            answers = iter(self._opened().answer_batch([entry for entry in asked if _is_request(entry)]))
        except BrokenError as error:
            self.tell_metrics()
            _end_worker(error)
        answered: list[Answered] = []
        bodies: list[bytes] = []
        for index, entry in enumerate(asked):
            told: Answered | None = None
            if entry is None:
                status, body = 200, json.dumps(self.describe_handle(), allow_nan=False).encode()
            elif isinstance(entry, Refusal):
                status, body = refuse(entry)
            else:
                told = next(answers)
                answered.append(told)
                status, body = answer(entry, told.outcomes)
                # TorchServe's own queue is not in it: `Batches.groovy` puts that before it.
                context.set_response_header(index, "Server-Timing", told.stages.server_timing)
            context.set_response_status(status, _PHRASES.get(status, ""), idx=index)
            context.set_response_content_type(index, "application/json")
            bodies.append(body)
            if self._log is not None:
                self._log(_observed(context, index, entry, answered=told, status=status, begun=begun))
        refused = [_word(entry) for entry in asked if isinstance(entry, Refusal)]
        if self._metrics is not None and (answered or refused):
            self._metrics.add(answered, refused)
        return bodies

    def tell_metrics(self) -> None:
        """Write the metrics of the batches since the last time, which are told a little later otherwise."""
        if self._metrics is not None:
            self._metrics.tell()

    def describe_handle(self) -> dict[str, Any]:
        """What is served, what executes it and in which process: the answer to ``GET /models/NAME?customized=true``."""
        return {**self._opened().predictor.describe(), "pid": os.getpid()}

    def _opened(self) -> Service:
        if self._service is None:
            raise RuntimeError("the handler was called before it was initialised")
        return self._service

    def _parse(self, parameters: dict[str, Any], context: Any, index: int) -> Request | Refusal | None:
        """What a request asks for, or why it cannot be read; None: what is served."""
        from serve.runtime.errors import Refusal, RequestError
        from serve.runtime.service.protocol import BODY_NAMES, parse

        if context.get_request_header(index, "describe") == "True":
            return None
        if context.get_request_header(index, "explain") == "True":
            return Refusal(501, "explanations are not offered: ask /predictions")
        name = next((name for name in BODY_NAMES if name in parameters), "body")
        # TorchServe keeps the content type of each part under the part's name.
        part = context.get_request_header(index, name)
        kind = str(part.get("content-type") or "") if isinstance(part, dict) else ""
        # TorchServe 0.12 drops the query string of /predictions/NAME (not of /NAME/predict and /invocations),
        # so that k can come as a header too.
        headers = {header.lower(): value for header, value in context.get_all_request_header(index).items()}
        serving = self._opened().serving
        asked = {"k": headers[_K_HEADER]} if _K_HEADER in headers else {}
        try:
            return parse(
                {**asked, **parameters},
                says_json=kind.partition(";")[0].strip().lower() == "application/json",
                request_type=str(headers.get("content-type", "")).lower(),
                default_k=serving.k,
                instance_limit=serving.instance_limit,
            )
        except RequestError as error:
            return error.refusal


def _open_log() -> RequestLog:
    """What writes a line for each request to stdout, which TorchServe reads; see log4j2.xml for where it goes."""
    from serve.runtime.service.logs import RequestLog, log_requests_to

    log_requests_to(sys.stdout)
    return RequestLog(math.inf, every=True)


def _observed(
    context: Any, index: int, asked: Request | Refusal | None, *, answered: Answered | None, status: int, begun: float
) -> Observation:
    """What is told of one request.

    Args:
        context: TorchServe's, of its batch.
        index: in that batch.
        asked: as `ImageClassifierHandler._parse` found it.
        answered: by the service; None: it was not asked.
        status: of the answer.
        begun: when the worker had the batch, in seconds of `time.monotonic`.
    """
    from serve.runtime.errors import Refusal
    from serve.runtime.service.observation import Observation, request_id

    headers = context.get_all_request_header(index)
    given = next((str(value) for name, value in headers.items() if name.lower() == _ID_HEADER), "")
    # Our frontend says it; a stock TorchServe does not, but puts a form's parts among the headers, by their names.
    told = headers.get(_WAITED_HEADER)
    waited = float(told) if isinstance(told, str) else None
    observation = Observation(
        request_id(given, lambda: str(context.get_request_id(index))),
        next((route for route in ("describe", "explain") if headers.get(route) == "True"), "predict"),
        context.model_name,
        context.manifest["model"]["modelVersion"],
        status,
        time.monotonic() - begun + (waited or 0.0) / 1e3,
        images=len(asked.images) if _is_request(asked) else 0,
        refusals=(_word(asked),) if isinstance(asked, Refusal) else (),
        frontend_ms=waited,
    )
    if answered is not None:
        observation.tell(answered)
    return observation


def _word(refusal: Refusal) -> str:
    """For the refusal of a whole request, in metrics and logs."""
    return f"request-{refusal.status}"


def _keep_both_images() -> None:
    """Have a form with two parts ``data`` reach the handler as one with ``data`` and ``body``, which is refused.

    TorchServe 0.12 (`ts.service.Service.retrieve_data_for_inference`) keeps the last of several parts of one name.
    """
    service = getattr(sys.modules.get("ts.service"), "Service", None)
    if service is None:  # no TorchServe calls this handler
        return
    retrieve = service.retrieve_data_for_inference

    def retrieve_both(batch: list[dict[str, Any]] | None) -> Any:
        for request in batch or ():
            images = [part for part in request["parameters"] if part["name"] == "data"]
            for part in images[1:]:
                part["name"] = "body"
        return retrieve(batch)

    service.retrieve_data_for_inference = staticmethod(retrieve_both)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one worker of this server load and warm up at a time; the lock ends with its process.

    TorchServe starts all workers at once, and each uses every core: nine ResNet-18 that warmed up
    together on two cores took minutes, of which most went into waiting for each other's threads.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that cannot be written costs time, not the worker
            lock = stack.enter_context((folder / ".loading").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_request(entry: object) -> TypeGuard[Request]:
    from serve.runtime.service.protocol import Request

    return isinstance(entry, Request)


def _say_before_dying(error: Exception) -> None:
    """Write what is wrong, and give TorchServe the time to read it.

    TorchServe 0.12 (`WorkerLifeCycle.ReaderThread`) stops reading what a worker writes as soon as it knows that it
    has ended: on a busy machine the traceback, which comes last, is lost with the pipe.
    """
    print("".join(traceback.format_exception_only(error)), end="", flush=True)
    time.sleep(_UNTIL_READ_S)


def _end_worker(error: Exception) -> NoReturn:
    """End this process at once, and leave nothing to destructors: of a lost device they may never come back."""
    _LOG.critical("%s; this worker ends, so that another one is started", error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_UNTIL_READ_S)
    os._exit(1)
