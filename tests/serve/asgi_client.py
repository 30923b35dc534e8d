"""An ASGI client without a socket: one request to an application in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.asgi.http.application import Application


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def send(
    application: Application,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    headers: Mapping[str, str] | None = None,
    *,
    gone_after_s: float | None = None,
) -> Answer | None:
    """Answer of one request, whose body comes in chunks; None where the client was gone, which it is after a while."""
    target, _, query = path.partition("?")
    chunks = [body] if isinstance(body, bytes) else list(body)
    messages: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": index + 1 < len(chunks)}
        for index, chunk in enumerate(chunks)
    ]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(3600 if gone_after_s is None else gone_after_s)
        return {"type": "http.disconnect"}

    async def take(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": target,
        "raw_path": target.encode("utf-8"),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()],
    }
    await application(scope, receive, take)
    if not sent:
        return None
    start, *rest = sent
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], told, b"".join(message["body"] for message in rest))


def ask(
    application: Application,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """`send`, for one request alone."""
    answer = asyncio.run(send(application, method, path, body, headers))
    assert answer is not None
    return answer
