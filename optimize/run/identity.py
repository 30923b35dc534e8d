"""The identity of a run. A run of other data or another model is not overwritten without the user's consent."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from optimize.data.records import ImageData
from optimize.models.source import ModelSource
from optimize.store.atomic_files import write_json
from serve.common import layout
from serve.runs import sealed_files
from serve.runtime.errors import UserError


@dataclass(frozen=True)
class Identity:
    """The model and data of a run, by name and by content, because files are edited and moved.

    Attributes:
        model: the model's reference, with the full path of its file.
        model_content: the source's fingerprint, and the factory.
        data: the data's reference, with the full path of its folder.
        data_content: the data's fingerprint.
    """

    model: str
    model_content: str
    data: str
    data_content: str

    @classmethod
    def of(cls, model: str, data: str, source: ModelSource, images: ImageData) -> Identity:
        """Return the identity of a run of ``model`` on ``data``, from the user's text and the opened objects."""
        return cls(
            layout.model_anywhere(model),
            f"{source.fingerprint}:{source.name}",
            layout.data_anywhere(data),
            images.fingerprint,
        )

    def __str__(self) -> str:
        return f"{self.model} on {self.data}"

    def is_that_of(self, other: Identity) -> bool:
        """Return whether both have the same model and the same data."""
        same_model = self.model == other.model or self.model_content == other.model_content
        return same_model and (self.data == other.data or self.data_content == other.data_content)


def write_identity(identity: Identity, folder: Path) -> None:
    """Write the identity of the run in ``folder``."""
    write_json(dataclasses.asdict(identity), folder / layout.IDENTITY_FILE)


def refuse_replacing(folder: Path, own: Identity) -> None:
    """Check that the run in ``folder``, if it exists, has the same model and data.

    Raises:
        UserError: it has others. The message names both, and the user's choices.
    """
    present = identity_of(folder)
    if present is not None and not own.is_that_of(present):
        raise UserError(
            f"the run {folder.name!r} in {folder.parent} is of {present}, not of {own}; give this one another name "
            "(--name, RUN=…), or replace that one with --replace"
        )


def identity_of(folder: Path) -> Identity | None:
    """Return the identity of the run in ``folder``. None if there is no run, or its file is damaged."""
    if sealed_files.is_sealed(folder) and not sealed_files.holds(folder, layout.IDENTITY_FILE):
        return None
    try:
        return Identity(**json.loads((folder / layout.IDENTITY_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
