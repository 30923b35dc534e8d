"""A workload: requests with their known answers, stored in a folder for other processes."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from serve.runtime.tasks.base import find_task

_FILE = "workload.json"


@dataclass(frozen=True)
class Known:
    """The known answer for one image, or the status of its refusal.

    Attributes:
        answer: the parsed JSON of the whole answer (see `Task.complete`). None for a refusal.
        status: 200, or the refusal's.
    """

    answer: Any = None
    status: int = 200


@dataclass(frozen=True)
class Item:
    """One request.

    Attributes:
        name: for messages.
        body: the bytes to send.
        content_type: content type of the body.
        known: known answers of its images, in order. Empty: the answer is not compared.
        listed: whether the answer has ``predictions`` (for instances) or is that of one image.
        exact: the exact bytes of the answer, if known.
        weight: how often it is sent, relative to the others.
    """

    name: str
    body: bytes
    content_type: str = "application/octet-stream"
    known: tuple[Known, ...] = ()
    listed: bool = False
    exact: bytes | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Workload:
    """Requests to choose from, and what their answers are compared by.

    Attributes:
        items: the requests.
        task: name of the task whose answers they get.
        tolerance: how far an answer may be from the known one (see `Task.fault`). Another batch size or engine rounds
            differently.
    """

    items: tuple[Item, ...]
    task: str
    tolerance: float = 0.02

    def save(self, folder: Path) -> Path:
        """Write the workload to ``folder``, which is created. `load` reads it back."""
        folder.mkdir(parents=True, exist_ok=True)
        entries = []
        for number, item in enumerate(self.items):
            (folder / f"{number}.body").write_bytes(item.body)
            exact = None if item.exact is None else base64.b64encode(item.exact).decode()
            entries.append({**asdict(item), "body": f"{number}.body", "exact": exact})
        document = {"task": self.task, "tolerance": self.tolerance, "items": entries}
        (folder / _FILE).write_text(json.dumps(document), encoding="utf-8")
        return folder

    @classmethod
    def load(cls, folder: Path) -> Workload:
        """Read the result of `save`."""
        body = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        items = tuple(
            Item(
                **{
                    **entry,
                    "body": (folder / entry["body"]).read_bytes(),
                    "known": tuple(Known(**one) for one in entry["known"]),
                    "exact": None if entry["exact"] is None else base64.b64decode(entry["exact"]),
                }
            )
            for entry in body["items"]
        )
        return cls(items, body["task"], body["tolerance"])

    def confusable(self) -> list[tuple[str, str]]:
        """Return pairs of single images with equal answers within the tolerance. A swap would not be noticed."""
        single = [item for item in self.items if len(item.known) == 1 and item.known[0].status == 200]
        return [
            (one.name, other.name)
            for number, one in enumerate(single)
            for other in single[number + 1 :]
            if self._alike(one, other)
        ]

    def told_apart(self) -> Workload:
        """Return the workload of those single images whose answers cannot be confused with one kept before."""
        kept: list[Item] = []
        for item in self.items:
            if not any(self._alike(item, other) for other in kept):
                kept.append(item)
        return replace(self, items=tuple(kept))

    def _alike(self, one: Item, other: Item) -> bool:
        """Whether two single images have equal answers within two tolerances. All refusals are alike."""
        mine, theirs = one.known[0].answer, other.known[0].answer
        if mine is None or theirs is None:
            return mine is theirs
        return not find_task(self.task).fault(mine, theirs, 2 * self.tolerance)


def instances(name: str, items: Sequence[Item], weight: float = 1.0) -> Item:
    """Return one JSON request of several single images."""
    known = tuple(known for item in items for known in item.known)
    body = instances_body([item.body for item in items])
    return Item(name, body, "application/json", known, listed=True, weight=weight)


def instances_body(images: Sequence[bytes]) -> bytes:
    """Return the JSON body of a request with several images, for KServe's version 1 and TorchServe."""
    return json.dumps({"instances": [{"b64": base64.b64encode(image).decode()} for image in images]}).encode()


def request_bytes(item: Item, path: str, host: str, headers: Mapping[str, str]) -> bytes:
    """Return the whole HTTP/1.1 request of an item."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        f"Content-Type: {item.content_type}",
        f"Content-Length: {len(item.body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + item.body
