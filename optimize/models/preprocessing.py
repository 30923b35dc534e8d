"""How a data set's images reach a model's network (size, crop, mean, std, interpolation), and who says so.

The one place that decides: what the user asks for, before what the model declares or the data suggest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from optimize.data.records import ImageData
from optimize.models.source import ModelSource
from serve.common.config import Config, faults
from serve.runtime.card.card import MOST_CHANNELS, Interpolation, Preprocessing
from serve.runtime.display import Described, glance
from serve.runtime.errors import CardError, UserError

#: What a model gets that declares nothing, size apart: ImageNet's statistics.
FALLBACK: Mapping[str, Any] = {
    name: Preprocessing.__dataclass_fields__[name].default for name in ("mean", "std", "interpolation")
}


def _pixels(value: object) -> object:
    """A whole number of pixels, also as text; the error says what would be right."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 16:
        raise ValueError("must be a whole number of pixels, at least 1, such as 256")
    return value


def _sides(value: object) -> object:
    """One side or height and width: ``224``, ``[224, 192]``, ``"224"``, ``"224x192"``."""
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
    """The shorter side, or height and width as in `_sides`."""
    pair = isinstance(value, list | tuple) or (isinstance(value, str) and re.search(r"[x×,]", value) is not None)
    return _sides(value) if pair else _pixels(value)


def _numbers(value: object) -> object:
    """One finite number per channel: ``[0.5, 0.5, 0.5]``, ``0.5``, ``"0.5, 0.5, 0.5"``."""
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
        raise ValueError(f"must be of pixels from 0 to 1; of pixels from 0 to 255 a 255th, {of_bytes}, and so std")
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
    """How images reach the network, where that is to differ from what model and data ask for; None leaves it to them.

    Sizes and numbers may also be given as text, as on a command line: ``crop="224x192"``, ``mean="0.5,0.5,0.5"``.
    """

    resize: Annotated[int | tuple[int, int] | None, _unless_none(_scaled)] = Field(
        default=None,
        description="pixels that an image's shorter side is scaled to, or height and width that all of it is scaled "
        "to, whatever its proportions",
    )
    crop: Annotated[int | tuple[int, int] | None, _unless_none(_sides)] = Field(
        default=None,
        description="pixels that are cut from the centre, one side or height and width: the input's size. All where "
        "resize is a height and a width",
    )
    mean: Annotated[float | tuple[float, ...] | None, _unless_none(_means)] = Field(
        default=None, description="subtracted from each channel after scaling to [0, 1]; one number per channel"
    )
    std: Annotated[float | tuple[float, ...] | None, _unless_none(_spreads)] = Field(
        default=None, description="each channel is divided by it; one number per channel"
    )
    interpolation: Interpolation | None = Field(default=None, description="how images are scaled, antialiased")
    pixel_max: Annotated[float | None, _unless_none(_white)] = Field(
        default=None, description="what is white in greys of more than 8 bits, such as 4095; None: their type's largest"
    )

    @model_validator(mode="after")
    def _fits_itself(self) -> PreprocessingConfig:
        given = self.given()
        if "resize" in given and "crop" in given and (fault := _border(given["resize"], given["crop"])):
            raise ValueError(fault.format("", ""))
        if "mean" in given and "std" in given and len(given["mean"]) != len(given["std"]):
            raise ValueError(f"mean has {len(given['mean'])} numbers and std {len(given['std'])}; give as many")
        channels = next((len(given[part]) for part in ("mean", "std") if part in given), 3)
        others = {"resize": 1 << 16, "crop": (1, 1), "mean": (0.0,) * channels, "std": (1.0,) * channels}
        try:
            Preprocessing(**{**others, **given})
        except CardError as error:  # a number out of its range
            raise ValueError(str(error).removeprefix("preprocessing: ")) from None
        return self

    def given(self) -> dict[str, Any]:
        """The parts that are given, in the form that `Preprocessing` takes them."""
        given = {name: value for name in _PARTS if (value := getattr(self, name)) is not None}
        if isinstance(given.get("resize"), tuple):
            given.setdefault("crop", given["resize"])
        return given


