"""``cocolabels:DIR``: COCO's pictures with the classes that occur in each, for multi-label classification."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from optimize.data.formats.base import DataFormat, register
from serve.common.layout import expanded
from serve.runtime.errors import UserError, listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optimize.data.records import ImageData, Split
    from optimize.listener import Listener

_ANNOTATIONS: Final = "annotations"
_PREFIX: Final = "instances_"


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    from optimize.data.formats.csv_labels import gaps_of
    from optimize.data.pixels import native_size
    from optimize.data.records import ImageData

    root = expanded(place)
    files = [_file(root, part) for part in ("train", "val")]
    documents = []
    for number, file in enumerate(files):
        listener.progressed(number / len(files), file.name)
        documents.append(_Instances(file))
    names = [each.classes for each in documents]
    if names[0] != names[1]:
        raise UserError(f"{files[1]}: has other categories than {files[0].name}")
    classes = tuple(names[0].values())
    train, val = (each.split(root) for each in documents)
    # A mirrored object is of the same class. Those of COCO are no letters.
    return ImageData(
        root.resolve().name or "coco",
        "multilabel",
        classes,
        train,
        val,
        "shift+flip",
        native_size(train),
        gaps=gaps_of(train, val, classes),
    )


def _file(root: Path, part: str) -> Path:
    """Return the annotations of a part, such as ``instances_val2017.json``."""
    found = sorted((root / _ANNOTATIONS).glob(f"{_PREFIX}{part}*.json"))
    if len(found) != 1:
        there = f"has {listed([file.name for file in found], 4)}" if found else "is missing"
        raise UserError(
            f"{root / _ANNOTATIONS / f'{_PREFIX}{part}*.json'}: {there}; cocolabels:DIR needs one for train and one "
            "for val, and their pictures in DIR/train…/ and DIR/val…/"
        )
    return found[0]


class _Instances:
    """A file of instances: its categories by number, and those that occur in each picture.

    Raises:
        UserError: the file cannot be read, or an entry lacks a field. The message has its place.
    """

    def __init__(self, file: Path) -> None:
        import json

        self.file = file
        try:
            document = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: cannot be read as JSON: {error}") from None
        self.classes: Mapping[int, str] = dict(sorted(self._named(document, "categories", "name").items()))
        self.pictures = self._named(document, "images", "file_name")
        if not self.pictures or not self.classes:
            raise UserError(f"{file}: has no {'images' if self.classes else 'categories'}")
        self.shown: set[tuple[int, int]] = set()
        for place, entry in self._entries(document, "annotations"):
            pair = self._field(entry, place, "image_id", int), self._field(entry, place, "category_id", int)
            for number, known, what in zip(pair, (self.pictures, self.classes), ("image", "category"), strict=True):
                if number not in known:
                    raise UserError(f"{file}: {place}: there is no {what} {number}")
            self.shown.add(pair)

    def split(self, root: Path) -> Split:
        """Return the pictures and their classes.

        Raises:
            UserError: there is no folder of them, or one is missing.
        """
        import torch

        from optimize.data.formats.csv_file import is_file
        from optimize.data.records import Split
        from optimize.data.sources import Files
        from optimize.data.targets import Vectors

        word = self.file.stem.removeprefix(_PREFIX)
        folders = [root / word, root / "images" / word, root / "images", root]
        first = next(iter(self.pictures.values()))
        folder = next((each for each in folders if is_file(each / first)), None)
        if folder is None:
            raise UserError(f"{self.file}: there is no {first} in {listed([str(each) for each in folders])}")
        paths = [folder / name for name in self.pictures.values()]
        if gone := [path.name for path in paths if not is_file(path)]:
            raise UserError(f"{folder}: {len(gone)} of {len(paths)} pictures are missing ({listed(gone, 4)})")
        if outside := [path for path in paths if ".." in path.parts or root not in path.parents]:
            raise UserError(f"{self.file}: {outside[0]} is not below {root}")
        vectors = torch.zeros(len(paths), len(self.classes), dtype=torch.uint8)
        rows, columns = ({number: place for place, number in enumerate(each)} for each in (self.pictures, self.classes))
        for image, category in self.shown:
            vectors[rows[image], columns[category]] = 1
        return Split(Files.of(root, paths), Vectors(vectors))

    def _named(self, document: Any, what: str, field: str) -> dict[int, str]:
        """Return the names of entries by their numbers. Each number and name must be there once."""
        found: dict[int, str] = {}
        names: set[str] = set()
        for place, entry in self._entries(document, what):
            number, name = self._field(entry, place, "id", int), self._field(entry, place, field, str)
            if number in found or name in names:
                raise UserError(f"{self.file}: {place}: id {number} or {field} {name!r} is in an entry before it")
            found[number] = name
            names.add(name)
        return found

    def _entries(self, document: Any, name: str) -> list[tuple[str, Any]]:
        entries = document.get(name) if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise UserError(f"{self.file}: has no list of {name}")
        return [(f"{name}[{number}]", entry) for number, entry in enumerate(entries)]

    def _field(self, entry: Any, place: str, name: str, kind: type) -> Any:
        value = entry.get(name) if isinstance(entry, dict) else None
        if type(value) is not kind:
            what = "a whole number" if kind is int else "a text"
            raise UserError(f"{self.file}: {place}: {name} must be {what}, found {value!r:.40}")
        return value


COCO_LABELS = register(
    DataFormat(
        name="cocolabels",
        open=_open,
        place="DIR",
        summary="pictures and annotations/instances_*.json of COCO: the classes that occur in each",
    )
)
