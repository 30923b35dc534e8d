"""The Open Inference Protocol's HTTP paths. `oip_rest` parses and writes the bodies."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING

from serve.asgi.http.messages import (
    LONG_BODY,
    RefusedError,
    Response,
    bad_request,
    json_response,
    refusal_response,
    try_again,
    written,
)
from serve.asgi.protocols import oip, oip_rest
from serve.runtime.errors import RequestError

if TYPE_CHECKING:
    from serve.asgi.http.application import Application
    from serve.asgi.http.call import Call
    from serve.asgi.http.served_models import Models, Served

_BINARY = "application/octet-stream"


def add_routes(application: Application) -> None:
    """Add the protocol's paths: health without a token, metadata and inference."""
    router = application.router

    async def live(_: Call) -> Response:
        return json_response(200, {"live": True})

    async def ready(_: Call) -> Response:
        is_ready = application.unready is None
        return json_response(200 if is_ready else 503, {"ready": is_ready})

    router.add("GET", "/v2/health/live", live, public=True)
    router.add("GET", "/v2/health/ready", ready, public=True)
    router.add("GET", "/v2", server)
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        router.add("GET", path, metadata)
        router.add("GET", f"{path}/ready", model_ready)
        router.add("POST", f"{path}/infer", infer)


def signature(models: Models, served: Served) -> oip.Signature:
    """Return the signature of a served model."""
    return oip.Signature(served.name, tuple(models.versions(served.name)), served.predictor.task, served.serving)


def project_version() -> str:
    """Return the installed version of this project. Empty if it is not installed."""
    try:
        return importlib.metadata.version("optimize-and-serve")
    except importlib.metadata.PackageNotFoundError:
        return ""


async def server(_: Call) -> Response:
    """Return the server's metadata."""
    return json_response(200, oip.server_metadata(project_version()))


async def metadata(call: Call) -> Response:
    """Return a model's metadata."""
    return json_response(200, oip.model_metadata(signature(call.models, _take_model(call))))


async def model_ready(call: Call) -> Response:
    """Return whether a model is ready: status 200, or 503 if not."""
    served = _take_model(call)
    return json_response(200 if served.ready else 503, {"name": served.name, "ready": served.ready})


async def infer(call: Call) -> Response:
    """Run inference. The outputs are JSON or binary data, as the request wants."""
    served = _take_model(call)
    body = await call.body()
    model_signature = signature(call.models, served)
    json_length = call.headers.get(oip_rest.LENGTH_HEADER)

    def read() -> oip.Inference:
        return oip_rest.read(model_signature, body, json_length)

    try:
        inference = await asyncio.to_thread(read) if _is_long(body, json_length) else read()
    except RequestError as error:
        raise bad_request(error) from None
    if inference.timeout_s is not None:
        until = call.arrived + inference.timeout_s
        call.deadline = until if call.deadline is None else min(call.deadline, until)
    answered = await call.ask(served, inference.request)

    def write() -> oip_rest.Answer:
        outputs = oip.write_outputs(model_signature, inference, answered.outcomes)
        return oip_rest.write(model_signature, served.version, inference, outputs)

    try:
        call.keep_answer(oip.answer_bytes(model_signature, inference, answered.outcomes))
    except RequestError as error:
        raise bad_request(error) from None
    try:
        answer = await written(model_signature.task, inference.request, write)
    except RequestError as error:  # an image was refused, and its refusal is recorded already
        return refusal_response(refusal(error))
    if answer.json_length is None:
        return Response(200, answer.body)
    return Response(200, answer.body, _BINARY, ((oip_rest.LENGTH_HEADER, str(answer.json_length)),))


def _is_long(body: bytes, json_length: str | None) -> bool:
    """Whether parsing would block the event loop: the document is long, or pixels may follow it.

    A backslash counts as pixels, because a datatype may be written with escapes. JPEGs behind a short document are only
    cut out.

    Raises:
        RequestError: the document's length is invalid.
    """
    length = oip_rest.document_length(body, json_length)
    if len(body) <= LONG_BODY:
        return False
    return length > LONG_BODY or any(mark in body[:length] for mark in (b"UINT8", b"\\"))


def refusal(error: RequestError) -> RefusedError:
    """Return the refusal of a request for one of its images."""
    if error.status == 503:
        return try_again(str(error), "item-503")
    return RefusedError(error.status, str(error), f"item-{error.status}")


def _take_model(call: Call) -> Served:
    return call.take(call.parameters["name"], call.parameters.get("version"))