_PARTS = tuple(PreprocessingConfig.model_fields)


def parse_preprocessing(given: Mapping[str, object], spelled: str) -> PreprocessingConfig:
    """Check what a user wrote somewhere.

    Args:
        given: parts by name.
        spelled: how a part is named there, with ``{}`` for its name: ``--{}``.

    Raises:
        UserError: a part is unknown, or has an illegal value; each is named.
    """
    try:
        return PreprocessingConfig.model_validate({str(name): value for name, value in given.items()})
    except ValidationError as error:
        # What is wrong between parts names them itself.
        found = [
            f"{_spelled(spelled, fault.field)}: {fault.message}" if fault.field else f"preprocessing: {fault.message}"
            for fault in faults(PreprocessingConfig, error)
        ]
        raise UserError("; ".join(found)) from None


def _spelled(spelled: str, part: str) -> str:
    return spelled.format(part.replace("_", "-") if spelled.startswith("--") else part)


@dataclass(frozen=True)
class Wish:
    """What the user asks for in one place; ``spelled`` is how a part is named there, with ``{}`` for its name."""

    config: PreprocessingConfig
    spelled: str = "--{}"

    def named(self, part: str) -> str:
        """How a part is named there."""
        return _spelled(self.spelled, part)


@dataclass(frozen=True)
class ChosenPreprocessing(Described):
    """How images reach the network, and in words who said so of each part (``resize``, ``crop``, ``mean`` …)."""

    preprocessing: Preprocessing
    origins: Mapping[str, str]

    def _facts(self) -> dict[str, str]:
        values = ((name, value) for name in _PARTS if (value := getattr(self.preprocessing, name)) is not None)
        return {
            name: f"{glance(value)} ({origin})" if (origin := self.origins.get(name)) else glance(value)
            for name, value in values
        }

    def __str__(self) -> str:
        """All parts in one line, those of one origin together: ``resize 256, crop 224x224, … (--crop)``."""
        chosen = self.preprocessing
        words = {
            "resize": f"resize {chosen.resize if isinstance(chosen.resize, int) else _size(chosen.resize)}",
            "crop": f"crop {_size(chosen.crop)}",
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
    """How the images of ``data`` reach the network of ``source``.

    Mean, std and interpolation are what the model declares, or ImageNet's. The size is, first that
    applies: ``image_size``, with ``resize`` in the declared proportion to the crop; a user's own
    declaration, and that of weights that fix it; the side that the data prefers, or for square images of up to 64
    pixels their own size, each raised to what the network can take; a library's declaration; 224 out of 256.
    What ``wishes`` give goes before all of these, the later of them before the earlier. Of images that are prepared
    already, it is what was done to them.

    Raises:
        UserError: the network cannot take the size (the nearest legal one is named), or the parts do not fit together.
    """
    if data.preprocessing is not None:
        return _prepared(source, data, data.preprocessing, image_size, wishes)
    parts, origins = _declared(source)
    if (sized := _sized(source, data, image_size, parts)) is not None:
        resize, side, why = sized
        parts |= {"resize": resize, "crop": (side, side)}
        origins |= dict.fromkeys(("resize", "crop"), why)
    for wish in wishes:
        given = wish.config.given()
        if image_size is not None and given.get("crop", (image_size, image_size)) != (image_size, image_size):
            raise UserError(
                f"{wish.named('crop')} {_size(given['crop'])} and an image size of {image_size} are both "
                "given, and mean the same; give one of them"
            )
        parts |= given
        # A height and a width to scale to are the crop, too, where there is no other.
        said = {name: name if getattr(wish.config, name) is not None else "resize" for name in given}
        origins |= {name: wish.named(part) for name, part in said.items()}
    for side in sorted(set(parts["crop"])):
        source.check_size(side)
    if fault := _border(parts["resize"], parts["crop"]):
        raise UserError(fault.format(f" ({origins['crop']})", f" ({origins['resize']})"))
    try:
        return ChosenPreprocessing(Preprocessing(**parts), origins)
    except CardError as error:
        if len(parts["mean"]) == len(parts["std"]):  # a number out of its range
            raise UserError(str(error)) from None
        raise UserError(
            f"mean has {len(parts['mean'])} numbers ({origins['mean']}) and std {len(parts['std'])} "
            f"({origins['std']}); give both, with as many"
        ) from None


def _prepared(
    source: ModelSource, data: ImageData, done: Preprocessing, image_size: int | None, wishes: Iterable[Wish]
) -> ChosenPreprocessing:
    """What was done to the images already; nobody can ask for anything else."""
    parts = {name: getattr(done, name) for name in _PARTS}
    asked = [(wish.named(name), value, parts[name]) for wish in wishes for name, value in wish.config.given().items()]
    asked += [("image size", (image_size, image_size), done.crop)] if image_size is not None else []
    for spelled, wanted, there in asked:
        if wanted != there:
            raise UserError(
                f"the images of {data.name} are prepared already, with {there}; {spelled} cannot be {wanted}"
            )
    for side in sorted(set(done.crop)):
        source.check_size(side)
    return ChosenPreprocessing(done, dict.fromkeys(_PARTS, "done already, as you state"))


def _declared(source: ModelSource) -> tuple[dict[str, Any], dict[str, str]]:
    """Every part as the model declares it, or else as it is by default; and who says so."""
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
        declared = {name: getattr(source.preprocessing, name) for name in _PARTS if name not in source.undeclared}
        told = [name for name, value in declared.items() if value is not None]
        parts |= {name: declared[name] for name in told}
        origins |= dict.fromkeys(told, source.declared_by)
    return parts, origins


def _sized(
    source: ModelSource, data: ImageData, image_size: int | None, declared: Mapping[str, Any]
) -> tuple[int | tuple[int, int], int, str] | None:
    """Resize, crop and the reason, where the declared size is not the one to take."""
    if image_size is not None:
        source.check_size(image_size)
        why = f"your image size of {image_size}"
        if isinstance(declared["resize"], tuple):
            height, width = (
                round(image_size * side / kept) for side, kept in zip(declared["resize"], declared["crop"], strict=True)
            )
            return (height, width), image_size, why
        return round(image_size * declared["resize"] / min(declared["crop"])), image_size, why
    declared_by_user = source.origin in ("user", "module") and source.preprocessing is not None
    if declared_by_user or source.only_size is not None:
        return None
    if data.preferred_side is not None:
        side = source.legal_size(data.preferred_side)
        return side, side, f"{data.name} scaled to {side}x{side}"
    if data.native_size is None or not data.native_size[0] == data.native_size[1] <= 64:
        return None
    native = data.native_size[0]
    side = source.legal_size(native)
    why = f"the data's images are {native}x{native}"
    return side, side, why if side == native else f"{why}, the network needs {side}x{side}"


def _border(resize: int | tuple[int, int], crop: tuple[int, int]) -> str:
    """Why images would get a black border, with ``{}`` for who says so of crop and resize; empty where they do not."""
    if isinstance(resize, int):
        fits, scaled, needed = min(crop) <= resize, str(resize), str(min(crop))
    else:
        fits, scaled, needed = crop[0] <= resize[0] and crop[1] <= resize[1], _size(resize), _size(crop)
    told = f"crop {_size(crop)}{{}} is larger than resize {scaled}{{}}: images would get a black border"
    return "" if fits else f"{told}; resize must be at least {needed}"


def _size(sides: tuple[int, int]) -> str:
    return "x".join(map(str, sides))


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:.4g}" for number in numbers)
