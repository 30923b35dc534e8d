"""Names images that cannot be read, and limits their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimize.data.sources import Selected
from serve.runtime.errors import UserError

#: The most images that a message names. Of the others it gives only the number.
NAMED = 10


def place(sources: Sequence[Any], index: int) -> str:
    """Return the name of an image in messages: its file, or its number in its data set."""
    source = sources[index]
    if isinstance(source, Path):
        return str(source)
    return f"image {int(sources.rows[index]) if isinstance(sources, Selected) else index}"


def named(found: Mapping[int, str], sources: Sequence[Any]) -> str:
    """Name up to `NAMED` of them with the reason, then a count: ``a.jpg: not an image …; b.jpg: …; and 3 more``."""
    rows = sorted(found)
    parts = [f"{place(sources, row)}: {found[row]}" for row in rows[:NAMED]]
    if len(rows) > NAMED:
        parts.append(f"and {len(rows) - NAMED} more")
    return "; ".join(parts)


def refused(found: Mapping[int, str], sources: Sequence[Any], remedy: str, *, more: bool = False) -> UserError:
    """Return the error that names what cannot be read.

    Args:
        found: the reason for each row of ``sources`` that cannot be read, at least one.
        sources: the images.
        remedy: what the user can do, as the end of the message.
        more: whether some of ``sources`` were not read.
    """
    if len(found) == 1 and not more:
        return UserError(f"{named(found, sources)}; {remedy}" if remedy else named(found, sources))
    least = "at least " if more else ""
    ending = f"; {remedy}" if remedy else ""
    return UserError(f"{least}{len(found)} of {len(sources)} images cannot be read: {named(found, sources)}{ending}")
