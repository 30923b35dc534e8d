"""The models that are served, by name and version: who answers a request, and how versions change places.

Changed and read in the event loop only.
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
        name: of the model, as it is asked for.
        version: a word such as ``1.0``.
        predictor: the opened artifact: its card, engine and description. Only the service runs it.
        serving: how it is served.
        service: answers requests.
        weight: its share of the requests that ask for no version, against the other versions'; 0: none.
        checked: what was seen of it before it was called ready, a line each.
        unchecked: why it is ready without having been asked for a known answer; empty: it gave it.
        digest: SHA-256 of that archive.
        lost: whether its device is, or its engine hangs: the process ends.
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
        """Whether it answers as it should.

        It was opened with every file as its card says, warm, and its known image answered; and its engine goes on.
        """
        return not self.lost and not self.service.stalls

    def hold(self) -> None:
        """Keep its service open until `release`, though another version take its place meanwhile."""
        self._holders += 1

    def release(self) -> None:
        """Keep it open no longer, as far as one `hold` is concerned."""
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
        """Wait until nobody holds it. It must be out of `Models` by then, or there is always somebody."""
        while self._holders:
            self._free = asyncio.Event()
            await self._free.wait()


class Models:
    """The models by name and version.

    Args:
        expected: names of the models that will be served, which are refused with 503 and not 404 until then.
    """

    def __init__(self, expected: Sequence[str] = ()) -> None:
        self.expected = tuple(expected)
        self._versions: dict[str, dict[str, Served]] = {}
        self._shares: dict[str, list[tuple[Served, int]]] = {}

    def __iter__(self) -> Iterator[Served]:
        """Every version of every model, by name and version."""
        for name in sorted(self._versions):
            for version in sorted(self._versions[name]):
                yield self._versions[name][version]

    @property
    def names(self) -> list[str]:
        """The models that are served or will be, sorted."""
        return sorted({*self.expected, *self._versions})

    @property
    def ready(self) -> bool:
        """Whether every model that is expected is there, and every version of it as it should be."""
        return all(name in self._versions for name in self.names) and all(served.ready for served in self)

    def versions(self, name: str) -> list[str]:
        """The versions of a model, sorted; empty where it is unknown or not loaded yet."""
        return sorted(self._versions.get(name, ()))

    def get(self, name: str, version: str | None = None) -> Served:
        """The version that answers a request: the one that is named, or each in its turn by weight.

        Raises:
            RefusedError: 404 where there is no such model or version; 503 where it is not loaded yet.
        """
        versions = self._versions.get(name)
        if versions is None:
            if name in self.expected:
                raise try_again(f"model {name} is being loaded: try again later", "not-ready")
            known = self.names
            hint = did_you_mean(name[:100], known)
            raise RefusedError(
                404, f"there is no model {name[:100]!r}{hint}; served are {', '.join(known) or 'none'}", "unknown-model"
            )
        if version is None:
            return _in_turn([*versions.values()])
        if version not in versions:
            raise RefusedError(
                404,
                f"model {name} has no version {version[:40]!r}; there are {', '.join(sorted(versions))}",
                "unknown-model",
            )
        return versions[version]

    def only(self, name: str, version: str | None = None) -> Served | None:
        """The version that any such request goes to; None: there is none, or several take turns."""
        versions = self._versions.get(name, {})
        if version is not None:
            return versions.get(version)
        return next(iter(versions.values())) if len(versions) == 1 else None

    def replace(self, served: Mapping[str, Sequence[Served]]) -> list[Served]:
        """Serve these versions by the models' names, and no others, from the next request on.

        Where a model's versions or weights are others than before, their turns begin anew: what a version had still to
        get by the old ones would go to it though its weight be 0 now.

        Returns:
            The versions that are out: to be released, drained and closed by the caller.
        """
        before = list(self)
        self.expected = tuple(served)
        self._versions = {name: {entry.version: entry for entry in entries} for name, entries in served.items()}
        shares = {name: [(entry, entry.weight) for entry in entries] for name, entries in served.items()}
        for name, told in shares.items():
            if told != self._shares.get(name):
                for entry, _ in told:
                    entry._credit = 0
        self._shares = shares
        staying = set(map(id, self))
        return [entry for entry in before if id(entry) not in staying]


def _in_turn(versions: list[Served]) -> Served:
    """The next of the versions, so that of any total-of-weights requests in a row each gets its weight.

    Smooth weighted round-robin, as nginx does it: each gains its weight, the richest is taken and pays the total.
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
