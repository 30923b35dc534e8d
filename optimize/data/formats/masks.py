"""``masks:DIR``: pictures, and masks whose numbers are the classes of pixels."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from optimize.data.formats.base import DataFormat, register
from serve.common.layout import expanded
from serve.runtime.errors import ImageError, UserError, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optimize.data.records import ImageData, Split
    from optimize.data.sources import Files
    from optimize.data.targets import ClassMaps
    from optimize.listener import Listener

#: The files of the classes' names, one a line, and of the rule that names groups.
CLASSES_FILE: Final = "classes.txt"
GROUPS_FILE: Final = "groups.txt"

#: At most this many masks of a split are read when it is opened, at equal distances.
LOOKED_AT: Final = 256

#: The number that masks use for pixels that do not count.
_NOT_COUNTED: Final = 255


@dataclass(frozen=True)
class _Layout:
    """Where pictures and masks are.

    Attributes:
        images: the folder of the pictures.
        masks: the folder of their masks, which have the same paths below it.
        image_end: how the name of a picture ends, before the suffix.
        mask_end: how the name of its mask ends instead.
    """

    images: str
    masks: str
    image_end: str = ""
    mask_end: str = ""


_LAYOUTS = (
    _Layout("images", "masks"),
    _Layout("leftImg8bit", "gtFine", "_leftImg8bit", "_gtFine_labelTrainIds"),  # Cityscapes
)
_PARTS = ("train", "val")


@dataclass(frozen=True)
class _Pairs:
    """Pictures with their masks, and what each picture is called: its path without suffix and ending."""

    pictures: Sequence[Path]
    masks: Sequence[Path]
    stems: tuple[str, ...]


@dataclass(frozen=True)
class _Remarks:
    """What `ImageData` has under the same names."""

    gaps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    import hashlib

    from optimize.data.pixels import native_size
    from optimize.data.records import ImageData
    from optimize.data.splits import split_off

    root = expanded(place)
    if not root.is_dir():
        raise UserError(f"{root}: " + ("is not a folder" if root.exists() else "there is no such folder"))
    layout = next((each for each in _LAYOUTS if (root / each.images).is_dir()), None)
    if layout is None:
        raise UserError(
            f"{root}: has no images/; masks:DIR needs images/train/ and images/val/, and masks with the same names in "
            "masks/train/ and masks/val/"
        )
    classes, rule = _class_names(root / CLASSES_FILE), _rule(root / GROUPS_FILE)
    divided = [part for part in _PARTS if (root / layout.images / part).is_dir()]
    if len(divided) == 1:
        (missing,) = set(_PARTS) - set(divided)
        raise UserError(f"{root}: has {layout.images}/{divided[0]}/ but no {layout.images}/{missing}/; add it")
    remarks = _Remarks()
    found = [_pairs(root, layout, part, remarks) for part in divided or ("",)]
    splits = _splits(found, len(classes), rule, remarks)
    if not divided:
        keys = [hashlib.sha256(f"{seed}/{stem}".encode(errors="surrogateescape")).digest() for stem in found[0].stems]
        splits = list(split_off(splits[0], keys))
    for split, part in zip(splits, ("training", "validation"), strict=True):
        _look(split, part, classes, remarks, listener)
    train, val = splits
    # Not mirrored: the pictures may show letters, signs, or a left and a right.
    return ImageData(
        root.resolve().name or "masks",
        "segmentation",
        classes,
        train,
        val,
        "shift",
        native_size(train),
        gaps=tuple(remarks.gaps),
        notes=tuple(remarks.notes),
    )


def _class_names(file: Path) -> tuple[str, ...]:
    from optimize.data.classes import read_classes
    from optimize.data.targets import MOST_CLASSES

    if not file.exists():
        raise UserError(f"{file}: is missing; write the name of each class on a line, that of number 0 first")
    names = read_classes(file)
    if len(names) < 2:
        raise UserError(f"{file}: has only one class ({names[0]}); pixels need at least two, such as a background")
    if len(names) > MOST_CLASSES:
        raise UserError(f"{file}: has {len(names)} classes, and masks can have {MOST_CLASSES}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{file}: names {listed(twice)} twice; each class needs a name of its own")
    return names


def _rule(file: Path) -> re.Pattern[str] | None:
    """Return the regular expression that finds the name of its group in a picture's name. None: there are no groups."""
    if not file.exists():
        return None
    try:
        rule = file.read_text(encoding="utf-8-sig").strip("\r\n")
        if rule:
            return re.compile(rule)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{file}: cannot be read: {reason}") from None
    except re.error as error:
        raise UserError(
            f"{file}: {rule!r} is not a regular expression ({error}); write one that finds the name of a picture's "
            "group in its path, such as ^[^_]+ for what is before the first _"
        ) from None
    raise UserError(f"{file}: is empty; write a regular expression that finds the group, or remove the file")


