"""Reads a CSV that names pictures and what is known of each, for the formats that take one."""

from __future__ import annotations

import csv
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from serve.common.layout import expanded
from serve.runtime.errors import UserError, listed

if TYPE_CHECKING:
    import torch

    from optimize.data.records import Split

_T = TypeVar("_T")
Part = Literal["train", "val", "test"]

#: Names of the column with the pictures, of those with the part and the group of each. Case and signs do not matter.
_PICTURE = (
    *("filename", "file", "fname", "filepath", "path", "image", "imagename", "imagefile", "imagepath", "imageid"),
    *("imageindex", "picture", "photo", "img", "name", "id"),
)
_PART = ("split", "set", "subset", "part", "partition", "dataset", "mluse", "isvalid", "isval", "istest", "istrain")
_GROUP: Final = ("group", "groupid")
#: Names of columns that only number the rows, such as the one without a name that pandas writes.
_NUMBERING = ("", "unnamed0", "index", "id", "imageid", "rowid")

#: What the column of parts may say.
_WORDS: Mapping[Part, Sequence[str]] = {
    "train": ("train", "training", "trn", "false", "0"),
    "val": ("val", "valid", "validation", "dev", "eval", "true", "1"),
    "test": ("test", "testing", "tst"),
}

#: In a folder these are the files to train and to measure with, one pair after the other.
_PAIRS = (
    *(("train.csv", f"{word}.csv") for word in ("val", "valid", "validation", "test")),
    *(("train/_classes.csv", f"{word}/_classes.csv") for word in ("valid", "val", "test")),  # Roboflow
)

_SEPARATORS = ",;\t|"
#: A name without one of these gets the first that there is a file with.
_SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp", ".tif", ".bmp")
#: So many faults are named at once, and so many are enough to read no further.
_NAMED: Final = 10
_ENOUGH: Final = 100


class Faults:
    """The faults of files, each with its line."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._more = 0

    @property
    def enough(self) -> bool:
        """Whether no more need be looked for."""
        return self._more >= _ENOUGH - _NAMED

    def add(self, file: Path, line: int, said: str) -> None:
        """Add a fault in a line of a file."""
        if len(self._found) < _NAMED:
            self._found.append(f"{file}:{line}: {said}")
        else:
            self._more += 1

    def check(self) -> None:
        """Raise an error that has up to ten of the faults, a line each.

        Raises:
            UserError: there are some.
        """
        if self._found:
            least = "at least " if self.enough else ""
            raise UserError("\n".join([*self._found, *([f"and {least}{self._more} more"] if self._more else [])]))


@dataclass(frozen=True)
class Row:
    """A picture of a file.

    Attributes:
        file: the CSV.
        line: the number of its line there, from 1.
        picture: the picture.
        named: its name in the CSV.
        part: whether it is one to train or to measure with. None: the file does not say.
        group: the name of its group. None: the file has no groups.
        cells: the other columns.
    """

    file: Path
    line: int
    picture: Path
    named: str
    part: Part | None
    group: str | None
    cells: tuple[str, ...]


@dataclass(frozen=True)
class CsvFile:
    """Pictures, and what is known of each.

    Attributes:
        root: the folder that the pictures lie in.
        columns: the names of the columns behind the picture, its part and its group.
        rows: a row for each picture.
        notes: see `ImageData.notes`.
    """

    root: Path
    columns: tuple[str, ...]
    rows: Sequence[Row]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name for the data."""
        return self.root.resolve().name or "csv"

    def splits(self, vectors: torch.Tensor, seed: int) -> tuple[Split, Split]:
        """Return both splits, given a vector for each row. Without a column for it a fifth is split off by the names.

        Raises:
            UserError: one of the splits has no picture.
        """
        import numpy as np
        import torch

        from optimize.data.records import Split
        from optimize.data.sources import Files
        from optimize.data.splits import part, split_off
        from optimize.data.targets import Vectors

        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(row.group, len(numbers)) for row in self.rows if row.group is not None]
        whole = Split(
            Files.of(self.root, (row.picture for row in self.rows)),
            Vectors(vectors),
            groups=torch.tensor(groups) if groups else None,
        )
        if self.rows[0].part is None:
            keys = [hashlib.sha256(f"{seed}/{row.named}".encode()).digest() for row in self.rows]
            return split_off(whole, keys)
        validates = np.array([row.part != "train" for row in self.rows])
        if validates.all() or not validates.any():
            which, other = ("train", "measure") if validates.all() else ("measure", "train")
            raise UserError(f"{self.rows[0].file}: has no pictures to {which} with, all are to {other} with")
        return part(whole, np.flatnonzero(~validates)), part(whole, np.flatnonzero(validates))


