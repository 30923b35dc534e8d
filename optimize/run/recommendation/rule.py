"""The settings of the recommendation for recipes, programs and the command line.

Help texts are made from it, so it must not import torch.
"""

from __future__ import annotations

import functools
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from optimize.run.recommendation.accuracy_drop import drop_of
from serve.common.config import Config, Option

Objective = Literal["latency", "p95", "throughput", "size"]


class Recommend(Config):
    """How to choose the recommended artifact."""

    model_config = ConfigDict(title="")  # messages name its settings like the command line

    objective: Objective = Field(
        default="latency",
        description="What the recommended artifact is best at: the median latency of one image, its 95th percentile, "
        "the throughput at the best batch size, or the size of the file.",
    )
    max_drop: Annotated[
        float, Option(metavar="FRACTION", kind=str, read=functools.partial(drop_of, plain="fraction"))
    ] = Field(
        default=0.02,
        ge=0,
        le=1,
        description="The loss of accuracy that the recommended artifact is shown not to have: a fraction up to 0.05, "
        "or points such as 0.5pp.",
    )
    # Above this, a double loses half of its remaining precision, and the interval becomes infinite.
    confidence: Annotated[float, Option(metavar="FRACTION")] = Field(
        default=0.95,
        ge=0.5,
        le=1 - 1e-9,
        description="The confidence that no artifact passes with such a loss, for all pairs together, such as 0.95.",
    )
