"""The exceptions of the optimising side; the family's root is `serve.runtime.errors.PipelineError`."""

from __future__ import annotations

from serve.runtime.errors import CardError, EngineError, ImageError, PipelineError, UserError

__all__ = [
    "CardError",
    "EngineError",
    "ImageError",
    "NotApplicableError",
    "PassError",
    "PipelineError",
    "UserError",
]


class PassError(PipelineError):
    """A pass that ran and whose result is not what it promises; nothing of it is kept."""


class NotApplicableError(PipelineError):
    """A pass that has nothing to do for this model or this machine; the message is the reason."""
