"""The artifact's card: all facts about a model file, and the proof that it is complete and unchanged.

A folder with ``card.json`` and the files that it names is an artifact. No other place has facts about it. The runtime
loads by the card, and refuses a folder that does not match it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

from ..display import Described
from ..errors import CardError
from . import fields
from .certificate import Certificate
from .json_documents import SEAL, parse_document, seal_of, sealed

SCHEMA = 2
CARD_FILE = "card.json"
_LARGEST_CARD = 64 << 20  # characters
_LONGEST_SIDE = 1 << 16  # pixels
#: Most channels of an image: RGB and alpha.
MOST_CHANNELS = 4

#: The format of a model file, for example ``onnx``. Each engine says which it opens.
Format = str
Device = Literal["any", "cpu", "cuda"]
Interpolation = Literal["nearest", "bilinear", "bicubic"]
#: The resize that keeps all of the image and its proportions; see `Preprocessing`.
Letterbox = Literal["letterbox"]
LETTERBOX: Final = "letterbox"
#: The value of all colours around an image for ``letterbox``. Detectors of YOLO's family are trained with it.
LETTERBOX_GREY: Final = 114
#: The type of the network's input. ``uint8``: raw pixels, which the graph itself normalises.
InputType = Literal["float32", "float16", "bfloat16", "uint8"]

#: The name of the only output of most networks.
LOGITS = "logits"

#: How answers are made from logits: shares of all classes that sum to one, or an independent probability of each class.
Probabilities = Literal["softmax", "sigmoid"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Preprocessing(Described):
    """How image bytes become the network's input: decode, resize, centre-crop, scale to [0, 1], normalise.

    ``resize`` is the length in pixels that the shorter side is scaled to (antialiased). Or it is the ``(height,
    width)`` that each image is scaled to, whatever its proportions. ``crop`` is the ``(height, width)`` cut from the
    centre, which is the network's input size. If ``resize`` is ``letterbox``, each image is scaled in its proportions
    to the largest size within ``crop``, and lies in the middle of a ground of `LETTERBOX_GREY`.

    ``mean`` and ``std`` have one number per channel and apply after scaling to [0, 1]. One channel is grey, two are
    grey and alpha, three RGB, four RGB and alpha. ``pixel_max`` is the white value of greys of more than 8 bits; black
    is 0. None: 65535 for 16 bits, 1 for floats, and 32-bit integers are refused.
    """

    resize: int | tuple[int, int] | Letterbox
    crop: tuple[int, int]
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: Interpolation = "bilinear"
    pixel_max: float | None = None

    def __post_init__(self) -> None:
        if self.resize != LETTERBOX:
            scaled = self.resize if isinstance(self.resize, list | tuple) else (self.resize, self.resize)
            if len(scaled) != 2 or isinstance(self.resize, str):
                raise CardError(
                    "preprocessing: resize must be one number (the shorter side), a height and a width, or "
                    f"{LETTERBOX}, found {fields.shown(self.resize)}"
                )
            for side in scaled:
                fields.whole("preprocessing: resize", side, 1, _LONGEST_SIDE)
        if len(fields.sequence("preprocessing: crop", self.crop)) != 2:
            raise CardError(f"preprocessing: crop must be a height and a width, found {fields.shown(self.crop)}")
        for side in self.crop:
            fields.whole("preprocessing: crop", side, 1, _LONGEST_SIDE)
        channels = [len(fields.sequence(f"preprocessing: {n}", v)) for n, v in (("mean", self.mean), ("std", self.std))]
        if channels[0] != channels[1] or not 1 <= channels[0] <= MOST_CHANNELS:
            raise CardError(
                f"preprocessing: mean and std need one number per channel (1 to {MOST_CHANNELS}), "
                f"got {channels[0]} and {channels[1]}"
            )
        for mean, std in zip(self.mean, self.std, strict=True):
            fields.number("preprocessing: mean", mean, -1e6, 1e6)
            fields.number("preprocessing: std", std, 1e-6, 1e6)
        fields.one_of("preprocessing: interpolation", self.interpolation, get_args(Interpolation))
        if self.pixel_max is not None:
            fields.number("preprocessing: pixel_max", self.pixel_max, 1e-6, 1e12)

    @property
    def channels(self) -> int:
        """Channels of the network's input: 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGB and alpha)."""
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape ``(C, H, W)`` of one input."""
        return (self.channels, *self.crop)

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after the resize of an image of this size.

        If ``resize`` is the shorter side, the longer one is rounded down, as in torchvision's ``Resize``. For
        ``letterbox`` the side with room to spare is rounded to the nearest pixel, and is at least one.
        """
        if isinstance(self.resize, tuple):
            return self.resize
        if self.resize == LETTERBOX:
            rows, columns = self.crop
            if height * columns >= width * rows:
                return rows, max(1, round(width * rows / height))
            return max(1, round(height * columns / width)), columns
        longer = int(self.resize * max(height, width) / min(height, width))
        return (self.resize, longer) if height <= width else (longer, self.resize)


