"""``known.json``: an image and its measured logits, to check that a served artifact answers correctly.

The file is beside the card and in the archive. Another machine, engine or batch size rounds differently, which the
tolerance allows. A wrong file, preprocessing or class order is far outside it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from ..errors import CardError
from . import fields
from .card import Probabilities
from .json_documents import parse_document, read_document

SCHEMA: Final = 1
KNOWN_FILE: Final = "known.json"
#: Why a model is ready without a check of its known answer.
NOTHING_KNOWN: Final = f"its archive has no {KNOWN_FILE}"
#: Largest allowed difference of a log-probability, relative to the range (largest minus smallest) of the known logits.
#: Each logit may then differ by half of it. Two executions of one int8 artifact (ResNet-18 by OpenVINO and by ONNX
#: Runtime) differed by a sixtieth in their logits.
TOLERANCE: Final = 0.1
# Below it a float32 softmax has no digits left. Less probable classes count as equally improbable.
_LEAST = -60.0
_LARGEST_FILE = 96 << 20  # characters


@dataclass(frozen=True)
class KnownAnswer:
    """An image and the artifact's answer.

    Attributes:
        image: encoded, as a client would send it.
        logits: one for each class.
        execution: name of the execution that computed them.
        tolerance: see `TOLERANCE`.
        probabilities: how answers are made from logits, as in the card.
    """

    image: bytes
    logits: tuple[float, ...]
    execution: str
    tolerance: float = TOLERANCE
    probabilities: Probabilities = "softmax"
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not isinstance(self.image, bytes) or not self.image:
            raise CardError("known: image must be the bytes of an image")
        for logit in fields.sequence("known: logits", self.logits):
            fields.number("known: a logit", logit, -3.5e38, 3.5e38)
        if not self.logits:
            raise CardError("known: the list of logits is empty")
        fields.text("known: execution", self.execution)
        fields.number("known: tolerance", self.tolerance, 0.0, 1.0)
        fields.one_of("known: probabilities", self.probabilities, get_args(Probabilities))
        fields.whole("known: schema", self.schema, SCHEMA, SCHEMA)

    @property
    def allowed(self) -> float:
        """Largest allowed difference of a log-probability."""
        return self.tolerance * (max(self.logits) - min(self.logits))

    def difference(self, probabilities: Sequence[float]) -> float:
        """Return the largest difference of log-probabilities from the known ones. Classes below e^-60 count as e^-60.

        Args:
            probabilities: of each class, in order.

        Returns:
            Infinity if their number differs from the known ones, or one is not a probability.
        """
        if len(probabilities) != len(self.logits) or not all(0.0 <= value <= 1.001 for value in probabilities):
            return math.inf
        found = (math.log(value) if value > 0 else _LEAST for value in probabilities)
        return max(abs(max(a, _LEAST) - max(b, _LEAST)) for a, b in zip(found, self._logarithms(), strict=True))

    def _logarithms(self) -> Sequence[float]:
        """Return the logarithms of the known probabilities."""
        if self.probabilities == "sigmoid":
            return [min(logit, 0.0) - math.log1p(math.exp(-abs(logit))) for logit in self.logits]
        largest = max(self.logits)
        total = largest + math.log(math.fsum(math.exp(logit - largest) for logit in self.logits))
        return [logit - total for logit in self.logits]

    def seen_in(self, by_class: Mapping[int, float]) -> str:
        """Compare an answer with this one. Return a line with the difference.

        Args:
            by_class: the probability of each class, by its index.

        Raises:
            CardError: the answer differs too much.
        """
        classes = range(max(len(self.logits), len(by_class)))
        difference = self.difference([by_class.get(index, -1.0) for index in classes])
        if difference > self.allowed:
            raise CardError(
                f"the answer to its known image differs from the one measured with {self.execution}: a "
                f"log-probability is off by {difference:.3g}, more than the allowed {self.allowed:.3g}"
            )
        return (
            f"the answer to the known image matches the one of {self.execution}: log-probabilities within "
            f"{difference:.2g}, allowed {self.allowed:.2g}"
        )

    @property
    def text(self) -> str:
        """The file's text. Equal records give equal bytes."""
        body = dataclasses.asdict(self) | {"image": base64.b64encode(self.image).decode()}
        return json.dumps(body, indent=2, sort_keys=True, allow_nan=False) + "\n"


def parse_known(document: str, path: Path) -> KnownAnswer:
    """Parse the result of `KnownAnswer.text`. ``path`` is only for messages.

    Raises:
        CardError: the document is not JSON of this schema, or a field is unknown, missing, of the wrong type or out of
            range.
    """
    body = parse_document(document, path, _LARGEST_FILE)
    try:
        if not isinstance(body, dict):
            raise ValueError("it is not a JSON object")
        values: dict[str, Any] = dict(body)
        values["image"] = base64.b64decode(str(values.get("image", "")), validate=True)
        if isinstance(values.get("logits"), list):
            values["logits"] = tuple(values["logits"])
        return KnownAnswer(**values)
    except (ValueError, TypeError, binascii.Error) as error:
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
