"""Two methods to find the layers to leave in float. They differ in the number of trials. Nothing is measured here.

Each calls a test that costs a trial: does the network hold with these layers in float? It is known that it holds with
all of them in float, and does not with none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

#: Tells for a set of layers in float whether the network holds.
Holds = Callable[[frozenset[str]], bool]
MethodName = Literal["greedy", "halving"]
Method = Callable[[Sequence[str], Holds], frozenset[str]]


def greedy(layers: Sequence[str], holds: Holds) -> frozenset[str]:
    """Leave the most sensitive layers in float: 1, 2, 4 …, then as few as hold. Then drop those that are not needed.

    Args:
        layers: all layers, the most sensitive first.
        holds: see `Holds`.

    Returns:
        A set that holds: the whole if nothing smaller was found.
    """
    short, enough = 0, 1
    while enough < len(layers) and not holds(frozenset(layers[:enough])):
        short, enough = enough, min(2 * enough, len(layers))
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if holds(frozenset(layers[:middle])) else (middle, enough)
    # Without the last of them it did not hold. Only those before it may be unnecessary.
    return given_back(layers[: enough - 1], frozenset(layers[:enough]), holds)


def halving(layers: Sequence[str], holds: Holds) -> frozenset[str]:
    """Find the layers that matter without an order: try halves, then quarters …, and the complement of each.

    This is the minimizing delta debugging of Zeller and Hildebrandt ("Simplifying and Isolating Failure-Inducing
    Input", IEEE Transactions on Software Engineering 28 (2002), figure 6). No single layer of the result can be
    dropped.

    Args:
        layers: all layers, in any order. Neighbours are tried together.
        holds: see `Holds`.
    """
    kept, parts = list(layers), 2
    while len(kept) > 1:
        chunks = [kept[len(kept) * i // parts : len(kept) * (i + 1) // parts] for i in range(parts)]
        if smaller := next((chunk for chunk in chunks if holds(frozenset(chunk))), None):
            kept, parts = smaller, 2
            continue
        rest = ([name for name in kept if name not in chunk] for chunk in chunks) if parts > 2 else iter(())
        if smaller := next((others for others in rest if holds(frozenset(others))), None):
            kept, parts = smaller, max(parts - 1, 2)
        elif parts < len(kept):
            parts = min(2 * parts, len(kept))
        else:
            break
    return frozenset(kept)


def given_back(layers: Sequence[str], kept: frozenset[str], holds: Holds) -> frozenset[str]:
    """Drop layers from a set that holds, as many at once as possible.

    Args:
        layers: the layers to drop. Earlier ones rather stay.
        kept: a set that holds.
        holds: see `Holds`.
    """
    size = len(layers)
    while size:
        left = [name for name in layers if name in kept]
        for end in range(len(left), 0, -size):
            fewer = kept - set(left[max(0, end - size) : end])
            if fewer and holds(fewer):
                kept = fewer
        size //= 2
    return kept


METHODS: Final[dict[MethodName, Method]] = {"greedy": greedy, "halving": halving}
