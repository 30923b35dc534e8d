"""KServe's version 1: instances in JSON, as `protocol` reads and answers them; and what is served.

Source: KServe's documentation, "V1 Protocol", which takes the form of the request from TensorFlow Serving's REST API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve.runtime.protocol import Request, parse


def split_verb(last: str) -> tuple[str, str]:
    """``NAME:predict``, the end of a path, to the name and the verb; the verb is empty if there is none."""
    name, _, verb = last.rpartition(":")
    return (name, verb) if name else (last, "")


def read(body: bytes, query: Mapping[str, str], *, default_k: int, instance_limit: int) -> Request:
    """The body of ``POST /v1/models/NAME:predict``: ``{"instances": [{"b64": …}, …]}``.

    Raises:
        RequestError: it is not, or ``k`` is wrong.
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


def live() -> dict[str, Any]:
    """The body of ``GET /``, which the documentation leaves out and KServe's own client reads (SDK 0.21)."""
    return {"status": "alive"}


def models(names: Sequence[str]) -> dict[str, Any]:
    """The body of ``GET /v1/models``."""
    return {"models": list(names)}


def model(name: str, *, ready: bool) -> dict[str, Any]:
    """The body of ``GET /v1/models/NAME``."""
    return {"name": name, "ready": ready}
