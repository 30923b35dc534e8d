"""An artifact as a Python program holds it: it predicts as it is served, and shows itself in a notebook."""

from __future__ import annotations

import functools
import io
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from PIL.Image import Image

from optimize.data.sources import tiff
from optimize.measure.rows import Row
from optimize.noise import silenced
from optimize.report.number_format import size
from optimize.run.session import Session, Step
from optimize.store.artifact import Artifact
from optimize.store.training_history import History
from serve.runtime.card.budget import Budget
from serve.runtime.card.card import read_card
from serve.runtime.display import Described
from serve.runtime.engines.base import preferred
from serve.runtime.errors import ImageError, UserError
from serve.runtime.images.headers import faults_named
from serve.runtime.images.image_preprocessing import is_deep, upright
from serve.runtime.service.predictor import Label, Predictor

#: An image as `Variant.predict` takes it: its encoded bytes, a file, or an opened picture.
Picture = bytes | str | Path | Image


@dataclass(frozen=True, repr=False)
class Variant(Described):
    """One variant of a model: its artifact, and the session (data, device, store) that it belongs to."""

    session: Session
    step: Step

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.artifact.name

    @property
    def artifact(self) -> Artifact:
        """Its files and card."""
        return self.step.artifact

    @property
    def training(self) -> tuple[History, ...]:
        """How each training went that made it: losses, accuracies, times; none where nothing was trained."""
        return self.step.training

    def predictor(self) -> Predictor:
        """Opened by the serving runtime on the session's device: encoded images to labels.

        Raises:
            EngineError: it cannot run on this device.
        """
        with silenced():
            return _predictor(self.artifact.folder, str(self.session.context.device))

    @overload
    def predict(self, images: Picture, k: int = 5) -> list[Label]: ...  # type: ignore[overload-overlap]  # a str is a sequence

    @overload
    def predict(self, images: Sequence[Picture], k: int = 5) -> list[list[Label]]: ...

    def predict(self, images: Picture | Sequence[Picture], k: int = 5) -> list[Label] | list[list[Label]]:
        """Classify one image or several, by the code that serves.

        Args:
            images: encoded bytes, a file, an opened PIL image, or a list of such.
            k: how many classes to answer, best first.

        Returns:
            The classes of one image, or a list of those of each.

        Raises:
            UserError: a file cannot be read, or something is no image; it is named.
            EngineError: the variant cannot run on the session's device.
        """
        single = isinstance(images, Picture)
        if not single and (not isinstance(images, Sequence) or not all(isinstance(each, Picture) for each in images)):
            raise UserError(
                f"images: must be encoded bytes, a file's path, a PIL image, or a list of such, and not "
                f"{reprlib.repr(images)} ({type(images).__name__})"
            )
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UserError(f"k: must be a whole number of at least 1 (it is {k!r})")
        pictures = [images] if isinstance(images, Picture) else list(images)
        encoded = []
        for number, picture in enumerate(pictures):
            try:
                encoded.append(_encoded(picture))
            except ImageError as error:
                raise UserError(f"{_which(picture, number)}: {error}") from None
        outcomes = _opened(self).predict(encoded, k)
        answers = []
        for number, (picture, outcome) in enumerate(zip(pictures, outcomes, strict=True)):
            if not isinstance(outcome, list):
                raise UserError(f"{_which(picture, number)}: {outcome.message}")
            answers.append(outcome)
        return answers[0] if single else answers

    def _facts(self) -> dict[str, str]:
        card, data = self.artifact.card, self.session.context.data
        return {
            "name": self.name,
            "model": card.model,
            "data": data.name,
            "precision": card.precision,
            "size": size(self.artifact.path.stat().st_size),
            "preprocessing": str(self.session.preprocessing),
        }


@dataclass(frozen=True, repr=False)
class Failed(Described):
    """A variant that could not be made: a row of a comparison that says why, and has no figures.

    Attributes:
        session: that it belongs to.
        row: its name, pass, settings and parent, and the reason.
        traceback: of the exception that ended it, as text; empty where its parent is what failed.
    """

    session: Session
    row: Row
    traceback: str = ""

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.row.name

    @property
    def reason(self) -> str:
        """Why it was not made, in one line."""
        assert self.row.skip is not None
        return self.row.skip.reason

    def _facts(self) -> dict[str, str]:
        return {"name": self.name, "reason": self.reason}


def _opened(variant: Variant) -> Predictor:
    return _open(variant.artifact.folder, str(variant.session.context.device))


@functools.lru_cache(maxsize=4)
def _open(folder: Path, device: str) -> Predictor:
    with silenced():
        return _predictor(folder, device)


def _predictor(folder: Path, device: str) -> Predictor:
    return Predictor(folder, preferred(read_card(folder), device))


def _which(picture: Picture, number: int) -> str:
    return str(picture) if isinstance(picture, str | Path) else f"image {number}"


def _encoded(picture: Picture) -> bytes:
    """An image as the endpoint would get it.

    Raises:
        UserError: a file cannot be read.
        ImageError: a picture cannot be loaded or converted.
    """
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, str | Path):
        try:
            return Path(picture).read_bytes()
        except OSError as error:
            raise UserError(f"{picture}: cannot be read ({error.strerror})") from None
    stream = io.BytesIO()
    with faults_named(Budget()):
        seen = upright(picture)  # for what is written of a picture here has no EXIF
        if is_deep(seen):
            return tiff(seen)
        # It keeps every pixel; of the modes that it has no place for, RGB is what they would be decoded to.
        seen = seen if seen.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else seen.convert("RGB")
        seen.save(stream, "PNG", compress_level=1)
    return stream.getvalue()
