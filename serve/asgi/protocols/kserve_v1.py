"""KServe's version 1 protocol: instances in JSON, parsed and answered by the runtime's `protocol`.

Source: KServe's documentation, "V1 Protocol". The form of the request is from TensorFlow Serving's REST API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from serve.asgi.http.messages import (
    LONG_BODY,
    RefusedError,
    Response,
    answer_response,
    bad_request,
    json_response,
    written,
)
from serve.runtime.errors import RequestError
from serve.runtime.service.protocol import Request, parse

if TYPE_CHECKING:
    from serve.asgi.http.application import Application
    from serve.asgi.http.call import Call


def add_routes(application: Application) -> None:
    """Add the protocol's paths. Only the liveness probe needs no token."""
    application.router.add("GET", "/", live, public=True)
    application.router.add("GET", "/v1/models", models)
    application.router.add("GET", "/v1/models/{name}", model)
    application.router.add("POST", "/v1/models/{name}", predict)


async def live(_: Call) -> Response:
    """Answer the liveness probe at the root path, as KServe's servers do.

    The documentation does not mention it, but KServe's own client reads it (SDK 0.21).
    """
    return json_response(200, {"status": "alive"})


async def models(call: Call) -> Response:
    """List the names of all models."""
    return json_response(200, {"models": list(call.models.names)})


async def model(call: Call) -> Response:
    """Return whether a model is ready: status 200, or 503 if not."""
    served = call.take(call.parameters["name"])
    return json_response(200 if served.ready else 503, {"name": served.name, "ready": served.ready})


async def predict(call: Call) -> Response:
    """Classify the instances of a request."""
    name, verb = split_verb(call.parameters["name"])
    if verb == "explain":
        raise RefusedError(501, "explanations are not supported: use /v1/models/NAME:predict", "explain")
    if verb != "predict":
        raise RefusedError(404, "there is nothing at this path: use /v1/models/NAME:predict", "path")
    served = call.take(name)
    body = await call.body()

    def read_body() -> Request:
        return read(body, call.query, default_k=served.serving.k, instance_limit=served.serving.instance_limit)

    try:
        request = await asyncio.to_thread(read_body) if len(body) > LONG_BODY else read_body()
    except RequestError as error:
        raise bad_request(error) from None
    answered = await call.ask(served, request)
    return await written(request, lambda: answer_response(request, answered.outcomes))


def split_verb(last: str) -> tuple[str, str]:
    """Split the end of a path, ``NAME:predict``, into name and verb. The verb is empty if there is none."""
    name, _, verb = last.rpartition(":")
    return (name, verb) if name else (last, "")


def read(body: bytes, query: Mapping[str, str], *, default_k: int, instance_limit: int) -> Request:
    """Parse the body of ``POST /v1/models/NAME:predict``: ``{"instances": [{"b64": …}, …]}``.

    Raises:
        RequestError: the body has another form, or ``k`` is wrong.
    """
    parameters: dict[str, Any] = {"body": body}
    if "k" in query:
        parameters["k"] = query["k"]
    return parse(
        parameters,
        says_json=True,
        request_type="application/json",
        default_k=default_k,
        instance_limit=instance_limit,
    )
