"""Detects outputs that mean other classes than stated: whether another class order explains a network's answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from optimize.data.class_order import ORDER_FLAG, ORDERS

#: The other order must be right for this share of the images, and for this much more than the order in use …
_RIGHT, _GAIN = 0.5, 0.1
#: … and more than chance would explain, in standard errors of the paired difference.
_SURE = 5.0

_Rows = npt.NDArray[np.int64]


def misplaced(predicted: _Rows, labels: _Rows, classes: Sequence[str]) -> str | None:
    """Return a message if another class order fits the answers far better than the one in use, else None.

    Each half of the images is judged by the order that fits the other half best. So an order that only fits chance
    gains nothing.

    Args:
        predicted: ``(N,)``, the best output for each image.
        labels: ``(N,)``, the class of each image.
        classes: the names of the classes in the order in use.
    """
    even = np.arange(len(labels)) % 2 == 0
    right = np.empty(len(labels), bool)
    for half in (even, ~even):
        right[half] = _meant(predicted[~half], labels[~half], len(classes))[predicted[half]] == labels[half]
    used = predicted == labels
    gain = right.astype(np.float64) - used
    majority = np.bincount(labels, minlength=1).max() / max(1, len(labels))
    if len(gain) < 2 or right.mean() < max(_RIGHT, used.mean() + _GAIN, majority + _GAIN):
        return None
    if gain.mean() * np.sqrt(len(gain)) < _SURE * max(float(gain.std()), 1 / np.sqrt(len(gain))):
        return None
    meant = _meant(predicted, labels, len(classes))
    order = [classes[place] for place in meant]
    word = next((word for word, ordered in ORDERS.items() if list(ordered(classes)) == order), None)
    moved = np.flatnonzero(meant != np.arange(len(classes)))
    which = ", ".join(f"{place} is {order[place]!r} and not {classes[place]!r}" for place in moved[:3].tolist())
    return (
        f"the network's outputs seem to be in another order than the classes: top-1 is {used.mean():.1%}, and "
        f"would be {right.mean():.1%} if output {which}{' …' if len(moved) > 3 else ''}; give the order by "
        f"{ORDER_FLAG} " + (word or "FILE, with one name per line")
    )


def _meant(predicted: _Rows, labels: _Rows, classes: int) -> _Rows:
    """Assign a different class to each output, taking the most frequent pairs first."""
    pairs, counts = np.unique(predicted * classes + labels, return_counts=True)
    meant = np.full(classes, -1)
    free = np.ones(classes, bool)
    for pair in pairs[np.argsort(-counts, kind="stable")].tolist():
        output, label = divmod(pair, classes)
        if meant[output] < 0 and free[label]:
            meant[output], free[label] = label, False
    # An output without a pair keeps its class if that is free.
    for output in np.flatnonzero(meant < 0).tolist():
        if free[output]:
            meant[output], free[output] = output, False
    meant[meant < 0] = np.flatnonzero(free)
    return meant
