"""The interface of a data format and the registry of formats.

Help texts list formats, so a format's module imports its libraries only when it opens data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from optimize.listener import SILENT, Listener
from serve.common.layout import PLAIN_DATA
from serve.runtime.errors import UserError, did_you_mean, listed
from serve.runtime.registry import Registry, defined_at

if TYPE_CHECKING:
    from optimize.data.records import ImageData

#: The option that accepts incomplete data.
GAPS_FLAG: Final = "--accept-gaps"

#: The format that most folders have.
_USUAL: Final = "imagefolder"

#: Seeds are below this. Trainings multiply theirs by a million for each process and epoch, and generators take 64 bits.
SEEDS: Final = 1 << 32


@dataclass(frozen=True)
class DataFormat:
    """One way to name a data set.

    Attributes:
        name: the word before the colon, or the whole reference.
        open: makes the data set from the text after the colon (which may be empty), a seed for the split if the data
            set has none, and a listener. It may be called from any thread.
        place: what follows the colon, for help and messages, such as ``DIR``. Empty if nothing may follow.
        summary: one line for listings.
        default_of: name of the task whose networks get these data if none are named. It needs no download then.
    """

    name: str
    open: Callable[[str, int, Listener], ImageData]
    summary: str
    place: str = ""
    default_of: str = ""

    @property
    def usage(self) -> str:
        """Return how to write it: ``imagefolder:DIR``."""
        return f"{self.name}:{self.place}" if self.place else self.name


_REGISTRY: Registry[DataFormat] = Registry(
    "data format", package="optimize.data.formats", group="optimize.data_formats"
)


def register(entry: DataFormat) -> DataFormat:
    """Add a format to the registry. Its name must be new."""
    return _REGISTRY.register(entry, defined_at(entry.open))


def formats() -> dict[str, DataFormat]:
    """Return all formats by name."""
    return _REGISTRY.all()


def default_data(task: str | None) -> str:
    """Return the reference of the data for a network of a task, if none are named. None: its task is unknown."""
    return next((entry.name for entry in formats().values() if task and entry.default_of == task), PLAIN_DATA)


def usages() -> list[str]:
    """Return how to write each format, sorted by name: ``cifar10``, ``imagefolder:DIR``."""
    return [entry.usage for entry in formats().values()]


def open_data(reference: str, *, seed: int = 0, listener: Listener = SILENT, accept_gaps: bool = False) -> ImageData:
    """Open a data set by its reference, such as ``digits`` or ``imagefolder:DIR``.

    Args:
        reference: the user's text. In a name without a place, case and hyphens do not matter.
        seed: the seed of the split, if the data set has none. It must be below `SEEDS`.
        listener: receives the progress.
        accept_gaps: accept incomplete data, such as a class without validation images. The gap becomes a note.

    Raises:
        UserError: the data is incomplete and that is not accepted. Or the format or folder does not exist, cannot be
            read or downloaded, or is not a classification data set of at least two classes. Or the seed is not valid.
    """
    if not 0 <= seed < SEEDS:
        raise UserError(f"seed must be from 0 to {SEEDS - 1}, got {seed}")
    known = formats()
    word, colon, place = reference.partition(":")
    entry = known.get(word) or known.get(word.lower().replace("-", "").replace("_", ""))
    if entry is None or bool(colon) != bool(entry.place):
        if entry is not None:
            raise UserError(f"data {reference!r}: write {entry.usage}")
        near = _near(reference, word, known)
        raise UserError(f"there is no data set {reference!r}{near}; known: {', '.join(usages())}")
    if entry.place and not place:
        raise UserError(f"{word} needs {entry.place}: {entry.usage}")
    data = entry.open(place, seed, listener)
    if data.gaps and not accept_gaps:
        raise UserError(f"{'; '.join(data.gaps)}; if you want that, add {GAPS_FLAG} (accept_gaps=True in Python)")
    return dataclasses.replace(data, gaps=(), notes=(*data.gaps, *data.notes)) if data.gaps else data


def _near(reference: str, word: str, known: Mapping[str, DataFormat]) -> str:
    """Suggest what may have been meant: for a folder, the words to put before it."""
    if Path(reference).is_dir():
        words = sorted((name for name, entry in known.items() if entry.place == "DIR"), key=_USUAL.__ne__)
        return f" (did you mean {words[0]}:{reference}? {listed(words[1:])} open folders, too)" if words else ""
    return did_you_mean(word, known)
