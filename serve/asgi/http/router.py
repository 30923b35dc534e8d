"""Maps paths to handlers, by a tree of segments in which ``{name}`` matches any one segment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from serve.asgi.http.messages import RefusedError, Response

if TYPE_CHECKING:
    from serve.asgi.http.call import Call

Handler = Callable[["Call"], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """The handler of one path.

    Attributes:
        path: the pattern, for example ``/predictions/{name}``. Metrics and logs use it.
        handler: answers a `Call`. It refuses a request by raising `RefusedError`.
        public: whether it needs no token, like health probes.
    """

    path: str
    handler: Handler
    public: bool = False


@dataclass
class _Node:
    """One segment: the segments that may follow it, and the routes that end here, by method."""

    literal: dict[str, _Node] = field(default_factory=dict)
    parameter: tuple[str, _Node] | None = None
    routes: dict[str, Route] = field(default_factory=dict)


class Router:
    """The routes of one application. Fill it before the server starts, then read it in the event loop."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, methods: str, path: str, handler: Handler, *, public: bool = False) -> None:
        """Add a route.

        Args:
            methods: methods in capitals, separated by spaces: ``"GET"``, ``"POST PUT"``.
            path: the pattern. ``{name}`` matches any one segment and becomes a parameter of that name.
            handler: see `Route`.
            public: see `Route`.

        Raises:
            ValueError: the path has a handler for one of the methods, or a placeholder has two names.
        """
        node = self._root
        for segment in path.strip("/").split("/"):
            if segment.startswith("{"):
                name = segment.strip("{}")
                if node.parameter is None:
                    node.parameter = (name, _Node())
                if node.parameter[0] != name:
                    raise ValueError(f"{path}: {{{name}}} is called {{{node.parameter[0]}}} elsewhere")
                node = node.parameter[1]
            else:
                node = node.literal.setdefault(segment, _Node())
        for method in methods.split():
            if method in node.routes:
                raise ValueError(f"{method} {path} has a handler already")
            node.routes[method] = Route(path, handler, public)

    def find(self, method: str, raw_path: str) -> tuple[Route, dict[str, str]]:
        """Return the route of a request, and the values of its parameters.

        A literal segment wins over a placeholder. HEAD uses the route of GET.

        Args:
            method: the method in capitals.
            raw_path: the path before percent-decoding. An encoded slash belongs to its segment.

        Raises:
            RefusedError: 404 or 405.
        """
        segments = raw_path.strip("/").split("/")
        methods: set[str] = set()
        for node, parameters in _matches(self._root, segments, 0):
            route = node.routes.get(method) or (node.routes.get("GET") if method == "HEAD" else None)
            if route is not None:
                return route, parameters
            methods.update(node.routes)
        if methods and method == "OPTIONS":
            raise RefusedError(
                405,
                "this server does not answer browsers on pages of other sites (CORS): add the headers in a proxy "
                "in front of it, or send requests from your own back end",
                "method",
                (("allow", ", ".join(sorted(methods))),),
            )
        if methods:
            allowed = ", ".join(sorted(methods))
            raise RefusedError(
                405, f"{method[:20]} is not allowed here: use {allowed}", "method", (("allow", allowed),)
            )
        raise RefusedError(404, "there is nothing at this path: use /predictions/NAME", "path")


def _matches(node: _Node, segments: list[str], index: int) -> Iterator[tuple[_Node, dict[str, str]]]:
    if index == len(segments):
        yield node, {}
        return
    if (following := node.literal.get(segments[index])) is not None:
        yield from _matches(following, segments, index + 1)
    if node.parameter is not None and segments[index]:
        name, following = node.parameter
        for found, parameters in _matches(following, segments, index + 1):
            yield found, {name: unquote(segments[index]), **parameters}
