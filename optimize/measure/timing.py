"""The settings of a measurement of speed; apart from `latency`, which needs torch, because reports are read without."""

from __future__ import annotations

from pydantic import Field, field_validator

from serve.config import Config


class Timing(Config):
    """How speed is measured."""

    rounds: int = Field(
        default=7, ge=1, description="turns that each variant gets; from 6 on, ratios have a 95 % interval"
    )
    batch_sizes: tuple[int, ...] = Field(
        default=(1, 8, 32),
        min_length=1,
        description="images per call; 1 must be among them, latency is that of batch 1",
    )
    seconds: float = Field(default=0.2, gt=0, description="time of one turn of one variant at one batch size")
    minimum: int = Field(default=3, ge=1, description="fewest timed calls in a turn; five times as many at batch 1")
    warm_up: int = Field(default=2, ge=0, description="untimed calls at the start of each turn")

    @field_validator("batch_sizes")
    @classmethod
    def _ascending_from_one(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if sorted(set(sizes)) != list(sizes) or sizes[0] != 1:
            raise ValueError(f"batch_sizes must ascend from 1, got {list(sizes)}")
        return sizes
