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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from serve.runtime.errors import Refusal
    from serve.runtime.predictor import Predictor
    from serve.runtime.protocol import Request

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
        self._k = 5
        self._instance_limit = 1

    def initialize(self, context: Any) -> None:
        """Open the artifact on the device that TorchServe assigned, and warm up every batch size.

        Raises:
            CardError: the archive's files do not match its card.
            EngineError: the artifact cannot run here; the worker dies with the reason in its log.
        """
        # Imported here and not above: TorchServe 0.12 takes an ImportError of this module for "no such
        # file" and reports "No module named 'ts.torch_handler.handler'" in place of the cause.
        prefer_own_runtime()
        from serve.runtime.budget import SERVING
        from serve.runtime.card import read_card
        from serve.runtime.engines.base import find_engine, preferred
        from serve.runtime.errors import EngineError
        from serve.runtime.execution import settle
        from serve.runtime.predictor import Predictor

        properties = context.system_properties
        folder = Path(properties["model_dir"])
        options = (context.model_yaml_config or {}).get("handler", {})
        batch_size = int(properties.get("batch_size") or 1)
        card = read_card(folder)
        device = assigned_device(properties.get("gpu_id"), card.device)
        try:
            execution = preferred(card, str(device))
        except EngineError:
            if not options.get("allow_fallback", False):
                raise
            execution = preferred(card, "cpu")
        execution = replace(execution, threads=options.get("threads"))
        settle(execution, computes_with_torch=find_engine(execution.engine).computes_with_torch)
        if device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(device)
        with _one_at_a_time(folder.parent):
            predictor = Predictor(
                folder,
                execution,
                max_batch=batch_size,
                budget=replace(SERVING, **options.get("budget", {})),
            )
            predictor.warm_up(range(1, batch_size + 1), repeats=2)
        self._k = int(options.get("k", self._k))
        self._instance_limit = int(options.get("instance_limit", 64))
        self._predictor = predictor

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
        """What is served, and by which provider: the answer to ``GET /models/NAME?customized=true``."""
        return self._opened().describe()

    def _opened(self) -> Predictor:
        if self._predictor is None:
            raise RuntimeError("the handler was called before it was initialised")
        return self._predictor

    def _parse(self, parameters: dict[str, Any], context: Any, index: int) -> Request | Refusal:
        from serve.runtime.errors import Refusal, RequestError
        from serve.runtime.protocol import BODY_NAMES, Request, parse

        if _asks_to_describe(context, index):
            return Request((), self._k, listed=True)
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
                default_k=self._k,
                instance_limit=self._instance_limit,
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


def assigned_device(gpu: int | None, runs_on: str) -> torch.device:
    """The device to open an artifact on.

    ``gpu`` is what TorchServe assigned (None: no GPU). An artifact that runs on CUDA only asks for CUDA
    even so: the engine then says what is missing, or falls back where that is allowed.
    """
    if gpu is not None:
        return torch.device("cuda", gpu)
    return torch.device("cuda" if runs_on == "cuda" else "cpu")


def _asks_to_describe(context: Any, index: int) -> bool:
    return bool(context.get_request_header(index, "describe") == "True")
