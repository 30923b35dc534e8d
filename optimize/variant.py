"""An artifact in a Python program: it predicts as the server does, and shows its facts in a notebook."""

from __future__ import annotations

import functools
import io
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from serve.runtime.errors import ImageError, Refusal, RequestError, UserError
from serve.runtime.images.headers import faults_named
from serve.runtime.images.image_preprocessing import is_deep, upright
from serve.runtime.service.predictor import Predictor

#: An image that `Variant.predict` accepts: encoded bytes, a file, or an opened picture.
Picture = bytes | str | Path | Image


@dataclass(frozen=True, repr=False)
class Variant(Described):
    """One variant of a model: its artifact, and the session (data, device, store) that it belongs to."""

    session: Session
    step: Step

    @property
    def name(self) -> str:
        """Return the variant's name in tables."""
        return self.artifact.name

    @property
    def artifact(self) -> Artifact:
        """Return the variant's files and card."""
        return self.step.artifact

    @property
    def training(self) -> tuple[History, ...]:
        """Return the history of each training that led to this variant: losses, accuracies, times.

        It is empty if nothing was trained.
        """
        return self.step.training

    def predictor(self) -> Predictor:
        """Open the variant in the serving runtime on the session's device. The predictor maps encoded images to labels.

        Raises:
            EngineError: the variant cannot run on this device.
        """
        with silenced():
            return _predictor(self.artifact.folder, str(self.session.context.device))

    def predict(self, images: Picture | Sequence[Picture], **parameters: Any) -> Any:
        """Answer one image or several with the code of the server.

        Args:
            images: encoded bytes, a file, an opened PIL image, or a list of these.
            parameters: those of a request: for a classifier ``k``, the number of classes (default 5).

        Returns:
            The answer to one image, or a list with the answer to each image. A classifier's is a list of `Label`, best
            first.

        Raises:
            UserError: a file cannot be read, a value is not an image, or a parameter is wrong. The message names it.
            EngineError: the variant cannot run on the session's device.
        """
        single = isinstance(images, Picture)
        if not single and (not isinstance(images, Sequence) or not all(isinstance(each, Picture) for each in images)):
            raise UserError(
                "images: must be encoded bytes, a file path, a PIL image, or a list of these, not "
                f"{reprlib.repr(images)} ({type(images).__name__})"
            )
        predictor = _opened(self)
        task = predictor.task
        if unknown := [name for name in parameters if name not in task.parameters]:
            known = ", ".join(task.parameters) or "none"
            raise UserError(f"{unknown[0]}: {task.name} has no such parameter (it has {known})")
        try:
            options = task.options(parameters)
        except RequestError as error:
            raise UserError(str(error)) from None
        pictures = [images] if isinstance(images, Picture) else list(images)
        encoded = []
        for number, picture in enumerate(pictures):
            try:
                encoded.append(_encoded(picture))
            except ImageError as error:
                raise UserError(f"{_which(picture, number)}: {error}") from None
        outcomes = predictor.predict(encoded, options)
        answers = []
        for number, (picture, outcome) in enumerate(zip(pictures, outcomes, strict=True)):
            if isinstance(outcome, Refusal):
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
    """A variant that could not be made. A comparison shows it as a row with the reason and no figures.

    Attributes:
        session: the session it belongs to.
        row: its name, pass, settings and parent, and the reason.
        traceback: the traceback of the exception, as text. It is empty if its parent failed.
    """

    session: Session
    row: Row
    traceback: str = ""

    @property
    def name(self) -> str:
        """Return the variant's name in tables."""
        return self.row.name

    @property
    def reason(self) -> str:
        """Return why it was not made, in one line."""
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
    """Encode an image as a client would send it to the endpoint.

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
        seen = upright(picture)  # the PNG or TIFF written here has no EXIF
        if is_deep(seen):
            return tiff(seen)
        # PNG keeps every pixel. A mode that PNG lacks is written as RGB, which is what it would be decoded to.
        seen = seen if seen.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else seen.convert("RGB")
        seen.save(stream, "PNG", compress_level=1)
    return stream.getvalue()
