"""The two exceptions that only passes raise. `serve.runtime.errors` defines the base classes."""

from __future__ import annotations

from serve.runtime.errors import PipelineError


class PassError(PipelineError):
    """A pass ran, but its result breaks a promise of the pass. Nothing of the result is kept."""


class NotApplicableError(PipelineError):
    """A pass has nothing to do for this model or on this machine. The message is the reason."""
