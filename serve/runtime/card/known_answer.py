"""``known.json``: an image and its measured answer, to check that a served artifact answers correctly.

The file is beside the card and in the archive. The artifact's task makes the facts of the answer, and compares them
with a served one. Another machine, engine or batch size rounds differently, which the task allows. A wrong file or
another preprocessing is far outside that.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import CardError
from . import fields
from .json_documents import parse_document, read_document

SCHEMA: Final = 2
KNOWN_FILE: Final = "known.json"
#: Why a model is ready without a check of its known answer.
NOTHING_KNOWN: Final = f"its archive has no {KNOWN_FILE}"
_LARGEST_FILE = 96 << 20  # characters


@dataclass(frozen=True)
class KnownAnswer:
    """An image and the artifact's answer.

    Attributes:
        image: encoded, as a client would send it.
        task: name of the artifact's task.
        execution: name of the execution that computed the answer.
        facts: the answer as JSON values, which only the task understands (see `Task.known`).
    """

    image: bytes
    task: str
    execution: str
    facts: Mapping[str, Any]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not isinstance(self.image, bytes) or not self.image:
            raise CardError("known: image must be the bytes of an image")
        fields.word("known: task", self.task)
        fields.text("known: execution", self.execution)
        fields.json_object("known: the answer", self.facts)
        fields.whole("known: schema", self.schema, SCHEMA, SCHEMA)

    @property
    def text(self) -> str:
        """The file's text, with the facts beside the other fields. Equal records give equal bytes."""
        own = {
            "image": base64.b64encode(self.image).decode(),
            "task": self.task,
            "execution": self.execution,
            "schema": self.schema,
        }
        return json.dumps({**self.facts, **own}, indent=2, sort_keys=True, allow_nan=False) + "\n"


def parse_known(document: str, path: Path) -> KnownAnswer:
    """Parse the result of `KnownAnswer.text`. ``path`` is only for messages.

    Raises:
        CardError: the document is not JSON of this schema, or a field is missing or of the wrong type. The facts are
            not checked (see `Task.check_known`).
    """
    body = parse_document(document, path, _LARGEST_FILE)
    try:
        if not isinstance(body, dict):
            raise ValueError("it is not a JSON object")
        facts = dict(body)
        image = base64.b64decode(str(facts.pop("image", "")), validate=True)
        task, execution, schema = (facts.pop(name, None) for name in ("task", "execution", "schema"))
        return KnownAnswer(image, task, execution, facts, schema)
    except (ValueError, binascii.Error) as error:
        raise CardError(f"{path}: cannot be read ({error})") from None
    except CardError as error:
        raise CardError(f"{path}: {error}") from None


def read_known(folder: Path) -> KnownAnswer | None:
    """Return the known answer in an artifact's folder or an unpacked archive. None if there is none.

    Raises:
        CardError: see `parse_known`.
    """
    path = folder / KNOWN_FILE
    document = read_document(path, _LARGEST_FILE)
    return None if document is None else parse_known(document, path)
