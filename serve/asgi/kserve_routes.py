"""KServe's version 1 on this server; `kserve_v1` reads and writes what goes over its paths."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from serve.asgi import kserve_v1
from serve.asgi.messages import LONG_BODY, RefusedError, Response, answer_response, bad_request, json_response, written
from serve.runtime import protocol
from serve.runtime.errors import RequestError

if TYPE_CHECKING:
    from serve.asgi.application import Application
    from serve.asgi.call import Call


def add_routes(application: Application) -> None:
    """Answer the protocol's paths; that the server lives needs no token."""
    application.router.add("GET", "/", live, public=True)
    application.router.add("GET", "/v1/models", models)
    application.router.add("GET", "/v1/models/{name}", model)
    application.router.add("POST", "/v1/models/{name}", predict)


async def live(_: Call) -> Response:
    """What KServe's servers say at their root, where its client asks whether they live."""
    return json_response(200, kserve_v1.live())


async def models(call: Call) -> Response:
    """The names of all models."""
    return json_response(200, kserve_v1.models(call.models.names))


async def model(call: Call) -> Response:
    """Whether a model answers; 503 where it does not."""
    served = call.take(call.parameters["name"])
    return json_response(200 if served.ready else 503, kserve_v1.model(served.name, ready=served.ready))


async def predict(call: Call) -> Response:
    """The classes of each instance."""
    name, verb = kserve_v1.split_verb(call.parameters["name"])
    if verb == "explain":
        raise RefusedError(501, "explanations are not offered: ask /v1/models/NAME:predict", "explain")
    if verb != "predict":
        raise RefusedError(404, "there is nothing at this path: ask /v1/models/NAME:predict", "path")
    served = call.take(name)
    body = await call.body()

    def read() -> protocol.Request:
        return kserve_v1.read(
            body, call.query, default_k=served.serving.k, instance_limit=served.serving.instance_limit
        )

    try:
        request = await asyncio.to_thread(read) if len(body) > LONG_BODY else read()
    except RequestError as error:
        raise bad_request(error) from None
    answered = await call.ask(served, request)
    return await written(request, lambda: answer_response(request, answered.outcomes))
