"""``serving.json``: how an archive is served, by which executions; what the handler obeys, whatever server it is in."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..device.cores import cores
from ..errors import CardError, UserError, did_you_mean
from . import fields
from .budget import SERVING, Budget
from .evidence import Evidence
from .execution import Execution
from .json_documents import parse_document, read_document

SCHEMA: Final = 1
SERVING_FILE: Final = "serving.json"
# Most threads that decode where nobody says how many.
_DECODING_THREADS = 8
_LARGEST_FILE = 1 << 20  # characters
#: That so many characters may have.
MOST_BYTES: Final = 4 * _LARGEST_FILE
_MOST = 1 << 20  # of anything that is counted here
_LONGEST_S = 7 * 24 * 3600
_DECODER = re.compile(r"[a-z][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Serving:
    """How an artifact is served.

    Attributes:
        executions: what may run it, in order of preference: the first that works where it is served does. One for
            CUDA says ``cuda`` and gets the GPU that the server assigns to the worker; a worker without one goes on to
            the next.
        strict: only the first may run it; where that does not work, loading fails.
        workers: processes that load the model.
        batch_size: most images that go through the network together.
        max_batch_delay_ms: how long the first of a batch waits for others.
        decode_threads: threads of a worker that decode images beside the engine; None: one for each core, at most 8.
        queue_limit: requests that may wait for an answer; the next one is told to try again later.
        decoder: what decodes the images that it takes, see `decoders`; ``cpu`` is the runtime's own, which does where
            another one does not work, and gives the pixels that accuracy was measured on.
        response_timeout_s: a batch that takes longer has its worker restarted.
        startup_timeout_s: most time for a worker to load and warm up.
        k: classes in an answer where the request does not say.
        instance_limit: most images in one JSON request.
        budget: what decoding may cost.
        evidence: what was measured of executions, of those above and perhaps others; it changes nothing.
    """

    executions: tuple[Execution, ...]
    strict: bool = False
    workers: int = 1
    batch_size: int = 16
    max_batch_delay_ms: int = 1
    decode_threads: int | None = None
    queue_limit: int = 256
    decoder: str = "cpu"
    response_timeout_s: int = 60
    startup_timeout_s: int = 600
    k: int = 5
    instance_limit: int = 64
    budget: Budget = SERVING
    evidence: tuple[Evidence, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for execution in fields.sequence("serving: executions", self.executions):
            if not isinstance(execution, Execution):
                raise CardError(f"serving: an execution must be a JSON object, found {fields.shown(execution)}")
            if execution.device not in ("cpu", "cuda"):
                raise CardError(
                    f"serving: an execution's device must be cpu or cuda, found {execution.device}: which GPU, the "
                    f"server says"
                )
        if not self.executions:
            raise CardError("serving: it must name at least one execution")
        if type(self.strict) is not bool:
            raise CardError(f"serving: strict must be true or false, found {fields.shown(self.strict)}")
        fields.whole("serving: batch_size", self.batch_size, 1, 1024)
        if self.decode_threads is not None:
            fields.whole("serving: decode_threads", self.decode_threads, 1, 1024)
        for name in ("workers", "max_batch_delay_ms", "queue_limit", "k", "instance_limit"):
            fields.whole(f"serving: {name}", getattr(self, name), 1, _MOST)
        for name in ("response_timeout_s", "startup_timeout_s"):
            fields.whole(f"serving: {name}", getattr(self, name), 1, _LONGEST_S)
        if not isinstance(self.decoder, str) or not _DECODER.fullmatch(self.decoder):
            raise CardError(f"serving: decoder must be a word of a-z, 0-9 and '-', found {fields.shown(self.decoder)}")
        if not isinstance(self.budget, Budget):
            raise CardError(f"serving: budget must be a JSON object, found {fields.shown(self.budget)}")
        for entry in fields.sequence("serving: evidence", self.evidence):
            if not isinstance(entry, Evidence):
                raise CardError(f"serving: evidence must be of JSON objects, found {fields.shown(entry)}")
        fields.whole("serving: schema", self.schema, SCHEMA, SCHEMA)

    @property
    def decoding_threads(self) -> int:
        """How many threads of a worker decode, on this machine."""
        return self.decode_threads or decoders_for(cores())

    @property
    def allowance(self) -> Budget:
        """The budget, with half of ``response_timeout_s`` at most for a batch.

        What is not decided by then would be by the server: it kills the worker, and nobody in the batch is answered.
        """
        most = self.response_timeout_s / 2
        seconds = self.budget.batch_seconds
        return dataclasses.replace(self.budget, batch_seconds=most if seconds is None else min(seconds, most))

    @property
    def text(self) -> str:
        """The file's text: equal records, equal bytes."""
        body = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        body["executions"] = [execution.to_json() for execution in self.executions]
        body["budget"] = dataclasses.asdict(self.budget)
        body["evidence"] = [entry.to_json() for entry in self.evidence]
        return json.dumps(body, indent=2, sort_keys=True, allow_nan=False) + "\n"


def decoders_for(cores: int) -> int:
    """How many threads of a worker decode where nobody says, if it has so many cores."""
    return min(cores, _DECODING_THREADS)


def parse_serving(document: str, path: Path) -> Serving:
    """Read what `Serving.text` wrote; what is left out has its default. ``path`` names it in messages.

    Raises:
        CardError: it is no JSON of this schema, or a field is unknown, of the wrong type or out of range.
    """
    body = parse_document(document, path, _LARGEST_FILE)
    try:
        values = _known(body, Serving, "serving")
        if not isinstance(values.get("executions"), list):
            raise CardError("serving: executions must be a list")
        values["executions"] = tuple(Execution.from_json(entry) for entry in values["executions"])
        if "evidence" in values:
            if not isinstance(values["evidence"], list):
                raise CardError("serving: evidence must be a list")
            values["evidence"] = tuple(Evidence.from_json(entry) for entry in values["evidence"])
        if "budget" in values:
            values["budget"] = Budget(**_known(values["budget"], Budget, "serving: budget"))
        return Serving(**values)
    except (CardError, UserError) as error:
        raise CardError(f"{path}: {error}") from None


def read_serving(folder: Path) -> Serving | None:
    """How the artifact of a folder is served; None if it does not say.

    Raises:
        CardError: as `parse_serving`.
    """
    path = folder / SERVING_FILE
    document = read_document(path, _LARGEST_FILE)
    return None if document is None else parse_serving(document, path)


def _known(body: object, kind: type[Any], where: str) -> dict[str, Any]:
    """A JSON object with the fields of a record and no others."""
    if not isinstance(body, Mapping):
        raise CardError(f"{where} must be a JSON object, found {fields.shown(body)}")
    known = [entry.name for entry in dataclasses.fields(kind)]
    for name in body:
        if name not in known:
            raise CardError(
                f"{where}: unknown field {fields.shown(name)}{did_you_mean(name, known)}; known are {', '.join(known)}"
            )
    return dict(body)
