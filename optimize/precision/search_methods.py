"""Two ways to find which layers to leave in float, told apart by how many trials they take. No measuring here.

Each is given a question that costs a trial: does the network hold what is asked of it with these layers in float? That
it does with all, and does not with none, is known before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

#: Layers that are left in float, and whether the network then holds.
Holds = Callable[[frozenset[str]], bool]
MethodName = Literal["greedy", "halving"]
Method = Callable[[Sequence[str], Holds], frozenset[str]]


def greedy(layers: Sequence[str], holds: Holds) -> frozenset[str]:
    """Leave the most sensitive layers in float: 1, 2, 4 …, then as few as hold; then give back what is not needed.

    Args:
        layers: all of them, the most sensitive first.
        holds: see `Holds`.

    Returns:
        A set that holds; the whole where nothing smaller was found.
    """
    short, enough = 0, 1
    while enough < len(layers) and not holds(frozenset(layers[:enough])):
        short, enough = enough, min(2 * enough, len(layers))
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if holds(frozenset(layers[:middle])) else (middle, enough)
    # Without the last of them it did not hold, so that only those before it may be there for nothing.
    return given_back(layers[: enough - 1], frozenset(layers[:enough]), holds)


def halving(layers: Sequence[str], holds: Holds) -> frozenset[str]:
    """Look for the layers that matter without knowing an order: halves, then quarters … and what is left beside each.

    The minimizing delta debugging of Zeller and Hildebrandt ("Simplifying and Isolating Failure-Inducing Input", IEEE
    Transactions on Software Engineering 28 (2002), figure 6): of the layers that it returns none alone can be given
    back.

    Args:
        layers: all of them, in any order; those that lie together are tried together.
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
    """Take layers out of a set that holds, as many at once as it goes on to hold without.

    Args:
        layers: which to take out, in the order of which should rather stay.
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
