"""What is known of one model of the zoo: a record, kept in a file of its own, which grows stage by stage."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter

from optimize.measure.figures import Record

Status = Literal["ok", "failed", "not made"]


#: How far above rounding the images of a drawn network stand (``Signal.rounding_db``) for int8 to mean anything.
CLEAR_DB = 6.0


class Signal(Record):
    """That a network's answers depend on what it sees.

    ``image_share`` is how much of the power (mean square) of what the head reads differs between images, and
    ``rounding_db`` how far that difference is above what changes there where each layer has weights, and gives
    numbers, of 8 bits: below 0 dB an int8 network of these weights answers noise, whatever made it. ``top1`` is the
    fitted head's, on ``images`` that nothing was fitted on. Of records without ``weights_rounded`` the weights
    stayed exact, of those without ``pooled_rounded`` pooled maps. ``branches`` are a deep transformer's, whose sums
    were rounded, too, and which were drawn small; 0 for others. ``widest`` is the largest integer of a weight: 63 on a
    CPU without VNNI. ``largest`` is that of an activation: 127 in records of such CPUs from when those had 7 bits.
    """

    image_share: float
    rounding_db: float
    top1: float
    images: int
    weights_rounded: bool = False
    pooled_rounded: bool = False
    branches: int = 0
    largest: int = 255
    widest: int = 127


class Agreement(Record):
    """Logits of ``engine`` against those of ``reference`` on ``images`` images.

    ``sqnr_db`` is that of the part that differs between images: each class's mean over them is taken from both, so that
    an offset that all images share counts as no signal. None where they are equal to the last bit.
    """

    engine: str
    reference: Literal["float", "integers"]
    top1: float
    sqnr_db: float | None
    images: int


class Passed(Record):
    """What became of one stage.

    ``seconds`` it took of processor time, ``bytes`` of its model file, ``reason`` why it was not made.
    """

    status: Status
    seconds: float | None = None
    bytes: int | None = None
    reason: str | None = None
    notes: tuple[str, ...] = ()
    agreements: tuple[Agreement, ...] = ()


class Speed(Record):
    """Milliseconds (p50) of one image by the fastest execution in int8 and the fastest in float.

    ``low`` and ``high`` are the 95 % interval of float over int8, None where they did not take turns.
    """

    int8: str
    int8_ms: float
    float_: str
    float_ms: float
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as fast int8 is."""
        return self.float_ms / self.int8_ms


class ModelRecord(Record):
    """One model: ``weights`` says whose, ``running`` the stage that a process is or was in.

    ``made_on`` is the day of its last stage, ``made_with`` the machine and the libraries.
    """

    name: str
    family: str
    weights: str = ""
    image_size: int = 0
    parameters: int = 0
    signal: Signal | None = None
    stages: dict[str, Passed] = Field(default_factory=dict)
    speed: Speed | None = None
    running: str | None = None
    peak_bytes: int = 0
    made_on: datetime.date | None = None
    made_with: str = ""

    @property
    def seconds(self) -> float:
        """Of processor time, of all stages that are known."""
        return sum(stage.seconds or 0.0 for stage in self.stages.values())


def read(path: Path) -> ModelRecord | None:
    """A record, or None where there is none yet."""
    return ModelRecord.model_validate_json(path.read_bytes()) if path.exists() else None


def write(record: ModelRecord, path: Path) -> None:
    """Keep a record, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(record.model_dump_json(indent=1), encoding="utf-8")
    scratch.replace(path)


def read_all(path: Path) -> list[ModelRecord]:
    """Read every model's record of one file."""
    return TypeAdapter(list[ModelRecord]).validate_json(path.read_bytes())


def write_all(records: list[ModelRecord], path: Path) -> None:
    """Write every model's record into one file."""
    body = TypeAdapter(list[ModelRecord]).dump_json(records, indent=1)
    path.write_bytes(body + b"\n")
