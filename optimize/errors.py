"""The two exceptions that only passes raise; the family stands in `serve.runtime.errors`."""

from __future__ import annotations

from serve.runtime.errors import PipelineError


class PassError(PipelineError):
    """A pass that ran and whose result is not what it promises; nothing of it is kept."""


class NotApplicableError(PipelineError):
    """A pass that has nothing to do for this model or this machine; the message is the reason."""
