"""The stages of a request and their times: the one list for headers, metrics, logs and tables."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Stages:
    """The time of one request by stage, in milliseconds.

    Attributes:
        queue: waiting for a decode thread, the engine or other images.
        decode: reading headers and decoding, the sum over its images.
        preprocess: resizing and cropping, the sum over its images.
        infer: the engine with normalising and copying, for whole batches.
        postprocess: making answers from outputs, for whole batches.
    """

    queue: float
    decode: float
    preprocess: float
    infer: float
    postprocess: float

    @property
    def server_timing(self) -> str:
        """The value of a ``Server-Timing`` header."""
        return ", ".join(f"{name};dur={getattr(self, name):.2f}" for name in STAGES)


#: TorchServe's frontend puts this stage first in that header: ms in its queue, before a worker took the request.
FRONTEND_STAGE: Final = "frontend"

#: The stages' names, in the order of processing.
STAGES: Final = tuple(field.name for field in dataclasses.fields(Stages))

#: Buckets of their histograms, in seconds: from 0.1 ms (making an answer) to large photos that wait for each other.
STAGE_BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0),
)
