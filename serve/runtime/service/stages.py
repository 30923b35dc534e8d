"""The stages of a request, and where its time went: one list, which headers, metrics, logs and tables are made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Stages:
    """Where the time of one request went, in milliseconds.

    Attributes:
        queue: in which nothing of it was worked on: it waited for a decode thread, the engine or other images.
        decode: reading headers and decoding, its images added up.
        preprocess: resizing and cropping, its images added up.
        infer: in the engine, with normalising and copying, whole batches.
        postprocess: ranking classes, whole batches.
    """

    queue: float
    decode: float
    preprocess: float
    infer: float
    postprocess: float

    @property
    def server_timing(self) -> str:
        """As the value of a ``Server-Timing`` header."""
        return ", ".join(f"{name};dur={getattr(self, name):.2f}" for name in STAGES)


#: What TorchServe's frontend puts before them in that header: ms in its queue, before a worker took the request.
FRONTEND_STAGE: Final = "frontend"

#: The stages' names, in the order in which a request goes through them.
STAGES: Final = tuple(field.name for field in dataclasses.fields(Stages))

#: Of a histogram of them, in seconds: from 0.1 ms (ranking classes) to large photos that wait for each other.
STAGE_BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0),
)
