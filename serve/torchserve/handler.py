"""The TorchServe handler, packed into every archive as ``handler.py``.

It passes TorchServe's batch to the runtime in one call, and returns one answer for each request. It inherits nothing
from TorchServe. ``VisionHandler`` imports captum, which TorchServe 0.12 does not declare, and ``BaseHandler``'s ONNX
branch cannot run a session. TorchServe needs exactly one class in this file.
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

# TorchServe copies the phrase into the status line by its length in characters, so it must be ASCII.
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

_ID_HEADER = "x-request-id"

# Written by ``Batches.groovy``. No client can send it, because a header's name has no colon.
_FRONTEND_HEADER = "serve:frontend-ms"

#: Environment variable of TorchServe. "1" makes each worker write a line of JSON for each request. The project's
#: launcher sets it.
LOG_VARIABLE = "SERVE_LOG_REQUESTS"

# Seconds that an ending worker waits for TorchServe to read its last output.
_OUTPUT_DELAY_S = 0.5


def prefer_own_runtime() -> None:
    """Make ``import serve`` find the package beside this file in the archive.

    TorchServe 0.12 puts the caller's PYTHONPATH before the archive's folder, and this project may be installed as well.
    The packed version must be the one that serves.
    """
    own = _FOLDER / "serve"
    if not (own / "runtime").is_dir():
        return  # this file is not in an archive
    sys.path.insert(0, str(_FOLDER))
    loaded = getattr(sys.modules.get("serve"), "__file__", None)
    if loaded is not None and Path(loaded).resolve().parent != own:
        for name in [name for name in sys.modules if name.partition(".")[0] == "serve"]:
            del sys.modules[name]


class ImageClassifierHandler:
    """Serves one artifact. TorchServe creates one handler in each worker process."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._metrics: Metrics | None = None
        self._log: RequestLog | None = None

    def initialize(self, context: Any) -> None:
        """Open the artifact as its ``serving.json`` says, on the assigned GPU if there is one.

        Raises:
            CardError: the archive's files do not match its card, or its known answer differs.
            EngineError: the artifact cannot run here. The worker ends, with the reason in its log.
        """
        # Imported here, because TorchServe 0.12 takes an ImportError of this module for a missing file. It would report
        # "No module named 'ts.torch_handler.handler'" instead of the cause.
        prefer_own_runtime()
        from serve.runtime.card.known_answer import read_known
        from serve.runtime.service.garbage_collection import freeze_heap
        from serve.runtime.service.logs import silence_pillow
        from serve.runtime.service.self_check import check_known
        from serve.runtime.service.service import open_service
        from serve.torchserve.metrics import Metrics

        silence_pillow()
        _keep_duplicate_images()
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
            _report_failure(error)
            raise
        self._metrics = Metrics(context, self._service.predictor)
        self._metrics.begin()
        freeze_heap()

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answer a batch of requests, with a body and a status for each.

        A fault of one request is only that request's answer. An exception from this method fails the whole batch with
        503, or with 507 if its text contains "CUDA".

        The worker ends if its device is lost, and TorchServe starts another. For an exception TorchServe 0.12 would
        assume too little memory, and answer 507 for ever.
        """
        from serve.runtime.errors import BrokenError, Refusal
        from serve.runtime.service.protocol import Reply, answer, refuse

        begun = time.monotonic()
        entries = [self._parse(parameters, context, index) for index, parameters in enumerate(data)]
        try:
            answers = iter(self._opened().answer_batch([entry for entry in entries if _is_request(entry)]))
        except BrokenError as error:
            self.tell_metrics()
            _end_worker(error)
        answered: list[Answered] = []
        bodies: list[bytes] = []
        for index, entry in enumerate(entries):
            result: Answered | None = None
            if entry is None:
                reply = Reply(200, json.dumps(self.describe_handle(), allow_nan=False).encode())
            elif isinstance(entry, Refusal):
                reply = refuse(entry)
            else:
                result = next(answers)
                answered.append(result)
                reply = answer(self._opened().predictor.task, entry, result.outcomes)
                # Without the time in TorchServe's own queue, which `Batches.groovy` adds.
                context.set_response_header(index, "Server-Timing", result.stages.server_timing)
            context.set_response_status(reply.status, _PHRASES.get(reply.status, ""), idx=index)
            context.set_response_content_type(index, reply.content_type)
            bodies.append(reply.body)
            if self._log is not None:
                self._log(_observation(context, index, entry, answered=result, status=reply.status, begun=begun))
        refused = [_word(entry) for entry in entries if isinstance(entry, Refusal)]
        if self._metrics is not None and (answered or refused):
            self._metrics.add(answered, refused)
        return bodies

    def tell_metrics(self) -> None:
        """Write the metrics of the batches since the last call. Otherwise they are written a little later."""
        if self._metrics is not None:
            self._metrics.tell()

    def describe_handle(self) -> dict[str, Any]:
        """Return what is served, how and in which process: the answer to ``GET /models/NAME?customized=true``."""
        return {**self._opened().predictor.describe(), "pid": os.getpid()}

    def _opened(self) -> Service:
        if self._service is None:
            raise RuntimeError("the handler was called before it was initialized")
        return self._service

    def _parse(self, parameters: dict[str, Any], context: Any, index: int) -> Request | Refusal | None:
        """Parse a request, or return its refusal. None: it is for the description."""
        from serve.runtime.errors import Refusal, RequestError
        from serve.runtime.service.protocol import BODY_NAMES, parse

        if context.get_request_header(index, "describe") == "True":
            return None
        if context.get_request_header(index, "explain") == "True":
            return Refusal(501, "explanations are not supported: use /predictions")
        name = next((name for name in BODY_NAMES if name in parameters), "body")
        # TorchServe stores the content type of each part under the part's name.
        part = context.get_request_header(index, name)
        kind = str(part.get("content-type") or "") if isinstance(part, dict) else ""
        # TorchServe 0.12 drops the query string of /predictions/NAME (but not of /NAME/predict and /invocations), so
        # headers may carry parameters, too.
        headers = {header.lower(): value for header, value in context.get_all_request_header(index).items()}
        service = self._opened()
        task = service.predictor.task
        try:
            return parse(
                task.from_headers(headers) | parameters,
                task,
                service.serving,
                says_json=kind.partition(";")[0].strip().lower() == "application/json",
                request_type=str(headers.get("content-type", "")).lower(),
            )
        except RequestError as error:
            return error.refusal


def _open_log() -> RequestLog:
    """Open a log of requests on stdout, which TorchServe reads. log4j2.xml says where it goes."""
    from serve.runtime.service.logs import RequestLog, log_requests_to

    log_requests_to(sys.stdout)
    return RequestLog(math.inf, every=True)


def _observation(
    context: Any, index: int, parsed: Request | Refusal | None, *, answered: Answered | None, status: int, begun: float
) -> Observation:
    """Return the observation of one request.

    Args:
        context: TorchServe's context of the batch.
        index: index of the request in the batch.
        parsed: the result of `ImageClassifierHandler._parse`.
        answered: the service's answer. None: it was not called.
        status: status of the response.
        begun: when the worker received the batch, in seconds of `time.monotonic`.
    """
    from serve.runtime.errors import Refusal
    from serve.runtime.service.observation import Observation, request_id

    headers = context.get_all_request_header(index)
    given = next((str(value) for name, value in headers.items() if name.lower() == _ID_HEADER), "")
    # The project's frontend sets it. A stock TorchServe does not, but it stores a form's parts among the headers, by
    # name.
    frontend_ms = headers.get(_FRONTEND_HEADER)
    waited_ms = float(frontend_ms) if isinstance(frontend_ms, str) else None
    observation = Observation(
        request_id(given, lambda: str(context.get_request_id(index))),
        next((route for route in ("describe", "explain") if headers.get(route) == "True"), "predict"),
        context.model_name,
        context.manifest["model"]["modelVersion"],
        status,
        time.monotonic() - begun + (waited_ms or 0.0) / 1e3,
        images=len(parsed.images) if _is_request(parsed) else 0,
        refusals=(_word(parsed),) if isinstance(parsed, Refusal) else (),
        frontend_ms=waited_ms,
    )
    if answered is not None:
        observation.tell(answered)
    return observation


def _word(refusal: Refusal) -> str:
    """Return the word for the refusal of a whole request, in metrics and logs."""
    return f"request-{refusal.status}"


def _keep_duplicate_images() -> None:
    """Pass a form with two parts ``data`` to the handler as ``data`` and ``body``, so that it is refused.

    TorchServe 0.12 (`ts.service.Service.retrieve_data_for_inference`) keeps the last of several parts of one name.
    """
    service = getattr(sys.modules.get("ts.service"), "Service", None)
    if service is None:  # TorchServe does not run this handler
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
    """Let one worker of this server at a time load and warm up. The lock ends with its process.

    TorchServe starts all workers at once, and each uses every core. Nine ResNet-18 that warmed up together on two cores
    took minutes, mostly because they waited for each other's threads.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # a read-only folder costs time, not the worker
            lock = stack.enter_context((folder / ".loading").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_request(entry: object) -> TypeGuard[Request]:
    from serve.runtime.service.protocol import Request

    return isinstance(entry, Request)


def _report_failure(error: Exception) -> None:
    """Write the error, and give TorchServe time to read it.

    TorchServe 0.12 (`WorkerLifeCycle.ReaderThread`) stops reading a worker's output once it knows that the worker has
    ended. On a busy machine it would lose the end of the traceback.
    """
    print("".join(traceback.format_exception_only(error)), end="", flush=True)
    time.sleep(_OUTPUT_DELAY_S)


def _end_worker(error: Exception) -> NoReturn:
    """End this process at once, without destructors: with a lost device they may never return."""
    _LOG.critical("%s; this worker stops, and TorchServe starts another one", error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_OUTPUT_DELAY_S)
    os._exit(1)
