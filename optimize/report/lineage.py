"""Lays out the picture of the artifacts' descent: parents to the left, children to the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimize.measure.rows import Row

NODE_WIDTH, NODE_HEIGHT = 204, 58
_GAP_X, _GAP_Y, _MARGIN = 60, 16, 8


@dataclass(frozen=True)
class Node:
    """One artifact's box. ``x`` and ``y`` are its upper left corner in pixels."""

    row: Row
    x: float
    y: float


@dataclass(frozen=True)
class Lineage:
    """The boxes, and the curves between them as SVG path data."""

    nodes: tuple[Node, ...]
    edges: tuple[str, ...]
    width: float
    height: float
    node_width: int
    node_height: int


def layout(rows: Sequence[Row]) -> Lineage:
    """Place every artifact one column right of its parent, and level with the middle of its children.

    A parent that is not among the rows is ignored.
    """
    by_name = {row.name: row for row in rows}
    parents = {row.name: [row.parent] if row.parent in by_name else [] for row in rows}
    depth = dict.fromkeys(parents, 0)
    for _ in parents:  # a longest path has at most this many steps, even if the rows contain a cycle
        for name, above in parents.items():
            depth[name] = min(max((depth[p] + 1 for p in above), default=0), len(parents) - 1)
    children: dict[str, list[str]] = {name: [] for name in parents}
    for name, above in parents.items():
        if above:
            children[max(above, key=lambda p: depth[p])].append(name)

    level: dict[str, float] = {}
    free = 0.0

    def place(name: str) -> None:
        nonlocal free
        level[name] = free
        below = [child for child in children[name] if child not in level]
        for child in below:
            place(child)
        if below:
            level[name] = (level[below[0]] + level[below[-1]]) / 2
        else:
            free += 1

    for name, above in parents.items():
        if not above:
            place(name)
    for name in parents:
        if name not in level:
            place(name)

    nodes = {
        name: Node(
            by_name[name],
            _MARGIN + depth[name] * (NODE_WIDTH + _GAP_X),
            _MARGIN + level[name] * (NODE_HEIGHT + _GAP_Y),
        )
        for name in parents
    }
    edges = tuple(_edge(nodes[parent], nodes[name]) for name, above in parents.items() for parent in above)
    return Lineage(
        nodes=tuple(nodes.values()),
        edges=edges,
        width=max((n.x for n in nodes.values()), default=0) + NODE_WIDTH + _MARGIN,
        height=max((n.y for n in nodes.values()), default=0) + NODE_HEIGHT + _MARGIN,
        node_width=NODE_WIDTH,
        node_height=NODE_HEIGHT,
    )


def _edge(parent: Node, child: Node) -> str:
    x1, y1 = parent.x + NODE_WIDTH, parent.y + NODE_HEIGHT / 2
    x2, y2 = child.x - 5, child.y + NODE_HEIGHT / 2
    bend = x1 + (x2 - x1) / 2
    return f"M{x1:g},{y1:g} C{bend:g},{y1:g} {bend:g},{y2:g} {x2:g},{y2:g}"
