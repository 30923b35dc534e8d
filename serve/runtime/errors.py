"""The project's one family of exceptions. Each message says what was wrong, and what would be right."""

from __future__ import annotations


class PipelineError(Exception):
    """Base of everything this project raises on purpose.

    ``exit_code`` is the process's exit status when the error reaches a command line.
    """

    exit_code = 1


class UserError(PipelineError):
    """The caller's mistake (a wrong name, a missing file, an illegal recipe): exit code 2."""

    exit_code = 2


class CardError(PipelineError):
    """An artifact folder whose card is missing, unreadable, or does not match its files."""


class EngineError(PipelineError):
    """A model file that cannot be run as asked: the wrong device, or a provider that is not active."""


class ImageError(PipelineError):
    """One item of a batch that is not a usable image.

    ``status`` is the HTTP status that tells the client so (400, 413 or 415).
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RequestError(PipelineError):
    """A request, or one item of it, that does not say what to classify; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
