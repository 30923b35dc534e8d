"""How an archive is served: what ``model-config.yaml`` is made of, for TorchServe and for the handler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pydantic import Field, field_validator

from serve.config import Config
from serve.runtime.budget import SERVING, Budget
from serve.runtime.errors import did_you_mean


class ServingOptions(Config):
    """How an archive is served: TorchServe's batching and the handler's own settings."""

    workers: int = Field(default=1, ge=1, description="Worker processes; each loads the model and uses all threads.")
    batch_size: int = Field(default=8, ge=1, le=1024, description="Most requests that are answered together.")
    max_batch_delay_ms: int = Field(
        default=1,
        ge=1,
        description="How long the first request of a batch waits for others, idle workers or not. While a worker "
        "is busy, batches form in the queue by themselves, so that a longer wait costs a lone client and buys little.",
    )
    response_timeout_s: int = Field(default=60, ge=1, description="A batch that takes longer has its worker restarted.")
    startup_timeout_s: int = Field(
        default=600, ge=1, description="Most time for a worker to load and warm up, its turn awaited."
    )
    k: int = Field(default=5, ge=1, description="Classes in an answer where the request does not say.")
    allow_fallback: bool = Field(
        default=False, description="Let an ONNX artifact run on the CPU where CUDA is not active."
    )
    budget: Budget = Field(
        default=SERVING,
        description="Pixels and seconds that decoding an image, a request and a batch may take. A batch is given half "
        "of response_timeout_s at most.",
    )
    instance_limit: int = Field(default=64, ge=1, description="Most images in one JSON request.")
    threads: int | None = Field(default=None, ge=1, description="Intra-op threads of a worker; None: one per core.")

    @field_validator("budget", mode="before")
    @classmethod
    def _name_what_differs(cls, value: object) -> object:
        """Take what a mapping leaves out from the default, and not as unlimited."""
        if not isinstance(value, Mapping):
            return value
        known = dataclasses.asdict(SERVING)
        for name in value:
            if name not in known:
                raise ValueError(f"unknown limit {name}{did_you_mean(str(name), known)}; known are {', '.join(known)}")
        return {**known, **value}
