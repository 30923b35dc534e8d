"""What a data set is: images, labels, two splits, and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from optimize.data.augmentation_choice import Augmentation
from optimize.data.fingerprint import Fingerprint, both, fingerprint
from optimize.data.sources import Source
from serve.runtime.card.card import Preprocessing
from serve.runtime.display import Described


@dataclass(frozen=True, eq=False, repr=False)
class Split(Described):
    """Images and their labels. Compared by identity, so that it can key a cache.

    Attributes:
        sources: a file, its bytes or finished pixels for each image; see `optimize.data.sources`.
        labels: int64 of shape ``(N,)``, indices of classes.
        known: the fingerprint, where it is known already.
    """

    sources: Sequence[Source]
    labels: torch.Tensor
    known: Fingerprint | None = None

    def __post_init__(self) -> None:
        if self.labels.shape != (len(self.sources),) or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.sources)},), "
                f"got {self.labels.dtype} of {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def identity(self) -> Fingerprint:
        """What its images and labels are identified by; taken once."""
        return self.known or fingerprint(self.sources, self.labels.numpy())

    @property
    def fingerprint(self) -> str:
        """SHA-256 over its images and labels; what it covers is said by ``identity.kind``."""
        return self.identity.digest

    def _facts(self) -> dict[str, str]:
        return {"images": str(len(self))}


@dataclass(frozen=True, eq=False, repr=False)
class ImageData(Described):
    """A classification data set.

    What was trained or calibrated depends on ``train.fingerprint``, an accuracy on ``val.fingerprint``.

    Attributes:
        name: short name, for reports.
        classes: label of each class index.
        train: images to train and calibrate with.
        val: images to measure with, none of them in ``train``.
        augment: which random changes keep an image's label true.
        native_size: ``(height, width)`` in pixels if all of a sample of the images share it.
        preferred_side: side in pixels that the images are scaled to for a network that asks for none; None: their own.
        preprocessing: what was done to the images already, whose sources then are pixels; None: nothing yet.
        val_of: how many images there are to measure with, where ``val`` is a part of them.
        order: its own names of the classes in the order of ``classes``, where that is not its own order.
        gaps: what is missing or looks like a mistake, and may be meant, a line each; see `open_data`.
        notes: what a reader should know of how it was read, a line each; they are said, and on every card.
    """

    name: str
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
        """SHA-256 over both splits."""
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
    """The first classes, each by as many letters."""
    names = [name if len(name) <= letters else f"{name[: letters - 1]}…" for name in classes[:shown]]
    return ", ".join([*names, *(["…"] if len(classes) > shown else [])])