@dataclass(frozen=True)
class Ancestor(Described):
    """One step of an artifact's history: the operation, its settings, and the key in the store.

    ``structure`` has facts about the network's shapes that only the step knows, for example the channels of each layer
    after pruning.
    """

    name: str
    operation: str
    config: Mapping[str, Any]
    key: str
    structure: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("name", "operation", "key"):
            fields.text(f"card: lineage: {name}", getattr(self, name))
        fields.json_object("card: lineage: config", self.config)
        fields.json_object("card: lineage: structure", self.structure)


@dataclass(frozen=True, repr=False)
class Card(Described):
    """Everything that is known about one artifact; see the module's docstring.

    Attributes:
        name: the artifact's name within its run, for example ``ptq``.
        model: the optimised model, for example ``resnet18``.
        task: what the network is for (see `tasks.base`).
        format: which engine opens ``file``.
        file: the model file's name within the folder.
        precision: the real type of weights and arithmetic (``float32``, ``int8`` …).
        input_dtype: dtype of the network's input tensor, which has shape ``(N, *preprocessing.shape)``.
        device: where the file can run: ``cpu``, ``cuda`` or ``any``.
        target: the integers that it was built for, for example ``x86-vnni`` (see `cpu_integers`). None if it has
            floats. An engine refuses a target that it, or this machine's processor, does not compute exactly.
        preprocessing: from image bytes to the input tensor.
        classes: names of the classes by their numbers. Empty if the task has none.
        files: SHA-256 of every file in the folder except the card, by plain name.
        lineage: ancestors, oldest first, this artifact last.
        data: name, fingerprint and sizes of the data for training and measurements.
        versions: versions of the libraries that made it.
        machine: the machine that made it.
        notes: remarks for a reader, for example on a fallback.
        packed: in an archive, SHA-256 of everything else in it (handler, runtime, configuration), by path. Empty in an
            artifact's own folder.
        certificate: how close each engine's answers are to the exact result of an INT8 artifact's integers. None if
            this was not measured.
        probabilities: how probabilities are made from logits, for tasks that do that.
        outputs: names of the network's outputs, in the order in which engines return them. The first one is trained.
            All are tensors, batch first.
        ending: names of further tensors that the file gives: those of the task's ``ending``. Empty: the file has none,
            and the runtime computes them.
    """

    name: str
    model: str
    task: str
    format: Format
    file: str
    precision: str
    input_dtype: InputType
    device: Device
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    files: Mapping[str, str]
    target: str | None = None
    lineage: tuple[Ancestor, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    packed: Mapping[str, str] = field(default_factory=dict)
    certificate: Certificate | None = None
    probabilities: Probabilities = "softmax"
    outputs: tuple[str, ...] = (LOGITS,)
    ending: tuple[str, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name in ("name", "model", "precision"):
            fields.text(f"card: {name}", getattr(self, name))
        fields.word("card: task", self.task)
        fields.word("card: format", self.format)
        fields.one_of("card: device", self.device, get_args(Device))
        fields.one_of("card: input_dtype", self.input_dtype, get_args(InputType))
        fields.one_of("card: probabilities", self.probabilities, get_args(Probabilities))
        if self.target is not None:
            fields.text("card: target", self.target)
        if not isinstance(self.preprocessing, Preprocessing):
            raise CardError(f"card: preprocessing must be a JSON object, found {fields.shown(self.preprocessing)}")
        for label in fields.sequence("card: classes", self.classes):
            fields.text("card: a class", label)
        self._check_outputs()
        self._check_files()
        for ancestor in fields.sequence("card: lineage", self.lineage):
            if not isinstance(ancestor, Ancestor):
                raise CardError(f"card: lineage must be JSON objects, found {fields.shown(ancestor)}")
        for name in ("data", "machine"):
            fields.json_object(f"card: {name}", getattr(self, name))
        for name, version in fields.mapping("card: versions", self.versions).items():
            fields.text(f"card: the version of {name}", version)
        for note in fields.sequence("card: notes", self.notes):
            fields.text("card: a note", note, longest=10_000)
        if self.certificate is not None and not isinstance(self.certificate, Certificate):
            raise CardError(f"card: certificate must be a JSON object, found {fields.shown(self.certificate)}")
        fields.whole("card: schema", self.schema, SCHEMA, SCHEMA)

    def _check_outputs(self) -> None:
        for output in fields.sequence("card: outputs", self.outputs):
            fields.text("card: an output", output)
        if not self.outputs or len(set(self.outputs)) != len(self.outputs):
            raise CardError(f"card: outputs must be one or more different names, found {fields.shown(self.outputs)}")
        for output in fields.sequence("card: ending", self.ending):
            fields.text("card: a tensor of the ending", output)
        if len({*self.outputs, *self.ending}) != len(self.outputs) + len(self.ending):
            raise CardError(f"card: ending must be names that differ, found {fields.shown(self.ending)}")

    def _check_files(self) -> None:
        fields.files("card: files", self.files)
        fields.files("card: packed", self.packed, folders=True)
        if not isinstance(self.file, str) or self.file not in self.files:
            raise CardError(f"card: there is no SHA-256 for the model file {fields.shown(self.file)}")
        names = [name.lower() for name in (*self.files, *self.packed)]
        if CARD_FILE in names or len(set(names)) != len(names):
            raise CardError("card: a file is listed twice, or is the card itself")

    @property
    def ended(self) -> Card:
        """The card whose `outputs` are the tensors that answers are made of: the ending's, if the file has it."""
        return dataclasses.replace(self, outputs=self.ending, ending=()) if self.ending else self

    @property
    def content(self) -> str:
        """SHA-256 over the names and hashes of the artifact's files. Equal contents have equal digests."""
        return seal_of(dict(self.files))


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_card(folder: Path, card: Card) -> None:
    """Write ``card`` into ``folder`` atomically, sealed with the SHA-256 of its own content."""
    certificate = card.certificate.to_json() if card.certificate else None
    body = sealed(dataclasses.asdict(card) | {"certificate": certificate})
    # A new file with a random name, so that an existing link is not followed.
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{CARD_FILE}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(body, indent=2, sort_keys=True, allow_nan=False) + "\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(folder / CARD_FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_card(folder: Path) -> Card:
    """Read and check ``folder/card.json``, without hashing the files it names.

    Raises:
        CardError: the card is missing, or not valid JSON of this schema, or a field is of the wrong type or out of
            range, or its seal is broken.
    """
    path = folder / CARD_FILE
    try:
        if not path.exists():
            raise CardError(f"{folder}: is not an artifact folder, it has no {CARD_FILE}")
        _check_regular(path)
        with path.open(encoding="utf-8") as stream:
            document = stream.read(_LARGEST_CARD + 1)
    except (OSError, ValueError) as error:
        raise CardError(f"{path}: cannot be read ({error})") from None
    return parse_card(document, path)


def parse_card(document: str, path: Path) -> Card:
    """Parse a card from the text of ``card.json``. ``path`` is only for messages.

    Raises:
        CardError: see `read_card`.
    """
    body = parse_document(document, path, _LARGEST_CARD)
    try:
        if not isinstance(body, dict):
            raise CardError(f"{path}: must hold one JSON object, found {type(body).__name__}")
        seal = body.pop(SEAL, None)
        if type(body.get("schema")) is not int or body["schema"] != SCHEMA:
            raise CardError(f"{path}: schema {fields.shown(body.get('schema'))}; this version reads schema {SCHEMA}")
        if seal_of(body) != seal:
            raise CardError(f"{path}: the card was changed after it was written (its seal does not match)")
    except (ValueError, RecursionError) as error:  # also for NaN and numbers of thousands of digits
        raise CardError(f"{path}: cannot be read ({error})") from None
    lineage = body.get("lineage", [])
    body["preprocessing"] = _record(Preprocessing, body.get("preprocessing"), path)
    body["lineage"] = [_record(Ancestor, item, path) for item in lineage] if isinstance(lineage, list) else lineage
    if (certificate := body.get("certificate")) is not None:
        body["certificate"] = Certificate.from_json(certificate)
    return _record(Card, body, path)


def load_card(folder: Path) -> Card:
    """Read ``folder/card.json`` and check every file it names against its SHA-256.

    For an unpacked archive this includes the handler and the runtime, and no other file may be in the folder.

    Raises:
        CardError: see `read_card`. Or a file is missing, is a link, has changed, or does not belong there.
    """
    card = read_card(folder)
    for name, expected in {**card.files, **card.packed}.items():
        path = folder / name
        try:
            for parent in path.relative_to(folder).parents[:-1]:
                if (folder / parent).is_symlink():
                    raise CardError(f"{folder / parent}: is a link; an artifact may hold regular files only")
            if not os.path.lexists(path):
                raise CardError(f"{folder}: the file {name}, which the card lists, is missing")
            _check_regular(path)
            actual = sha256_file(path)
        except OSError as error:
            raise CardError(f"{path}: cannot be read ({error})") from None
        if actual != expected:
            raise CardError(f"{path}: corrupted, its SHA-256 is {actual[:12]}…, but the card says {expected[:12]}…")
    if card.packed:
        known = {CARD_FILE, *card.files, *card.packed}
        for root, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name != "__pycache__"]  # Python writes it at imports
            for name in (*names, *(entry for entry in folders if (Path(root) / entry).is_symlink())):
                if (Path(root) / name).relative_to(folder).as_posix() not in known:
                    raise CardError(f"{Path(root) / name}: does not belong to the archive that contains the card")
    return card


def _check_regular(path: Path) -> None:
    """Refuse links, which lead out of the folder, and pipes and devices, which never end."""
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
        raise CardError(f"{path}: is {kind}; an artifact may hold regular files only")


def _record(kind: type[_T], body: object, path: Path) -> _T:
    """Build a dataclass from a JSON object. Lists become tuples, and unknown fields are refused."""
    if not isinstance(body, Mapping):
        raise CardError(f"{path}: {kind.__name__} must be a JSON object, found {type(body).__name__}")
    known = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(body) - known):
        raise CardError(f"{path}: unknown field {unknown[0]!r} in {kind.__name__}")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in body.items()})
    except TypeError as error:
        raise CardError(f"{path}: {kind.__name__} is incomplete ({error})") from None