def _pairs(root: Path, layout: _Layout, part: str, remarks: _Remarks) -> _Pairs:
    """Find the pictures of a part and their masks.

    Raises:
        UserError: there are no pictures, or no masks of them.
    """
    import numpy as np

    from optimize.data.folder_listing import list_images
    from optimize.data.sources import select

    folders = [root / kind / part if part else root / kind for kind in (layout.images, layout.masks)]
    pictures, masks = (list_images(root, folder) for folder in folders)
    stems = _stems(pictures, folders[0], layout.image_end)
    places = {stem: row for row, stem in enumerate(_stems(masks, folders[1], layout.mask_end)) if stem is not None}
    rows = [(row, places.get(stem), stem) for row, stem in enumerate(stems) if stem is not None]
    pairs = [(row, mask, stem) for row, mask, stem in rows if mask is not None]
    if not rows:
        ending = f" that end in {layout.image_end}" if layout.image_end else ""
        raise UserError(f"{folders[0]}: holds no images{ending}")
    if not pairs:
        wanted = folders[1] / f"{rows[0][2]}{layout.mask_end}.png"
        raise UserError(f"{folders[0]}: no picture has a mask; the mask of {pictures[rows[0][0]].name} is {wanted}")
    if bare := [stem for _, mask, stem in rows if mask is None]:
        remarks.gaps.append(f"{folders[0]}: {len(bare)} of {len(rows)} pictures have no mask ({listed(bare, 4)})")
    if lone := sorted(places.keys() - {stem for *_, stem in pairs}):
        remarks.notes.append(f"left out: {len(lone)} masks without a picture in {folders[1]} ({listed(lone, 4)})")
    images, maps = (np.fromiter(column, np.int64, len(pairs)) for column in list(zip(*pairs, strict=True))[:2])
    return _Pairs(select(pictures, images), select(masks, maps), tuple(stem for *_, stem in pairs))


def _stems(files: Files, folder: Path, ending: str) -> list[str | None]:
    """Return the path of each file below a folder, without suffix and ending. None: it ends otherwise."""
    import numpy as np

    start = len(os.fsencode(folder.relative_to(files.root))) + 1
    names = (os.fsdecode(path[start:]) for path in files.below(np.arange(len(files))))
    stems = (name[: name.rfind(".")] if "." in name.rpartition("/")[2] else name for name in names)
    return [stem.removesuffix(ending) if stem.endswith(ending) else None for stem in stems]


def _splits(found: Sequence[_Pairs], classes: int, rule: re.Pattern[str] | None, remarks: _Remarks) -> list[Split]:
    """Build the splits, with groups if there is a rule for them. A group in both is remarked on."""
    import torch

    from optimize.data.records import Split
    from optimize.data.targets import ClassMaps

    names = [None if rule is None else [_group(stem, rule) for stem in each.stems] for each in found]
    numbers: dict[str, int] = {}
    for part in names:
        for name in part or ():
            numbers.setdefault(name, len(numbers))
    if both := sorted(set.intersection(*(set(part or ()) for part in names))) if len(names) > 1 else []:
        remarks.notes.append(f"{len(both)} of {len(numbers)} groups are in both train/ and val/ ({listed(both, 4)})")
    return [
        Split(
            each.pictures,
            ClassMaps(each.masks, classes),
            groups=None if part is None else torch.tensor([numbers[name] for name in part]),
        )
        for each, part in zip(found, names, strict=True)
    ]


def _group(stem: str, rule: re.Pattern[str]) -> str:
    """Return the name of a picture's group: what the rule finds, or what its first parentheses find."""
    match = rule.search(stem)
    name: str | None = match and match[1 if rule.groups else 0]
    if not name:
        raise UserError(
            f"{GROUPS_FILE}: {rule.pattern!r} finds nothing in {stem!r}; it must find the group of each picture"
        )
    return name


def _look(split: Split, part: str, classes: Sequence[str], remarks: _Remarks, listener: Listener) -> None:
    """Remark on classes that no mask has, and on numbers that are no class.

    Raises:
        UserError: no mask can be read. The message has the reason for the first.
    """
    import numpy as np

    maps: ClassMaps = split.targets  # type: ignore[assignment]
    counts = np.zeros(1 << 16, np.int64)
    faults: list[str] = []
    rows = np.unique(np.linspace(0, len(split) - 1, LOOKED_AT).astype(np.int64)).tolist()
    for done, row in enumerate(rows):
        listener.progressed(done / len(rows), f"{part} masks")
        try:
            numbers = maps.values(row).astype(np.uint32)
            counts += np.bincount(np.minimum(numbers, len(counts) - 1).ravel(), minlength=len(counts))
        except ImageError as error:
            faults.append(f"{split.sources[row]}: {error}")
    if len(faults) == len(rows):
        raise UserError(faults[0])
    found = np.flatnonzero(counts)
    of = f"{len(rows)} {part} masks" if len(rows) == len(split) else f"{len(rows)} of {len(split)} {part} masks"
    if unseen := [f"{place} {name}" for place, name in enumerate(classes) if not counts[place]]:
        which = "class" if len(unseen) == 1 else "classes"
        said = f"none of {of} has the {which} {listed(unseen, 4)}; they have {_ranges(found.tolist())}"
        (remarks.gaps if len(rows) == len(split) else remarks.notes).append(said)
    if others := [number for number in found.tolist() if number >= len(classes) and number != _NOT_COUNTED]:
        remarks.notes.append(f"{part} masks: pixels of {_ranges(others)} do not count, because these are no classes")


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in short: ``0-10, 255``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return listed(["-".join(map(str, part)) for part in parts], 8)


MASKS = register(
    DataFormat(
        name="masks",
        open=_open,
        place="DIR",
        summary="pictures in images/train/ and images/val/, masks in masks/, class names in classes.txt",
    )
)
