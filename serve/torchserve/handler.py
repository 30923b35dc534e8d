"""The TorchServe adapter: what travels in the archive as ``handler.py``.

It turns TorchServe's batch into one call of the runtime and its outcomes into one answer per request.
It is built on nothing of TorchServe's: ``VisionHandler`` imports captum, which TorchServe 0.12 does not
declare, and ``BaseHandler``'s ONNX branch cannot run a session. TorchServe wants exactly one class here.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.runtime.errors import Refusal
    from serve.runtime.predictor import Predictor
    from serve.runtime.protocol import Request
    from serve.runtime.serving import Serving

_FOLDER = Path(__file__).resolve().parent

# TorchServe copies the phrase into the status line by its length in characters: ASCII only.
_PHRASES = {
    200: "OK",
    400: "Bad Request",
    413: "Payload Too Large",
    415: "Unsupported Media Type",
    501: "Not Implemented",
    503: "Service Unavailable",
}

_K_HEADER = "x-top-k"


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
        self._predictor: Predictor | None = None
        self._serving: Serving | None = None

    def initialize(self, context: Any) -> None:
        """Open the artifact as its ``serving.json`` says, on the GPU that TorchServe assigned if there is one.

        Raises:
            CardError: the archive's files do not match its card.
            EngineError: the artifact cannot run here; the worker dies with the reason in its log.
        """
        # Imported here and not above: TorchServe 0.12 takes an ImportError of this module for "no such
        # file" and reports "No module named 'ts.torch_handler.handler'" in place of the cause.
        prefer_own_runtime()
        from serve.runtime.chain import open_served

        properties = context.system_properties
        folder = Path(properties["model_dir"])
        with _one_at_a_time(folder.parent):
            self._predictor, self._serving = open_served(folder, properties.get("gpu_id"))

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Answer a batch of requests, one body for each, with its own status.

        Everything that is one request's fault is that request's answer. An exception that leaves this
        method fails the whole batch with 503 (507 if its text contains "CUDA"): only the engine's may.
        """
        from serve.runtime.errors import Refusal
        from serve.runtime.protocol import answer, refuse

        predictor = self._opened()
        requests = [self._parse(parameters, context, index) for index, parameters in enumerate(data)]
        images: list[bytes] = []
        wanted: list[int] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            if not isinstance(request, Refusal):
                good = [image for image in request.images if isinstance(image, bytes)]
                images += good
                wanted += [request.k] * len(good)
                owners += [index] * len(good)
        predicted = iter(predictor.predict(images, wanted, owners))
        bodies: list[Any] = []
        refused = 0
        for index, request in enumerate(requests):
            status: int
            body: Any
            if _asks_to_describe(context, index):
                status, body = 200, self.describe_handle()
            elif isinstance(request, Refusal):
                status, body = refuse(request)
                refused += 1
            else:
                outcomes = [image if isinstance(image, Refusal) else next(predicted) for image in request.images]
                refused += sum(not isinstance(outcome, list) for outcome in outcomes)
                status, body = answer(request, outcomes)
            context.set_response_status(status, _PHRASES.get(status, ""), idx=index)
            context.set_response_content_type(index, "application/json")
            bodies.append(body)
        if images:
            self._emit(context, len(images), refused)
        return bodies

    def describe_handle(self) -> dict[str, Any]:
        """What is served, and what executes it: the answer to ``GET /models/NAME?customized=true``."""
        return self._opened().describe()

    def _opened(self) -> Predictor:
        if self._predictor is None:
            raise RuntimeError("the handler was called before it was initialised")
        return self._predictor

    def _rules(self) -> Serving:
        if self._serving is None:
            raise RuntimeError("the handler was called before it was initialised")
        return self._serving

    def _parse(self, parameters: dict[str, Any], context: Any, index: int) -> Request | Refusal:
        from serve.runtime.errors import Refusal, RequestError
        from serve.runtime.protocol import BODY_NAMES, Request, parse

        if _asks_to_describe(context, index):
            return Request((), 1, listed=True)
        if context.get_request_header(index, "explain") == "True":
            return Refusal(501, "explanations are not offered: ask /predictions")
        name = next((name for name in BODY_NAMES if name in parameters), "body")
        # TorchServe keeps the content type of each part under the part's name.
        part = context.get_request_header(index, name)
        kind = str(part.get("content-type") or "") if isinstance(part, dict) else ""
        # TorchServe 0.12 drops the query string of /predictions/NAME (not of /NAME/predict and /invocations),
        # so that k can come as a header too.
        headers = {header.lower(): value for header, value in context.get_all_request_header(index).items()}
        asked = {"k": headers[_K_HEADER]} if _K_HEADER in headers else {}
        try:
            return parse(
                {**asked, **parameters},
                says_json=kind.partition(";")[0].strip().lower() == "application/json",
                request_type=str(headers.get("content-type", "")).lower(),
                default_k=self._rules().k,
                instance_limit=self._rules().instance_limit,
            )
        except RequestError as error:
            return error.refusal

    def _emit(self, context: Any, images: int, refused: int) -> None:
        """Write this batch's metrics; TorchServe shows those that its metrics.yaml names."""
        from ts.metrics.dimension import Dimension
        from ts.metrics.metric_type_enum import MetricTypes

        predictor = self._opened()
        timings = predictor.timings
        for name, value, unit, kind in (
            ("DecodeTime", round(timings.decode, 3), "ms", MetricTypes.GAUGE),
            ("InferenceTime", round(timings.inference, 3), "ms", MetricTypes.GAUGE),
            ("BatchSize", images, "count", MetricTypes.GAUGE),
            ("Images", images, "count", MetricTypes.COUNTER),
            ("Refused", refused, "count", MetricTypes.COUNTER),
        ):
            # Values are matched to the dimensions of metrics.yaml by their order, not by their names.
            dimensions = [
                Dimension("ModelName", context.model_name),
                Dimension("Level", "Model"),
                Dimension("Provider", predictor.engine.provider),
                Dimension("Execution", predictor.execution_name),
            ]
            context.metrics.add_metric(name, value, unit, dimensions=dimensions, metric_type=kind)


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


def _asks_to_describe(context: Any, index: int) -> bool:
    return bool(context.get_request_header(index, "describe") == "True")
