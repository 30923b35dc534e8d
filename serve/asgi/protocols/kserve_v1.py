"""KServe's version 1 protocol: instances in JSON, parsed and answered by the runtime's `protocol`.

Source: KServe's documentation, "V1 Protocol". The form of the request is from TensorFlow Serving's REST API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from serve.asgi.http.messages import (
    LONG_BODY,
    RefusedError,
    Response,
    bad_request,
    json_response,
    written_answer,
)
from serve.runtime.errors import RequestError
from serve.runtime.service.protocol import Request, parse

if TYPE_CHECKING:
    from serve.asgi.http.application import Application
    from serve.asgi.http.call import Call
    from serve.runtime.card.serving import Serving
    from serve.runtime.tasks.base import Task


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
    """Answer the instances of a request."""
    name, verb = split_verb(call.parameters["name"])
    if verb == "explain":
        raise RefusedError(501, "explanations are not supported: use /v1/models/NAME:predict", "explain")
    if verb != "predict":
        raise RefusedError(404, "there is nothing at this path: use /v1/models/NAME:predict", "path")
    served = call.take(name)
    body = await call.body()

    task = served.predictor.task
    parameters = task.from_headers(call.headers) | call.query

    def read_body() -> Request:
        return read(body, parameters, task, served.serving)

    try:
        request = await asyncio.to_thread(read_body) if len(body) > LONG_BODY else read_body()
    except RequestError as error:
        raise bad_request(error) from None
    answered = await call.ask(served, request)
    call.keep_answers(served.predictor.task, answered.outcomes)
    return await written_answer(task, request, answered.outcomes)


def split_verb(last: str) -> tuple[str, str]:
    """Split the end of a path, ``NAME:predict``, into name and verb. The verb is empty if there is none."""
    name, _, verb = last.rpartition(":")
    return (name, verb) if name else (last, "")


def read(body: bytes, parameters: Mapping[str, str], task: Task, serving: Serving) -> Request:
    """Parse the body of ``POST /v1/models/NAME:predict``: ``{"instances": [{"b64": …}, …]}``.

    Args:
        body: the whole body.
        parameters: those of headers and query. Names that are not the task's are ignored.
        task: the model's task.
        serving: its serving settings.

    Raises:
        RequestError: the body has another form, or a parameter is wrong.
    """
    own = {name: parameters[name] for name in task.parameters if name in parameters}
    return parse({"body": body} | own, task, serving, says_json=True, request_type="application/json")
