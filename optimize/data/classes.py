"""Replaces the names of classes, for data whose folders are named by numbers or codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from optimize.data.records import ImageData
from serve.runtime.card.fields import text
from serve.runtime.errors import CardError, UserError


def with_classes(data: ImageData, given: Path | Sequence[str]) -> ImageData:
    """Return ``data`` with other names for its classes, in order: ``given``, or those of a file (UTF-8, one a line).

    Raises:
        UserError: the file cannot be read or has an empty line among the names, or the number of names is wrong.
    """
    names, place = (read_classes(given), str(given)) if isinstance(given, Path) else (tuple(given), "classes")
    if len(names) != len(data.classes):
        raise UserError(
            f"{place}: has {len(names)} names, and {data.name} has {len(data.classes)} classes ({data.classes[0]} "
            f"… {data.classes[-1]}); give one name for each class, in this order"
        )
    return dataclasses.replace(data, classes=names)


def check_classes(data: ImageData) -> None:
    """Refuse names that no card can hold, such as those of folders whose names are not UTF-8.

    Raises:
        UserError: a name is not text of one line. The message has it.
    """
    for name in data.classes:
        try:
            text("a class", name)
        except CardError as error:
            raise UserError(f"{data.name}: {error}; rename it, or give all names by --classes FILE") from None


def read_classes(file: Path) -> tuple[str, ...]:
    """Return the lines of a file, without the white space around them.

    Raises:
        UserError: the file cannot be read, or has an empty line among the names.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"the class names in {file} cannot be read: {reason}") from None
    names = tuple(line.strip() for line in lines)
    if "" in names:
        raise UserError(f"{file}:{names.index('') + 1}: is empty; each line must name a class")
    return names
