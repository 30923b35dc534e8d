"""What is known of one subject: a record in a file of its own, which grows row by row."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from optimize.measure.figures import Record


class Answered(Record):
    """Which of ``images`` evaluation images an engine answered correctly, a bit for each, in base64."""

    images: int
    bits: str

    @staticmethod
    def of(right: NDArray[np.bool_]) -> Answered:
        """From ``bool (N,)``."""
        return Answered(images=len(right), bits=base64.b64encode(np.packbits(right).tobytes()).decode())

    @property
    def right(self) -> NDArray[np.bool_]:
        """Of each image, ``bool (N,)``."""
        packed = np.frombuffer(base64.b64decode(self.bits), dtype=np.uint8)
        return np.unpackbits(packed, count=self.images).astype(bool)

    @property
    def top1(self) -> float:
        """Share of the images."""
        return float(self.right.mean())


class RowRecord(Record):
    """One way to quantize.

    ``inputs`` is the digest of what it was made from. ``reason`` says why there is no artifact. ``made_s`` is what
    quantizing took on an idle machine, without the export of the float graph, ``medians`` the median in ms of one image
    in each round, by engine; both are there once they were timed. ``absent`` says why an engine did not answer.
    """

    name: str
    ours: bool
    inputs: str
    reason: str | None = None
    bytes: int = 0
    answered: dict[str, Answered] = Field(default_factory=dict)
    absent: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    made_s: float | None = None
    medians: dict[str, tuple[float, ...]] = Field(default_factory=dict)

    @property
    def engine(self) -> str | None:
        """By which its top-1 is compared: the first that answered."""
        return next(iter(self.answered), None)

    @property
    def answers(self) -> Answered:
        """In that engine."""
        return self.answered[str(self.engine)]


class Timed(Record):
    """How the rows were timed: all in turns, ``running`` the processes that the machine ran when it began.

    None: the times are the store's, of an earlier command that did not say.
    """

    taken: datetime.datetime
    rounds: int
    seconds: float
    running: float | None = None


class SubjectRecord(Record):
    """One checkpoint: ``calibration`` images that ranges were found on, and what its rows were made with.

    ``created`` is when the last of them was made.
    """

    title: str
    words: str
    model: str
    data: str
    calibration: int
    cpu: str
    cores: int
    isa: tuple[str, ...]
    versions: dict[str, str]
    created: datetime.datetime
    rows: tuple[RowRecord, ...] = ()
    timed: Timed | None = None

    def same_bed(self, other: SubjectRecord) -> bool:
        """Whether rows of both can stand in one table: its words are of one machine and one number of images."""
        facts = ("model", "data", "calibration", "cpu", "cores", "isa")
        return all(getattr(self, fact) == getattr(other, fact) for fact in facts)

    def row(self, name: str) -> RowRecord | None:
        """The one of this name, if there is one."""
        return next((row for row in self.rows if row.name == name), None)

    def with_row(self, row: RowRecord, order: Sequence[str]) -> SubjectRecord:
        """With this row in the place of one of its name, in the order of the names."""
        rows = [*(other for other in self.rows if other.name != row.name), row]
        return self.model_copy(update={"rows": tuple(sorted(rows, key=lambda each: order.index(each.name)))})


def read(path: Path) -> SubjectRecord | None:
    """A record, or None where there is none yet."""
    return SubjectRecord.model_validate_json(path.read_bytes()) if path.exists() else None


def read_all(folder: Path) -> list[SubjectRecord]:
    """Those of all subjects, by title."""
    found = (read(path) for path in folder.glob("*.json"))
    return sorted((record for record in found if record is not None), key=lambda record: record.title)


def write(record: SubjectRecord, path: Path) -> None:
    """Keep a record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(record.model_dump_json(indent=1), encoding="utf-8")
    scratch.replace(path)
