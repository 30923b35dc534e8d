"""Decides how a data set's images reach a model's network (size, crop, mean, std, interpolation), and records why.

It is the only place that decides. The user's settings take precedence over the model's declaration and the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optimize.data.records import ImageData
from optimize.models.preprocessing_config import PARTS, Wish, border_fault, size_words
from optimize.models.source import ModelSource
from optimize.tasks.base import find_task
from serve.runtime.card.card import LETTERBOX, Letterbox, Preprocessing
from serve.runtime.display import Described, glance
from serve.runtime.errors import CardError, UserError

#: The values for a model that declares nothing, except the size: ImageNet's statistics.
FALLBACK: Mapping[str, Any] = {
    name: Preprocessing.__dataclass_fields__[name].default for name in ("mean", "std", "interpolation")
}

#: Side of the square for whole pictures of different sizes.
_FITTED = 512
#: Longest side of whole pictures of one size. Larger ones are scaled to it.
_LONGEST = 1024


@dataclass(frozen=True)
class ChosenPreprocessing(Described):
    """The preprocessing, and in words the origin of each part (``resize``, ``crop``, ``mean`` …)."""

    preprocessing: Preprocessing
    origins: Mapping[str, str]

    def _facts(self) -> dict[str, str]:
        values = ((name, value) for name in PARTS if (value := getattr(self.preprocessing, name)) is not None)
        return {
            name: f"{glance(value)} ({origin})" if (origin := self.origins.get(name)) else glance(value)
            for name, value in values
        }

    def __str__(self) -> str:
        """Return all parts in one line, grouped by origin: ``resize 256, crop 224x224, … (--crop)``."""
        chosen = self.preprocessing
        words = {
            "resize": f"resize {size_words(chosen.resize) if isinstance(chosen.resize, tuple) else chosen.resize}",
            "crop": f"crop {size_words(chosen.crop)}",
            "interpolation": chosen.interpolation,
            "mean": f"mean {_listed(chosen.mean)}",
            "std": f"std {_listed(chosen.std)}",
        } | ({"pixel_max": f"white {chosen.pixel_max:g}"} if chosen.pixel_max is not None else {})
        groups = itertools.groupby(words, key=lambda part: self.origins.get(part, ""))
        return "; ".join(
            ", ".join(words[part] for part in parts) + (f" ({origin})" if origin else "") for origin, parts in groups
        )


def choose_preprocessing(
    source: ModelSource, data: ImageData, image_size: int | None = None, wishes: Iterable[Wish] = ()
) -> ChosenPreprocessing:
    """Choose how the images of ``data`` reach the network of ``source``.

    Mean, std and interpolation are those that the model declares, or ImageNet's. The size is the first of these that
    applies:

    - ``image_size``, with ``resize`` in the declared proportion to the crop
    - a user's own declaration, and that of weights that fix it
    - if the task needs whole pictures: the size that all of them have, or else one square into which each is fitted
    - the side that the data prefers, or for square images of up to 64 pixels their own size, each raised to the
      network's minimum
    - a library's declaration
    - 224 out of 256

    ``wishes`` take precedence over all of these, and later wishes over earlier ones. For images that are already
    prepared, the result is the preprocessing that they had.

    Raises:
        UserError: the network cannot take the size (the nearest legal one is named), or the parts do not fit together.
    """
    if data.preprocessing is not None:
        return _prepared(source, data, data.preprocessing, image_size, wishes)
    parts, origins = _declared(source)
    if (sized := _sized(source, data, image_size, parts)) is not None:
        resize, crop, why = sized
        parts |= {"resize": resize, "crop": crop}
        origins |= dict.fromkeys(("resize", "crop"), why)
    for wish in wishes:
        given = wish.config.given()
        if image_size is not None and given.get("crop", (image_size, image_size)) != (image_size, image_size):
            raise UserError(
                f"{wish.named('crop')} {size_words(given['crop'])} and an image size of {image_size} are both "
                "given, but mean the same; give one of them"
            )
        parts |= given
        # A height and width to scale to also set the crop, if no other crop is given.
        said = {name: name if getattr(wish.config, name) is not None else "resize" for name in given}
        origins |= {name: wish.named(part) for name, part in said.items()}
    for side in sorted(set(parts["crop"])):
        source.check_size(side)
    if fault := border_fault(parts["resize"], parts["crop"]):
        raise UserError(fault.format(f" ({origins['crop']})", f" ({origins['resize']})"))
    try:
        return ChosenPreprocessing(Preprocessing(**parts), origins)
    except CardError as error:
        if len(parts["mean"]) == len(parts["std"]):  # a number out of its range
            raise UserError(str(error)) from None
        raise UserError(
            f"mean has {len(parts['mean'])} numbers ({origins['mean']}) and std {len(parts['std'])} "
            f"({origins['std']}); give both, with equal numbers"
        ) from None


def _prepared(
    source: ModelSource, data: ImageData, done: Preprocessing, image_size: int | None, wishes: Iterable[Wish]
) -> ChosenPreprocessing:
    """Return the preprocessing that the images already had. Wishes that differ are refused."""
    parts = {name: getattr(done, name) for name in PARTS}
    asked = [(wish.named(name), value, parts[name]) for wish in wishes for name, value in wish.config.given().items()]
    asked += [("image size", (image_size, image_size), done.crop)] if image_size is not None else []
    for spelled, wanted, there in asked:
        if wanted != there:
            raise UserError(
                f"the images of {data.name} are already preprocessed, with {there}; {spelled} cannot be {wanted}"
            )
    for side in sorted(set(done.crop)):
        source.check_size(side)
    return ChosenPreprocessing(done, dict.fromkeys(PARTS, "already done, as you stated"))


def _declared(source: ModelSource) -> tuple[dict[str, Any], dict[str, str]]:
    """Return every part as the model declares it or by default, and its origin."""
    nothing = "because your model declares none"
    origins = {
        "resize": f"the usual, {nothing}",
        "crop": f"the usual, {nothing}",
        "mean": f"ImageNet's mean and std, {nothing}",
        "std": f"ImageNet's mean and std, {nothing}",
        "interpolation": f"the default, {nothing}",
    }
    parts: dict[str, Any] = {"resize": 256, "crop": (224, 224), **FALLBACK}
    if source.preprocessing is not None:
        declared = {name: getattr(source.preprocessing, name) for name in PARTS if name not in source.undeclared}
        told = [name for name, value in declared.items() if value is not None]
        parts |= {name: declared[name] for name in told}
        origins |= dict.fromkeys(told, source.declared_by)
    return parts, origins


def _sized(
    source: ModelSource, data: ImageData, image_size: int | None, declared: Mapping[str, Any]
) -> tuple[int | tuple[int, int] | Letterbox, tuple[int, int], str] | None:
    """Return resize, crop and the reason, if the declared size is not used."""
    declared_by_user = source.origin in ("user", "module") and source.preprocessing is not None
    whole = find_task(data.task).whole and not declared_by_user
    if image_size is not None:
        source.check_size(image_size)
        why = f"your image size of {image_size}"
        resize = LETTERBOX if whole else _resize_for(image_size, declared["resize"], declared["crop"])
        return resize, (image_size, image_size), why
    if declared_by_user or source.only_size is not None:
        return None
    if whole:
        return _whole(source, data)
    if data.preferred_side is not None:
        side = source.legal_size(data.preferred_side)
        return side, (side, side), f"{data.name} scaled to {side}x{side}"
    if data.native_size is None or not data.native_size[0] == data.native_size[1] <= 64:
        return None
    native = data.native_size[0]
    side = source.legal_size(native)
    why = f"the data's images are {native}x{native}"
    return side, (side, side), why if side == native else f"{why}, the network needs {side}x{side}"


def _whole(source: ModelSource, data: ImageData) -> tuple[tuple[int, int] | Letterbox, tuple[int, int], str]:
    """Return resize, crop and the reason for pictures of which nothing may be cut off."""
    if data.native_size is None:
        side = source.legal_size(_FITTED)
        return LETTERBOX, (side, side), f"each whole picture is fitted into {side}x{side}, as their sizes differ"
    shrunk = max(1.0, max(data.native_size) / _LONGEST)
    height, width = (source.legal_size(round(side / shrunk)) for side in data.native_size)
    why = f"the data's images are {size_words(data.native_size)}"
    if (height, width) != data.native_size:
        why += f", scaled to {size_words((height, width))}"
    return (height, width), (height, width), why


def _resize_for(
    side: int, resize: int | tuple[int, int] | Letterbox, crop: tuple[int, int]
) -> int | tuple[int, int] | Letterbox:
    """Return the resize for a crop of ``side``, in the declared proportion."""
    if resize == LETTERBOX:
        return LETTERBOX
    if isinstance(resize, tuple):
        height, width = (round(side * scaled / kept) for scaled, kept in zip(resize, crop, strict=True))
        return height, width
    return round(side * resize / min(crop))


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:.4g}" for number in numbers)
