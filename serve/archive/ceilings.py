"""Ceilings: the most that a server allows an archive to demand.

The packer of an archive wrote its ``serving.json`` with processes, threads, pixels and seconds. The ceilings are the
operator's. No archive exceeds them, signed or not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from pydantic import ConfigDict, Field

from serve.common.config import Config
from serve.common.options import ServingOptions
from serve.runtime.card.budget import Budget
from serve.runtime.card.serving import Serving
from serve.runtime.errors import CardError

_BUDGET = frozenset(entry.name for entry in dataclasses.fields(Budget))


class Ceilings(Config):
    """The table ``[ceilings]`` of a store's ``serve.toml``: the most that an archive may ask for.

    A limit of decoding that an archive leaves out (``null``) asks for any amount.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", title="[ceilings]")

    workers: int = Field(default=64, ge=1, description="Worker processes of TorchServe's.")
    threads: int = Field(default=256, ge=1, description="Intra-op threads of a worker.")
    decode_threads: int = Field(default=64, ge=1, description="Threads of a worker that decode images.")
    queue_limit: int = Field(default=65_536, ge=1, description="Requests that may wait for an answer.")
    instance_limit: int = Field(default=4_096, ge=1, description="Images in one JSON request.")
    max_batch_delay_ms: int = Field(
        default=10_000, ge=1, description="Milliseconds that a request waits for others to join its batch."
    )
    response_timeout_s: int = Field(default=3_600, ge=1, description="Seconds that a batch may take.")
    startup_timeout_s: int = Field(
        default=14_400, ge=1, description="Seconds that a worker may take to load and warm up."
    )
    image_pixels: int = Field(
        default=200_000_000, ge=1, description="Pixels of one image; each takes 15 bytes of memory."
    )
    jpeg_scans: int = Field(default=1_000, ge=1, description="Scans of one progressive JPEG.")
    image_seconds: float = Field(default=30.0, gt=0, description="Seconds of processor time for one image.")
    request_pixels: int = Field(default=1_000_000_000, ge=1, description="Pixels of all images of one request.")
    batch_pixels: int = Field(default=4_000_000_000, ge=1, description="Pixels of all requests of one batch.")
    request_seconds: float = Field(default=120.0, gt=0, description="Seconds to decode the images of one request.")
    batch_seconds: float = Field(default=300.0, gt=0, description="Seconds to decode the images of one batch.")

    def raised_by(self, options: ServingOptions) -> Ceilings:
        """Return these ceilings, raised to what the operator demands by the options of a command."""
        given: dict[str, float] = {
            name: getattr(options, name) or 1 for name in options.model_fields_set if name in Ceilings.model_fields
        }
        if "budget" in options.model_fields_set:
            given |= {name: _counted(getattr(options.budget, name)) for name in _BUDGET}
        return self.model_copy(update={name: max(getattr(self, name), value) for name, value in given.items()})

    def check(self, archive: Path, serving: Serving) -> None:
        """Check that an archive demands no more than the ceilings.

        Args:
            archive: its path, for the message.
            serving: its settings.

        Raises:
            CardError: it demands more.
        """
        for name, value in _demands(serving):
            if value > (most := getattr(self, name)):
                said = "any amount" if value == math.inf else f"{value:_}"
                raise CardError(
                    f"{archive}: asks for {name} {said}, but this server allows at most {most:_}: pack it with "
                    f"less, or raise {name} under [ceilings] in the store's serve.toml"
                )


def _demands(serving: Serving) -> Iterator[tuple[str, float]]:
    """Yield an archive's demands, with the name of each ceiling."""
    for name in Ceilings.model_fields:
        if name == "threads":
            yield name, max(execution.threads or 1 for execution in serving.executions)
        elif name in _BUDGET:
            yield name, _counted(getattr(serving.budget, name))
        else:
            yield name, getattr(serving, name) or 1  # None: one for each core, at most 8


def _counted(value: float | None) -> float:
    """Return a limit of decoding as a number. None is no limit."""
    return math.inf if value is None else value
