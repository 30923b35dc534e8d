"""The records of a data set: images, targets, two splits, and facts about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from optimize.data.augmentation_choice import Augmentation
from optimize.data.fingerprint import Fingerprint, both
from optimize.data.sources import Source
from optimize.data.targets import Targets
from serve.runtime.card.card import Preprocessing
from serve.runtime.display import Described


@dataclass(frozen=True, eq=False, repr=False)
class Split(Described):
    """Images and their targets. Compared by identity, so that it can key a cache.

    Attributes:
        sources: a file, its bytes or finished pixels for each image; see `optimize.data.sources`.
        targets: what a network should answer for each image; see `optimize.data.targets`.
        known: the fingerprint, if it is already known.
        groups: the group of each image, ``int64 (N,)``: frames of one video, tiles of one scene. What is held out
            shares no group with the rest. None: every image is its own.
    """

    sources: Sequence[Source]
    targets: Targets
    known: Fingerprint | None = None
    groups: torch.Tensor | None = None

    def __post_init__(self) -> None:
        counts = {len(self.sources), len(self.targets), len(self.sources if self.groups is None else self.groups)}
        if len(counts) > 1:
            raise ValueError(f"images, targets and groups must be equally many, got {sorted(counts)}")

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def identity(self) -> Fingerprint:
        """The fingerprint of its images, targets and groups, computed once."""
        if self.known is not None:
            return self.known
        own = self.targets.fingerprint(self.sources)
        return own if self.groups is None else own.grouped(self.groups.numpy())

    @property
    def labels(self) -> torch.Tensor:
        """The class of each image, ``int64 (N,)``. Zeros if an image has no class of its own."""
        return self.targets.labels

    @property
    def fingerprint(self) -> str:
        """The SHA-256 over its images and targets. ``identity.kind`` says what it covers."""
        return self.identity.digest

    def _facts(self) -> dict[str, str]:
        return {"images": str(len(self))}


@dataclass(frozen=True, eq=False, repr=False)
class ImageData(Described):
    """A data set.

    The key of a trained or calibrated artifact depends on ``train.fingerprint``, the key of an accuracy on
    ``val.fingerprint``.

    Attributes:
        name: short name, for reports.
        task: the name of what a network learns from it; see `optimize.tasks`.
        classes: label of each class index.
        train: images to train and calibrate with.
        val: images to measure with, none of them in ``train``.
        augment: the random changes that keep an image's target true.
        native_size: ``(height, width)`` in pixels if all of a sample of the images share it.
        preferred_side: images are scaled to this side in pixels for a network that requests none. None: their own size.
        preprocessing: the preprocessing that the images already had. Their sources are pixels then. None: none yet.
        val_of: the number of all images to measure with, if ``val`` is a part of them.
        order: the data's own names of the classes in the order of ``classes``, if that is not the data's own order.
        gaps: gaps and probable mistakes that may be intended, a line each; see `open_data`.
        notes: remarks on how it was read, a line each. The listener and every card get them.
    """

    name: str
    task: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    augment: Augmentation
    native_size: tuple[int, int] | None
    preferred_side: int | None = None
    preprocessing: Preprocessing | None = None
    val_of: int | None = None
    order: tuple[str, ...] | None = None
    gaps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The SHA-256 over both splits."""
        return both(self.train.identity, self.val.identity).digest

    @property
    def fingerprint_kind(self) -> Literal["content", "sample"]:
        """``content`` if every byte of every image counts, ``sample`` if not; see `optimize.data.fingerprint`."""
        return both(self.train.identity, self.val.identity).kind

    def _facts(self) -> dict[str, str]:
        of = f" of {self.val_of}" if self.val_of is not None else ""
        size = {"size": "{} × {}".format(*self.native_size)} if self.native_size else {}
        return {
            "name": self.name,
            "classes": f"{len(self.classes)} ({_shortened(self.classes)})",
            "to train": str(len(self.train)),
            "to measure": f"{len(self.val)}{of}",
            **size,
            "augmentation": self.augment,
        }


def _shortened(classes: tuple[str, ...], shown: int = 3, letters: int = 20) -> str:
    """Return the first classes, each cut to a number of letters."""
    names = [name if len(name) <= letters else f"{name[: letters - 1]}…" for name in classes[:shown]]
    return ", ".join([*names, *(["…"] if len(classes) > shown else [])])
