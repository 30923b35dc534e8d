"""Reads a loss of accuracy and compares it with a limit. No accepted number can mean both a fraction and points."""

from __future__ import annotations

import re
from typing import Final, Literal

from serve.runtime.errors import UserError

#: The border between the units. Nobody wants a larger fraction, or fewer points. It is 5 points, or 5 images of 10,000.
BETWEEN: Final = 0.05

#: Far less than one image of any data set, and far more than a rounding error.
_ROUNDING: Final = 1e-9

_WORDS = re.compile(r"(?P<number>\+?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>pp|points?|)", re.ASCII)


def within(delta: float, max_drop: float) -> bool:
    """Return whether a difference of accuracy is not a loss beyond ``max_drop``.

    Both are fractions, ``max_drop`` from 0. At the limit a loss is a whole number of images, which fractions only
    approximate. 7 of 1000 are within 0.7 points.
    """
    return delta >= -max_drop - _ROUNDING


def drop_of(words: str, *, plain: Literal["fraction", "points"]) -> float:
    """Return the fraction that ``--max-drop`` means: ``0.5pp``, ``0.5 points``, or a bare number.

    A bare number of up to 0.05 can only be a fraction, and one above it only points. So no number except 0 is accepted
    by two commands that read it differently.

    Args:
        words: the text on the command line.
        plain: the unit of a bare number for this command.

    Raises:
        UserError: it is not a loss, or it certainly means the other unit.
    """
    words = words.strip()
    found = _WORDS.fullmatch(words)
    if found is None:
        raise UserError(f"--max-drop must be a loss of accuracy such as 0.5pp (half a percentage point), not {words!r}")
    number = float(found["number"])
    if number > 100:
        raise UserError(f"--max-drop must be at most 100 percentage points, not {words!r}")
    if found["unit"]:
        return number / 100
    if plain == "points":
        if 0 < number <= BETWEEN:
            raise UserError(
                f"--max-drop {words} is {number:g} percentage points here; write {number:g}pp if you want that, or "
                f"{_points(number)} for the fraction {number:g}"
            )
        return number / 100
    if number > BETWEEN:
        fraction = f", or {_points(number)} for the fraction {number:g}" if number <= 1 else ""
        raise UserError(
            f"--max-drop {words} is a fraction here, which must be at most {BETWEEN:g}; write {number:g}pp for "
            f"{number:g} percentage points{fraction}"
        )
    return number


def _points(fraction: float) -> str:
    return f"{fraction * 100:g}pp"