def read_csv(place: str, usage: str) -> CsvFile:
    """Read a CSV, or those of a folder to train and to measure with.

    The first line names the columns. One of them has the pictures, relative to the file's folder or to one in it: that
    with a name such as ``filename`` or ``image``, or else the first. Others may have the part of each picture
    (``split``, ``is_valid``) and its group (``group``).

    Args:
        place: the text after the colon.
        usage: how to write the format, for messages.

    Raises:
        UserError: a file cannot be read, or has faults. The message has up to ten of them, a line each.
    """
    given = expanded(place)
    files = _files(given, usage)
    root = given if given.is_dir() else given.parent
    faults = Faults()
    read = [_read(file, part, faults) for file, part in zip(files, _parts(files), strict=True)]
    faults.check()
    columns, unused = read[0][0], read[0][2]
    if any(others != columns for others, *_ in read):
        raise UserError(
            f"{files[1]}: has the columns {listed(read[1][0], 6)}, and {files[0].name} {listed(columns, 6)}"
        )
    if not columns:
        raise UserError(f"{files[0]}:1: names only columns that number or divide the pictures; add what they show")
    rows = [row for _, found, _ in read for row in found]
    if not rows:
        raise UserError(f"{files[0]}: names no picture; write one in each line below the names of the columns")
    seen: dict[Path, Row] = {}
    for row in rows:
        if (first := seen.setdefault(row.picture, row)) is not row:
            faults.add(row.file, row.line, f"{row.named} is in line {first.line} of {first.file.name} already")
    faults.check()
    notes = (f"not used: the columns {listed(unused, 6)}",) if unused else ()
    tests = [row for row in rows if row.part == "test"]
    if not tests or not any(row.part == "val" for row in rows):
        return CsvFile(root, columns, rows, notes)
    notes = (*notes, f"the pictures of val are used for measuring; not used: the {len(tests)} of test")
    return CsvFile(root, columns, [row for row in rows if row.part != "test"], notes)


def parsed(table: CsvFile, parse: Callable[[Row], _T]) -> list[_T]:
    """Return what ``parse`` makes of each row.

    Raises:
        UserError: it raised `ValueError` for some. The message has up to ten of its texts, each with its line.
    """
    found: list[_T] = []
    faults = Faults()
    for row in table.rows:
        try:
            found.append(parse(row))
        except ValueError as error:
            faults.add(row.file, row.line, str(error))
        if faults.enough:
            break
    faults.check()
    return found


def plain(name: str) -> str:
    """Return a column's name in lower case, without signs."""
    return re.sub(r"[\W_]", "", name.lower())


def _files(given: Path, usage: str) -> list[Path]:
    """Return the file, or the two files of a folder."""
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise UserError(f"{given}: there is no such file or folder; write {usage}")
    for pair in _PAIRS:
        files = [given / name for name in pair]
        if all(file.is_file() for file in files):
            return files
    only = sorted(given.glob("*.csv"))
    if len(only) != 1:
        found = f"has {listed([file.name for file in only], 4)}" if only else "has no CSV"
        raise UserError(f"{given}: {found}; it needs train.csv and val.csv, or name one file: {usage}")
    return only


def _parts(files: Sequence[Path]) -> Sequence[Part | None]:
    return ("train", "val") if len(files) > 1 else (None,)


