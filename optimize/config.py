"""What all settings have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Settings: typed, validated, frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
