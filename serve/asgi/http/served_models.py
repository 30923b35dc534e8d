"""The served models by name and version, and how versions replace each other.

Use it in the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve.asgi.http.messages import RefusedError, try_again
from serve.runtime.card.serving import Serving
from serve.runtime.errors import did_you_mean
from serve.runtime.service.predictor import Predictor
from serve.runtime.service.service import Service


@dataclass(eq=False)
class Served:
    """One version of a model, open and warm.

    Attributes:
        name: the model's name in requests.
        version: for example ``1.0``.
        predictor: the opened artifact with its card, engine and description. Only the service runs it.
        serving: the serving settings.
        service: answers requests.
        weight: share of the requests without a version, relative to the other versions. 0: none.
        checked: the checks that it passed before it was ready, a line each.
        unchecked: why its known answer was not checked. Empty: it was.
        digest: SHA-256 of the archive.
        lost: whether its device is lost or its engine hangs. The process then ends.
    """

    name: str
    version: str
    predictor: Predictor
    serving: Serving
    service: Service
    weight: int = 1
    checked: tuple[str, ...] = ()
    unchecked: str = ""
    digest: str = ""
    lost: bool = False
    _holders: int = field(default=0, repr=False)
    _credit: int = field(default=0, repr=False)
    _free: asyncio.Event | None = field(default=None, repr=False)

    @property
    def ready(self) -> bool:
        """Whether it can answer requests.

        All its files match the card, it is warm, it gave its known answer if it has one, and its engine does not stall.
        """
        return not self.lost and not self.service.stalls

    def hold(self) -> None:
        """Keep its service open until `release`, even if another version replaces it."""
        self._holders += 1

    def release(self) -> None:
        """Undo one `hold`."""
        self._holders -= 1
        if self._holders == 0 and self._free is not None:
            self._free.set()

    @contextmanager
    def held(self) -> Iterator[Served]:
        """Keep its service open for the block."""
        self.hold()
        try:
            yield self
        finally:
            self.release()

    async def released(self) -> None:
        """Wait until nobody holds it. Remove it from `Models` first, or new requests keep holding it."""
        while self._holders:
            self._free = asyncio.Event()
            await self._free.wait()


class Models:
    """The models by name and version.

    Args:
        expected: names of the models that will be served. Until then a request for them gets 503, not 404.
    """

    def __init__(self, expected: Sequence[str] = ()) -> None:
        self.expected = tuple(expected)
        self._versions: dict[str, dict[str, Served]] = {}
        self._shares: dict[str, list[tuple[Served, int]]] = {}

    def __iter__(self) -> Iterator[Served]:
        """Yield every version of every model, by name and version."""
        for name in sorted(self._versions):
            for version in sorted(self._versions[name]):
                yield self._versions[name][version]

    @property
    def names(self) -> list[str]:
        """The models that are served or will be, sorted."""
        return sorted({*self.expected, *self._versions})

    @property
    def ready(self) -> bool:
        """Whether every expected model is loaded and every version is ready."""
        return all(name in self._versions for name in self.names) and all(served.ready for served in self)

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, sorted. Empty if it is unknown or not loaded yet."""
        return sorted(self._versions.get(name, ()))

    def get(self, name: str, version: str | None = None) -> Served:
        """Return the version that answers a request: the named one, or the next one by weight.

        Raises:
            RefusedError: 404 if there is no such model or version, 503 if it is not loaded yet.
        """
        versions = self._versions.get(name)
        if versions is None:
            if name in self.expected:
                raise try_again(f"model {name} is being loaded: try again later", "not-ready")
            known = self.names
            hint = did_you_mean(name[:100], known)
            raise RefusedError(
                404,
                f"there is no model {name[:100]!r}{hint}; the models are {', '.join(known) or 'none'}",
                "unknown-model",
            )
        if version is None:
            return _next_by_weight([*versions.values()])
        if version not in versions:
            raise RefusedError(
                404,
                f"model {name} has no version {version[:40]!r}; there are {', '.join(sorted(versions))}",
                "unknown-model",
            )
        return versions[version]

    def only(self, name: str, version: str | None = None) -> Served | None:
        """Return the version that every such request goes to. None: there is none, or several share the requests."""
        versions = self._versions.get(name, {})
        if version is not None:
            return versions.get(version)
        return next(iter(versions.values())) if len(versions) == 1 else None

    def replace(self, served: Mapping[str, Sequence[Served]]) -> list[Served]:
        """Serve these versions and no others from the next request on.

        If the versions or weights of a model change, its round-robin starts again. Otherwise a version could get
        requests from its old weight although its new weight is 0.

        Returns:
            The versions that were removed. The caller waits for their release, then drains and closes them.
        """
        before = list(self)
        self.expected = tuple(served)
        self._versions = {name: {entry.version: entry for entry in entries} for name, entries in served.items()}
        shares = {name: [(entry, entry.weight) for entry in entries] for name, entries in served.items()}
        for name, weighted in shares.items():
            if weighted != self._shares.get(name):
                for entry, _ in weighted:
                    entry._credit = 0
        self._shares = shares
        staying = set(map(id, self))
        return [entry for entry in before if id(entry) not in staying]


def _next_by_weight(versions: list[Served]) -> Served:
    """Return the next version. Of any total-of-weights requests in a row, each version gets as many as its weight.

    Smooth weighted round-robin, as in nginx: each version gains its weight, the richest is chosen and pays the total.
    """
    if len(versions) == 1:
        return versions[0]
    total = 0
    for entry in versions:
        entry._credit += entry.weight
        total += entry.weight
    chosen = max(versions, key=lambda entry: entry._credit)
    chosen._credit -= total
    return chosen