def _read(file: Path, whole: Part | None, faults: Faults) -> tuple[tuple[str, ...], list[Row], tuple[str, ...]]:
    """Return the names of a file's other columns, its rows, and the names of columns that number them.

    ``whole`` is the part of all of its pictures.
    """
    lines = _lines(file, faults)
    header = next(lines, (0, []))[1]
    names = [name.strip() for name in header]
    places = _places(file, names, parts=whole is None)
    left = [place for place in range(len(names)) if place not in places.values()]
    others = [place for place in left if plain(names[place]) not in _NUMBERING]
    part_of = functools.partial(_part, other=plain(names[places["part"]]) == "istrain") if "part" in places else None
    rows = []
    finder = _Finder(file.parent)
    for line, cells in lines:
        if faults.enough:
            break
        if len(cells) != len(names):
            faults.add(file, line, f"has {len(cells)} columns, and the first line names {len(names)}")
            continue
        named = {what: cells[place].strip() for what, place in places.items()}
        picture = finder.find(named["picture"])
        part = part_of(named["part"]) if part_of else whole
        if picture is None:
            faults.add(file, line, finder.missing(named["picture"]))
        elif "part" in named and part is None:
            faults.add(file, line, f"{names[places['part']]} is {named['part']!r}; it must be train or val")
        elif "group" in named and not named["group"]:
            faults.add(file, line, f"{names[places['group']]} is empty; each picture needs a group")
        else:
            found = tuple(cells[place].strip() for place in others)
            rows.append(Row(file, line, picture, named["picture"], part, named.get("group"), found))
    unused = tuple(names[place] or "without a name" for place in left if place not in others)
    return tuple(names[place] for place in others), rows, unused


def _lines(file: Path, faults: Faults) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines that are not empty, with their numbers.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            separator = max(_SEPARATORS, key=first.count)
            reader = csv.reader(stream, delimiter=separator, strict=True, skipinitialspace=True)
            try:
                for cells in reader:
                    if any(cell.strip() for cell in cells):
                        yield reader.line_num, cells
            except csv.Error as error:
                faults.add(file, reader.line_num, f"is no CSV ({error})")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{file}: cannot be read: {reason}") from None


def _places(file: Path, names: Sequence[str], *, parts: bool) -> dict[str, int]:
    """Return the places of the columns of pictures, parts and groups.

    Raises:
        UserError: the first line names no columns, or one twice.
    """
    if len(names) < 2:
        raise UserError(f"{file}:1: names {len(names)} columns; it needs one of the pictures' names, and others")
    for place, name in enumerate(names):
        if names.index(name) != place or (not name and place):
            what = f"names the column {name!r} twice" if name else f"has no name for column {place + 1}"
            raise UserError(f"{file}:1: {what}; the first line names each column once")
    known = [plain(name) for name in names]
    pictures = [known.index(name) for name in _PICTURE if name in known]
    found = {"picture": pictures[0] if pictures else int(not names[0])}
    for what, words in (("part", _PART if parts else ()), ("group", _GROUP)):
        places = [known.index(word) for word in words if word in known and known.index(word) != found["picture"]]
        found |= {what: places[0]} if places else {}
    return found


def _part(word: str, *, other: bool) -> Part | None:
    """Return the part that a word means, or the other one. None: it means none."""
    found = next((part for part, words in _WORDS.items() if word.lower() in words), None)
    return found if found is None or not other else "val" if found == "train" else "train"


class _Finder:
    """Finds pictures by their names, in a folder or in one of those in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bases: Mapping[str, None] = dict.fromkeys(["", *sorted(_folders(folder))])
        self._suffixes: tuple[str, ...] = _SUFFIXES

    def find(self, name: str) -> Path | None:
        """Return the path of a picture. None: there is none, or it lies elsewhere."""
        if not name or _leaves(name):
            return None
        for suffix in self._suffixes:
            for base in self._bases:
                path = self._folder / base / f"{name}{suffix}"
                if is_file(path):
                    # Where one was found, the next ones probably are.
                    self._bases = dict.fromkeys([base, *self._bases])
                    self._suffixes = tuple(dict.fromkeys([suffix, *self._suffixes]))
                    return path
        return None

    def missing(self, name: str) -> str:
        """Return why a picture was not found."""
        if not name:
            return "names no picture"
        if _leaves(name):
            return f"{name} must be a path below {self._folder}"
        others = [f"{base}/" for base in self._bases if base]
        return f"there is no {name} in {self._folder}" + (f" or in its {listed(others, 4)}" if others else "")


def is_file(path: Path) -> bool:
    """Return whether there is a file. A name that no file can have is none."""
    return os.path.isfile(path)  # noqa: PTH113 - the method of Path (3.11) raises OSError for a name that is too long


def _leaves(name: str) -> bool:
    """Return whether a name may lead out of its folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir()]
