"""The artifact's card: the single source of truth about a model file, and the proof that it is whole.

A folder that holds ``card.json`` and the files it names is an artifact. Nothing else about it is
remembered anywhere: the runtime loads by the card and refuses a folder that does not match it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from .errors import CardError

SCHEMA = 1
CARD_FILE = "card.json"

Format = Literal["exported_program", "torchscript", "onnx"]
Device = Literal["any", "cpu", "cuda"]
Interpolation = Literal["nearest", "bilinear", "bicubic"]
FloatType = Literal["float32", "float16", "bfloat16"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Preprocessing:
    """How bytes become the network's input: decode, resize, centre-crop, scale to [0, 1], normalise.

    ``resize`` is the length in pixels that the shorter side is scaled to (antialiased); ``crop`` is
    the ``(height, width)`` cut from the centre, which is the network's input size; ``mean`` and
    ``std`` have one number per channel (three: RGB, one: grey) and apply after scaling to [0, 1].
    """

    resize: int
    crop: tuple[int, int]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if self.resize < 1 or len(self.crop) != 2 or min(self.crop) < 1:
            raise CardError(f"preprocessing: sizes must be positive, got resize={self.resize} crop={self.crop}")
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise CardError(
                f"preprocessing: mean and std need one number per channel (1 or 3), "
                f"got {len(self.mean)} and {len(self.std)}"
            )
        if min(self.std) <= 0:
            raise CardError(f"preprocessing: std must be positive, got {self.std}")
        if self.interpolation not in get_args(Interpolation):
            raise CardError(
                f"preprocessing: interpolation {self.interpolation!r} is not one of {get_args(Interpolation)}"
            )

    @property
    def channels(self) -> int:
        """Channels of the network's input: 3 (RGB) or 1 (grey)."""
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape ``(C, H, W)`` of one input."""
        return (self.channels, *self.crop)


@dataclass(frozen=True)
class Ancestor:
    """One step of an artifact's history: what was done, with which settings, and the key it was stored by."""

    name: str
    operation: str
    config: Mapping[str, Any]
    key: str


@dataclass(frozen=True)
class Card:
    """Everything that is known about one artifact; see the module's docstring.

    Attributes:
        name: the artifact's name within its run, such as ``ptq``.
        model: what was optimised, such as ``resnet18``.
        format: which engine opens ``file``.
        file: the model file's name within the folder.
        precision: what the weights and the arithmetic really are (``float32``, ``int8`` …).
        input_dtype: dtype of the network's input tensor, which has shape ``(N, *preprocessing.shape)``.
        device: where the file can run: ``cpu``, ``cuda`` or ``any``.
        preprocessing: bytes to input tensor.
        classes: label of each output index.
        files: SHA-256 of every file of the folder but the card, by name.
        lineage: ancestors, oldest first, this artifact last.
        data: name, fingerprint and sizes of the data it was made and measured with.
        versions: versions of the libraries that made it.
        machine: the machine that made it.
        measurements: what was measured of it, and on which machine; empty until measured.
        notes: remarks for a reader, such as a fallback that was taken.
    """

    name: str
    model: str
    format: Format
    file: str
    precision: str
    input_dtype: FloatType
    device: Device
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    files: Mapping[str, str]
    lineage: tuple[Ancestor, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    measurements: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("format", self.format, get_args(Format)),
            ("device", self.device, get_args(Device)),
            ("input_dtype", self.input_dtype, get_args(FloatType)),
        ):
            if value not in allowed:
                raise CardError(f"card: {name} {value!r} is not one of {', '.join(allowed)}")
        if self.file not in self.files:
            raise CardError(f"card: no SHA-256 is given for the model file {self.file!r}")
        if not self.classes:
            raise CardError("card: the list of classes is empty")

    @property
    def content(self) -> str:
        """SHA-256 over the names and hashes of the artifact's files: equal contents, equal digest."""
        return hashlib.sha256(_canonical(dict(self.files))).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_card(folder: Path, card: Card) -> None:
    """Write ``card`` into ``folder`` atomically, sealed with the SHA-256 of its own content."""
    body = dataclasses.asdict(card)
    body["seal"] = hashlib.sha256(_canonical(body)).hexdigest()
    temporary = folder / f".{CARD_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(body, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(folder / CARD_FILE)


def read_card(folder: Path) -> Card:
    """Read and check ``folder/card.json``, without hashing the files it names.

    Raises:
        CardError: it is missing, is not valid JSON of this schema, or its seal is broken.
    """
    path = folder / CARD_FILE
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CardError(f"{folder}: not an artifact folder, there is no {CARD_FILE}") from None
    except (OSError, ValueError) as error:
        raise CardError(f"{path}: cannot be read ({error})") from None
    if not isinstance(body, dict):
        raise CardError(f"{path}: must hold one JSON object, found {type(body).__name__}")
    seal = body.pop("seal", None)
    if body.get("schema") != SCHEMA:
        raise CardError(f"{path}: schema {body.get('schema')!r}; this runtime reads schema {SCHEMA}")
    if hashlib.sha256(_canonical(body)).hexdigest() != seal:
        raise CardError(f"{path}: the card was changed after it was written (its seal does not match)")
    body["preprocessing"] = _record(Preprocessing, body.get("preprocessing"), path)
    body["lineage"] = [_record(Ancestor, entry, path) for entry in body.get("lineage", ())]
    return _record(Card, body, path)


def load_card(folder: Path) -> Card:
    """Read ``folder/card.json`` and check every file it names against its SHA-256.

    Raises:
        CardError: as `read_card`, or a file is missing or its bytes have changed.
    """
    card = read_card(folder)
    for name, expected in card.files.items():
        path = folder / name
        if not path.is_file():
            raise CardError(f"{folder}: the file {name} that the card names is missing")
        actual = sha256_file(path)
        if actual != expected:
            raise CardError(f"{path}: corrupted, SHA-256 {actual[:12]}… where the card says {expected[:12]}…")
    return card


def _record(kind: type[_T], body: object, path: Path) -> _T:
    """Build a dataclass from a JSON object, turning lists into tuples and refusing unknown fields."""
    if not isinstance(body, Mapping):
        raise CardError(f"{path}: {kind.__name__} must be a JSON object, found {type(body).__name__}")
    known = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(body) - known):
        raise CardError(f"{path}: unknown field {unknown[0]!r} in {kind.__name__}")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in body.items()})
    except TypeError as error:
        raise CardError(f"{path}: {kind.__name__} is incomplete ({error})") from None


def _canonical(body: object) -> bytes:
    """One byte string per JSON value, whatever the order of its keys."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
