"""Formats every figure of a report, in the terminal and on the page alike."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Literal

#: The text for a number that does not exist.
NONE = "–"

Family = Literal["float", "half", "int"]


def family(precision: str) -> Family:
    """Return the family, and so colour and shape, of a precision such as ``int8``, ``bfloat16`` or ``float32``."""
    return "int" if "int" in precision else "half" if "16" in precision else "float"


def number(x: float | None, unit: str = "") -> str:
    """Format with about three significant digits, never with an exponent."""
    if x is None:
        return NONE
    text = f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}" if abs(x) >= 0.1 else f"{x:.3f}"
    return f"{text} {unit}".replace("-", "−").rstrip()


def small(x: float | None) -> str:
    """Format with two significant digits, with an exponent if that is shorter (1.2e−05)."""
    return NONE if x is None else f"{x:.2g}".replace("-", "−")


def figure(x: float) -> str:
    """Format any figure of a layer: a count unchanged, others with about three digits."""
    if float(x).is_integer():
        return f"{x:,.0f}".replace("-", "−")
    return number(x) if abs(x) >= 0.1 else f"{x:.3g}".replace("-", "−")


def percent(x: float | None) -> str:
    """Format a fraction as per cent with two decimals, without the sign."""
    return NONE if x is None else f"{100 * x:.2f}"


def points(x: float | None) -> str:
    """Format a difference of fractions as percentage points, signed unless zero."""
    if x is None:
        return NONE
    text = f"{100 * x:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def times(x: float | None) -> str:
    """Format a ratio such as ``5.87×``: two decimals, fewer for a large one, two digits for a small one."""
    if x is None:
        return NONE
    return f"{x:.0f}×" if x >= 100 else f"{x:.1f}×" if x >= 10 else f"{x:.2f}×" if x >= 0.1 else f"{x:.2g}×"


def size(x: float | None) -> str:
    """Format bytes in decimal kB, MB or GB."""
    if x is None:
        return NONE
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(x) >= scale:
            return number(x / scale, unit)
    return f"{x:.0f} B"


def seconds(x: float | None) -> str:
    """Format a duration in seconds, or minutes and seconds."""
    if x is None:
        return NONE
    if round(x) >= 120:
        minutes, rest = divmod(round(x), 60)
        return f"{minutes} min {rest:02d} s"
    return f"{x:.0f} s" if x >= 10 else f"{x:.1f} s"


def moment(at: datetime.datetime) -> str:
    """Format a time to the minute, in UTC."""
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def day(at: datetime.datetime) -> str:
    """Format a date, in UTC."""
    return f"{at.astimezone(datetime.UTC):%Y-%m-%d}"


def count(x: float | None) -> str:
    """Format a whole number with separated thousands."""
    return NONE if x is None else f"{x:,.0f}"


def plural(x: int, noun: str) -> str:
    """Format a count with its noun: ``1 round``, ``2 rounds``."""
    return f"{count(x)} {noun}" + ("" if x == 1 else "s")


def signed(x: int, sign: str) -> str:
    """Format a count with the sign of its meaning. Zero has none."""
    return "0" if x == 0 else f"{sign}{count(x)}"


def plain(value: object) -> str:
    """Format a setting: whole numbers of a sequence as ``224 × 224``, others with commas."""
    if value is None:
        return NONE
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return str(value)
    return " × ".join(map(str, value)) if all(isinstance(v, int) for v in value) else ", ".join(map(str, value))
