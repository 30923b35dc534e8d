"""The preprocessing settings for the command line, a recipe, a program or a model's file.

Help texts are made from it, so it must not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from serve.common.config import Config, Option, faults
from serve.runtime.card.card import LETTERBOX, MOST_CHANNELS, Interpolation, Letterbox, Preprocessing
from serve.runtime.errors import CardError, UserError


def _pixels(value: object) -> object:
    """Check a whole number of pixels, which may be text. The error says what would be right."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 16:
        raise ValueError("must be a whole number of pixels, at least 1, such as 256")
    return value


def _sides(value: object) -> object:
    """Check one side or height and width: ``224``, ``[224, 192]``, ``"224"``, ``"224x192"``."""
    sides = re.split(r"\s*[x×,]\s*", value.strip()) if isinstance(value, str) else value
    sides = list(sides) if isinstance(sides, list | tuple) else [sides]
    try:
        numbers = [_pixels(side) for side in sides]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError("must be whole pixels, one side or height and width, such as 224 or 224x192")
    return (numbers[0], numbers[-1])


def _scaled(value: object) -> object:
    """Check the shorter side, height and width as in `_sides`, or ``letterbox``."""
    if isinstance(value, str) and not re.search(r"\d", value):
        if value.strip() != LETTERBOX:
            raise ValueError(f"must be a whole number of pixels, such as 256 or 224x192, or {LETTERBOX}")
        return LETTERBOX
    pair = isinstance(value, list | tuple) or (isinstance(value, str) and re.search(r"[x×,]", value) is not None)
    return _sides(value) if pair else _pixels(value)


