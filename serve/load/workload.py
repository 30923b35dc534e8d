"""A workload: requests with their known answers, stored in a folder for other processes."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "workload.json"


@dataclass(frozen=True)
class Known:
    """The known answer for one image: probabilities of its classes, or the status of its refusal.

    Attributes:
        probabilities: of all classes, by index. Empty for a refusal.
        status: 200, or the refusal's.
    """

    probabilities: tuple[float, ...] = ()
    status: int = 200


@dataclass(frozen=True)
class Item:
    """One request.

    Attributes:
        name: for messages.
        body: the bytes to send.
        content_type: content type of the body.
        known: known answers of its images, in order. Empty: the answer is not compared.
        listed: whether the answer has ``predictions`` (for instances) or one image's classes.
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
    """Requests to choose from, and how far a probability may be from the known one.

    Another batch size or engine rounds differently.
    """

    items: tuple[Item, ...]
    tolerance: float = 0.02

    def save(self, folder: Path) -> Path:
        """Write the workload to ``folder``, which is created. `load` reads it back."""
        folder.mkdir(parents=True, exist_ok=True)
        entries = []
        for number, item in enumerate(self.items):
            (folder / f"{number}.body").write_bytes(item.body)
            exact = None if item.exact is None else base64.b64encode(item.exact).decode()
            entries.append({**asdict(item), "body": f"{number}.body", "exact": exact})
        (folder / _FILE).write_text(json.dumps({"tolerance": self.tolerance, "items": entries}), encoding="utf-8")
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
                    "known": tuple(Known(tuple(one["probabilities"]), one["status"]) for one in entry["known"]),
                    "exact": None if entry["exact"] is None else base64.b64decode(entry["exact"]),
                }
            )
            for entry in body["items"]
        )
        return cls(items, body["tolerance"])

    def confusable(self) -> list[tuple[str, str]]:
        """Return pairs of single images with equal answers within the tolerance. A swap would not be noticed."""
        single = [item for item in self.items if len(item.known) == 1 and item.known[0].probabilities]
        return [
            (one.name, other.name)
            for number, one in enumerate(single)
            for other in single[number + 1 :]
            if _alike(one.known[0], other.known[0], 2 * self.tolerance)
        ]


def tell_apart(items: Sequence[Item], tolerance: float) -> tuple[Item, ...]:
    """Return the single images whose answers differ by more than two tolerances from all kept before."""
    kept: list[Item] = []
    for item in items:
        if not any(_alike(item.known[0], other.known[0], 2 * tolerance) for other in kept):
            kept.append(item)
    return tuple(kept)


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


def _alike(one: Known, other: Known, difference: float) -> bool:
    return len(one.probabilities) == len(other.probabilities) and all(
        abs(mine - theirs) <= difference for mine, theirs in zip(one.probabilities, other.probabilities, strict=True)
    )
