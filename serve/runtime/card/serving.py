"""``serving.json``: the settings by which any server serves an archive, with the executions in order."""

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
# Most decode threads by default.
_DECODING_THREADS = 8
_LARGEST_FILE = 1 << 20  # characters
#: The same in bytes of UTF-8.
MOST_BYTES: Final = 4 * _LARGEST_FILE
_MOST = 1 << 20  # upper limit of every count here
_LONGEST_S = 7 * 24 * 3600
_ACCEPT = re.compile(r"[ -~]{0,200}")
_DECODER = re.compile(r"[a-z][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Serving:
    """How an artifact is served.

    Attributes:
        executions: the executions in order of preference. The first one that works is used. One for CUDA says ``cuda``
            and gets the GPU that the server assigns to the worker. A worker without a GPU takes the next.
        strict: whether only the first execution may run. If it does not work, loading fails.
        workers: number of processes that load the model.
        batch_size: most images in a batch.
        max_batch_delay_ms: how long the first image of a batch waits for others.
        decode_threads: a worker's threads that decode images beside the engine. None: one for each core, at most 8.
        queue_limit: most requests that may wait for an answer. Further ones are refused and may try again.
        decoder: the decoder for the images that it accepts, see `decoders`. ``cpu`` is the runtime's own. It also
            replaces a decoder that does not work, and accuracy was measured with its pixels.
        response_timeout_s: seconds for a batch. After that the worker is restarted.
        startup_timeout_s: seconds for a worker to load and warm up.
        k: default number of classes in an answer.
        accept: the header ``Accept`` of requests that leave the form of the answer open. Empty: the task's own form.
        instance_limit: most images in one JSON request.
        budget: what decoding may cost.
        evidence: measured accuracy of executions, not only of those above. It changes nothing.
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
    accept: str = ""
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
                    f"serving: an execution's device must be cpu or cuda, found {execution.device}, not "
                    f"{execution.device}: the server chooses the GPU"
                )
        if not self.executions:
            raise CardError("serving: there must be at least one execution")
        if type(self.strict) is not bool:
            raise CardError(f"serving: strict must be true or false, found {fields.shown(self.strict)}")
        fields.whole("serving: batch_size", self.batch_size, 1, 1024)
        if self.decode_threads is not None:
            fields.whole("serving: decode_threads", self.decode_threads, 1, 1024)
        for name in ("workers", "max_batch_delay_ms", "queue_limit", "k", "instance_limit"):
            fields.whole(f"serving: {name}", getattr(self, name), 1, _MOST)
        for name in ("response_timeout_s", "startup_timeout_s"):
            fields.whole(f"serving: {name}", getattr(self, name), 1, _LONGEST_S)
        self._check_words()
        if not isinstance(self.budget, Budget):
            raise CardError(f"serving: budget must be a JSON object, found {fields.shown(self.budget)}")
        for entry in fields.sequence("serving: evidence", self.evidence):
            if not isinstance(entry, Evidence):
                raise CardError(f"serving: evidence must be a list of JSON objects, found {fields.shown(entry)}")
        fields.whole("serving: schema", self.schema, SCHEMA, SCHEMA)

    def _check_words(self) -> None:
        if not isinstance(self.decoder, str) or not _DECODER.fullmatch(self.decoder):
            raise CardError(f"serving: decoder must be a word of a-z, 0-9 and '-', found {fields.shown(self.decoder)}")
        if not isinstance(self.accept, str) or not _ACCEPT.fullmatch(self.accept):
            raise CardError(
                "serving: accept must be the value of a header, at most 200 printable characters of ASCII, found "
                f"{fields.shown(self.accept)}"
            )

    @property
    def decoding_threads(self) -> int:
        """Number of decode threads of a worker on this machine."""
        return self.decode_threads or decoders_for(cores())

    @property
    def allowance(self) -> Budget:
        """The budget, with at most half of ``response_timeout_s`` for a batch.

        Beyond that time the server would kill the worker, and no request in the batch would get an answer.
        """
        most = self.response_timeout_s / 2
        seconds = self.budget.batch_seconds
        return dataclasses.replace(self.budget, batch_seconds=most if seconds is None else min(seconds, most))

    @property
    def text(self) -> str:
        """The file's text. Equal records give equal bytes."""
        body = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        body["executions"] = [execution.to_json() for execution in self.executions]
        body["budget"] = dataclasses.asdict(self.budget)
        body["evidence"] = [entry.to_json() for entry in self.evidence]
        return json.dumps(body, indent=2, sort_keys=True, allow_nan=False) + "\n"


def decoders_for(cores: int) -> int:
    """Return the default number of decode threads for a worker with this many cores."""
    return min(cores, _DECODING_THREADS)


def parse_serving(document: str, path: Path) -> Serving:
    """Parse the result of `Serving.text`. Missing fields have their defaults. ``path`` is only for messages.

    Raises:
        CardError: the document is not JSON of this schema, or a field is unknown, of the wrong type or out of range.
    """
    body = parse_document(document, path, _LARGEST_FILE)
    try:
        values = _known_fields(body, Serving, "serving")
        if not isinstance(values.get("executions"), list):
            raise CardError("serving: executions must be a list")
        values["executions"] = tuple(Execution.from_json(entry) for entry in values["executions"])
        if "evidence" in values:
            if not isinstance(values["evidence"], list):
                raise CardError("serving: evidence must be a list")
            values["evidence"] = tuple(Evidence.from_json(entry) for entry in values["evidence"])
        if "budget" in values:
            values["budget"] = Budget(**_known_fields(values["budget"], Budget, "serving: budget"))
        return Serving(**values)
    except (CardError, UserError) as error:
        raise CardError(f"{path}: {error}") from None


def read_serving(folder: Path) -> Serving | None:
    """Return the serving settings in an artifact's folder. None if there are none.

    Raises:
        CardError: see `parse_serving`.
    """
    path = folder / SERVING_FILE
    document = read_document(path, _LARGEST_FILE)
    return None if document is None else parse_serving(document, path)


def _known_fields(body: object, kind: type[Any], where: str) -> dict[str, Any]:
    """Return a JSON object that has only fields of a record."""
    if not isinstance(body, Mapping):
        raise CardError(f"{where} must be a JSON object, found {fields.shown(body)}")
    known = [entry.name for entry in dataclasses.fields(kind)]
    for name in body:
        if name not in known:
            raise CardError(
                f"{where}: unknown field {fields.shown(name)}{did_you_mean(name, known)}; known: {', '.join(known)}"
            )
    return dict(body)
