"""The project's exceptions, and shared parts of their messages.

Each message says what was wrong, with the value, and what would be right::

    PipelineError            everything raised on purpose; exit code 1
    ├── UserError            the caller's mistake; exit code 2
    ├── CardError            an artifact folder that is incomplete or damaged
    ├── EngineError          a model file that cannot run as wanted
    │   └── BrokenError      the device of an engine is lost to this process: only a new one helps
    ├── ImageError           one item of a batch that is no usable image
    ├── RequestError         a request that does not say what to classify
    ├── PassError            (optimize) a pass whose result is not what it promises
    └── NotApplicableError   (optimize) a pass that has nothing to do here
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class PipelineError(Exception):
    """Base of everything this project raises on purpose.

    ``exit_code`` is the process's exit status when the error reaches a command line.
    """

    exit_code = 1

    @property
    def _render_traceback_(self) -> Callable[[], list[str]]:
        """Show a notebook only the message. IPython reads this name (``showtraceback``, IPython 8 and 9).

        Raises:
            AttributeError: another exception is the cause. IPython then shows its traceback.
        """
        if self.__cause__ is not None:
            raise AttributeError("_render_traceback_")
        return f"{type(self).__name__}: {self}".splitlines


class UserError(PipelineError):
    """The caller's mistake, for example a wrong name, a missing file or an illegal recipe. Exit code 2."""

    exit_code = 2


class CardError(PipelineError):
    """An artifact folder whose card is missing, unreadable, or does not match its files."""


class EngineError(PipelineError):
    """A model file that cannot run as wanted, for example on the wrong device or without an active provider."""


class BrokenError(EngineError):
    """An engine's device is lost to this process, and every further call fails. End the process and start another."""


@dataclass(frozen=True)
class Refusal:
    """The reason why a request, or one of its images, gets no answer: an HTTP status and one line of text.

    It is a record, not the exception: a traceback would keep the decoded image in memory.
    """

    status: int
    message: str


class _RefusedError(PipelineError):
    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refusal(self) -> Refusal:
        """The record of this error, which is safe to keep."""
        return Refusal(self.status, str(self))


class ImageError(_RefusedError):
    """One item of a batch that is not a usable image.

    ``status`` is the HTTP status for the client (400, 413 or 415).
    """


class RequestError(_RefusedError):
    """A request, or one item of it, that does not say what to classify. ``status`` is its HTTP status."""


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first non-empty line of an exception's message, at most ``limit`` characters, or else its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:limit] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """Return an exception as ``Type: first line of its message``, with the line number of a syntax error."""
    line = first_line(error)
    place = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
    return f"{type(error).__name__}: {line}{place}" if line != type(error).__name__ else line


def message_of(error: BaseException) -> str:
    """Return an exception's message for a person: the whole text of our own, type and first line of others."""
    return str(error) if isinstance(error, PipelineError) else one_line(error)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Join the first ``most`` names, and the number of the others: ``a, b and 3 more``."""
    held = list(names)
    return ", ".join(held[:most]) + (f" and {len(held) - most} more" if len(held) > most else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` with the names in ``known`` closest to ``name``. Empty if none is close."""
    by_key = {re.sub(r"[^a-z0-9]", "", entry.lower()): entry for entry in known}
    close = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", name.lower()), by_key, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(by_key[key] for key in close)}?)" if close else ""
