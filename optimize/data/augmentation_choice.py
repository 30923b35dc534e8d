"""The names of the random changes of training images."""

from __future__ import annotations

from typing import Literal, get_args

Augmentation = Literal["none", "shift", "shift+flip"]

#: How training images are changed, in words for the first lines of a run.
IN_WORDS: dict[Augmentation, str] = {
    "none": "not changed",
    "shift": "shifted at random, not mirrored, so that text, signs and sides stay true (augment shift+flip mirrors)",
    "shift+flip": "shifted and mirrored at random (augment shift does not mirror)",
}

AUGMENTATIONS: tuple[Augmentation, ...] = get_args(Augmentation)