def _numbers(value: object) -> object:
    """Check one finite number per channel: ``[0.5, 0.5, 0.5]``, ``0.5``, ``"0.5, 0.5, 0.5"``."""
    parts: list[Any]
    if isinstance(value, str):
        parts = [part for part in re.split(r"[\s,]+", value.strip()) if part]
    else:
        parts = list(value) if isinstance(value, list | tuple) else [value]
    try:
        numbers = tuple(float("nan") if isinstance(part, bool) else float(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        numbers = ()
    if not 1 <= len(numbers) <= MOST_CHANNELS or not all(map(math.isfinite, numbers)):
        raise ValueError(
            "must be one number per channel (three for RGB, one for grey, with alpha one more), such as "
            "0.485,0.456,0.406"
        )
    return numbers


def _means(value: object) -> object:
    numbers = _numbers(value)
    assert isinstance(numbers, tuple)
    if max(numbers) > 1:
        of_bytes = ",".join(f"{number / 255:.3g}" for number in numbers)
        raise ValueError(
            f"must be for pixels from 0 to 1; divide values for pixels from 0 to 255 by 255 ({of_bytes}), std too"
        )
    return numbers


def _spreads(value: object) -> object:
    numbers = _numbers(value)
    assert isinstance(numbers, tuple)
    if min(numbers) <= 0:
        raise ValueError("must be positive")
    return numbers


def _white(value: object) -> object:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError("must be one positive number, such as 4095")
    return number


def _unless_none(check: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else check(value))


class PreprocessingConfig(Config):
    """Settings of the preprocessing that replace those of model and data. None leaves a part to them.

    Sizes and numbers may also be given as text, as on a command line: ``crop="224x192"``, ``mean="0.5,0.5,0.5"``.
    """

    resize: Annotated[
        int | tuple[int, int] | Letterbox | None, _unless_none(_scaled), Option(metavar="PIXELS", kind=str)
    ] = Field(
        default=None,
        description="Pixels that the shorter side of an image is scaled to; or 224x192 (HxW): both sides, whatever the "
        "image's proportions. letterbox: the whole image within the crop, in its proportions, with grey around it.",
    )
    crop: Annotated[int | tuple[int, int] | None, _unless_none(_sides), Option(metavar="PIXELS", kind=str)] = Field(
        default=None,
        description="Pixels that are cut from the centre, the size of the network's input: 224, or 224x192 (HxW). By "
        "default all, where resize gives both sides.",
    )
    mean: Annotated[float | tuple[float, ...] | None, _unless_none(_means), Option(metavar="NUMBERS", kind=str)] = (
        Field(
            default=None,
            description="The mean of each channel, of pixels from 0 to 1: 0.485,0.456,0.406, or one number for grey. "
            "Alpha is a channel, too.",
        )
    )
    std: Annotated[float | tuple[float, ...] | None, _unless_none(_spreads), Option(metavar="NUMBERS", kind=str)] = (
        Field(default=None, description="The standard deviation that each channel is divided by, written as the mean.")
    )
    interpolation: Interpolation | None = Field(default=None, description="How images are scaled, with antialiasing.")
    pixel_max: Annotated[float | None, _unless_none(_white), Option(metavar="NUMBER", kind=str)] = Field(
        default=None,
        description="The value of white in greys of more than 8 bits, such as 4095; by default the largest of their "
        "type. That is 65535 for 16 bits and 1 for floats. Greys of 32 bits have no default.",
    )

    @model_validator(mode="after")
    def _fits_itself(self) -> PreprocessingConfig:
        given = self.given()
        if "resize" in given and "crop" in given and (fault := border_fault(given["resize"], given["crop"])):
            raise ValueError(fault.format("", ""))
        if "mean" in given and "std" in given and len(given["mean"]) != len(given["std"]):
            raise ValueError(
                f"mean has {len(given['mean'])} numbers and std {len(given['std'])}; give equal numbers of both"
            )
        channels = next((len(given[part]) for part in ("mean", "std") if part in given), 3)
        others = {"resize": 1 << 16, "crop": (1, 1), "mean": (0.0,) * channels, "std": (1.0,) * channels}
        try:
            Preprocessing(**{**others, **given})
        except CardError as error:  # a number out of its range
            raise ValueError(str(error).removeprefix("preprocessing: ")) from None
        return self

    def given(self) -> dict[str, Any]:
        """Return the given parts, in the form that `Preprocessing` takes."""
        given = {name: value for name in PARTS if (value := getattr(self, name)) is not None}
        if isinstance(given.get("resize"), tuple):
            given.setdefault("crop", given["resize"])
        return given


#: The parts of a preprocessing, by name.
PARTS = tuple(PreprocessingConfig.model_fields)


def parse_preprocessing(given: Mapping[str, object], spelled: str) -> PreprocessingConfig:
    """Check the user's settings.

    Args:
        given: parts by name.
        spelled: how a part is spelled there, with ``{}`` for its name: ``--{}``.

    Raises:
        UserError: a part is unknown, or has an illegal value. The message names each.
    """
    try:
        return PreprocessingConfig.model_validate({str(name): value for name, value in given.items()})
    except ValidationError as error:
        # Faults between parts name the parts themselves.
        found = [
            f"{_spelled(spelled, fault.field)}: {fault.message}" if fault.field else f"preprocessing: {fault.message}"
            for fault in faults(PreprocessingConfig, error)
        ]
        raise UserError("; ".join(found)) from None


def _spelled(spelled: str, part: str) -> str:
    return spelled.format(part.replace("_", "-") if spelled.startswith("--") else part)


@dataclass(frozen=True)
class Wish:
    """The user's settings from one place. ``spelled`` is how a part is spelled there, with ``{}`` for its name."""

    config: PreprocessingConfig
    spelled: str = "--{}"

    def named(self, part: str) -> str:
        """Return how a part is spelled there."""
        return _spelled(self.spelled, part)


def border_fault(resize: int | tuple[int, int] | Letterbox, crop: tuple[int, int]) -> str:
    """Say why images would get a black border, with ``{}`` for the origins of crop and resize. Empty if they do not."""
    if resize == LETTERBOX:
        return ""
    if isinstance(resize, int):
        fits, scaled, needed = min(crop) <= resize, str(resize), str(min(crop))
    else:
        fits, scaled, needed = crop[0] <= resize[0] and crop[1] <= resize[1], size_words(resize), size_words(crop)
    told = f"crop {size_words(crop)}{{}} is larger than resize {scaled}{{}}: images would get a black border"
    return "" if fits else f"{told}; resize must be at least {needed}"


def size_words(sides: tuple[int, int]) -> str:
    """Return height and width as ``224x192``."""
    return "x".join(map(str, sides))
