"""TorchServe's paths, ``/predictions/NAME``, ``/models/NAME`` and ``/ping``, and the health probes of orchestrators."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from serve.asgi.http.application import Application
from serve.asgi.http.call import Call
from serve.asgi.http.messages import LONG_BODY, Response, bad_request, json_response, written_answer
from serve.asgi.http.multipart import parts_of
from serve.asgi.http.served_models import Models, Served
from serve.runtime.errors import RequestError
from serve.runtime.service import protocol
from serve.runtime.service.protocol import Request


def add_routes(application: Application) -> None:
    """Add TorchServe's paths and the server's health."""
    router = application.router
    router.add("POST PUT", "/predictions/{name}", predict)
    router.add("POST PUT", "/predictions/{name}/{version}", predict)
    router.add("GET", "/models", list_models)
    router.add("GET", "/models/{name}", describe)
    router.add("GET", "/models/{name}/{version}", describe)

    async def live(_: Call) -> Response:
        return json_response(200, {"status": "live"})

    async def ready(_: Call) -> Response:
        reason = application.unready
        if reason is not None:
            return json_response(503, {"ready": False, "reason": reason})
        return json_response(200, {"ready": True} | _unchecked(application.models))

    async def ping(_: Call) -> Response:
        healthy = application.unready is None
        return json_response(200 if healthy else 503, {"status": "Healthy" if healthy else "Unhealthy"})

    router.add("GET", "/health/live", live, public=True)
    router.add("GET", "/health/ready", ready, public=True)
    router.add("GET", "/ping", ping, public=True)


async def predict(call: Call) -> Response:
    """Answer one image or a list of instances. The response has the same bytes as from TorchServe's handler."""
    served = call.take(call.parameters["name"], call.parameters.get("version"))
    body = await call.body()
    kind = call.headers.get("content-type", "")
    try:
        large = len(body) > LONG_BODY
        if large and (kind.lower().startswith(("application/json", "multipart/")) or protocol.looks_like_json(body)):
            request = await asyncio.to_thread(parse, call, body, kind, served)
        else:
            request = parse(call, body, kind, served)
    except RequestError as error:
        raise bad_request(error) from None
    answered = await call.ask(served, request)
    call.keep_answers(served.predictor.task, answered.outcomes)
    return await written_answer(served.predictor.task, request, answered.outcomes)


def parse(call: Call, body: bytes, content_type: str, served: Served) -> Request:
    """Parse one request. Parameters in the query or the form take precedence over headers.

    Raises:
        RequestError: the request has no image, or it is invalid.
    """
    task = served.predictor.task
    parameters = task.from_headers(call.headers) | call.query
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        parts = parts_of(body, content_type)
        parameters |= {part.name: bytes(part.content) for part in parts}
        images = [part for part in parts if part.name in protocol.BODY_NAMES]
        if len(images) > 1:
            raise protocol.two_images()
        kind = images[0].content_type if images else ""
    else:
        for name in protocol.BODY_NAMES:  # from the query: an image is always in the body
            parameters.pop(name, None)
        if body:
            parameters["body"] = body
    return protocol.parse(
        parameters,
        task,
        served.serving,
        says_json=kind == "application/json",
        request_type=content_type.lower() or "none",
    )


async def list_models(call: Call) -> Response:
    """List every model and version, with its share of the requests that name no version."""
    loaded = [
        {
            "modelName": served.name,
            "modelVersion": served.version,
            "ready": served.ready,
            "unchecked": served.unchecked or None,
            "weight": served.weight,
        }
        for served in call.models
    ]
    there = {entry["modelName"] for entry in loaded}
    loading = [{"modelName": name, "ready": False} for name in call.models.names if name not in there]
    return json_response(200, {"models": [*loaded, *loading]})


async def describe(call: Call) -> Response:
    """Describe a model like TorchServe's handler, with its state in this server."""
    served = call.take(call.parameters["name"], call.parameters.get("version"))
    own = {
        "modelName": served.name,
        "modelVersion": served.version,
        "ready": served.ready,
        "checked": served.checked,
        "weight": served.weight,
        "waiting": served.service.waiting,
    }
    return json_response(200, {**served.predictor.describe(), "pid": os.getpid(), **own})


def _unchecked(models: Models) -> dict[str, Any]:
    """Return how many models are ready without a checked known answer. No names, because this needs no token."""
    reasons = [served.unchecked for served in models if served.unchecked]
    return {"unchecked": {"models": len(reasons), "why": reasons[0]}} if reasons else {}
