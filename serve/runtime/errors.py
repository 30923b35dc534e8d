"""The project's one family of exceptions, and the words that their messages share.

Each message says what was wrong, with the value, and what would be right::

    PipelineError            everything raised on purpose; exit code 1
    ├── UserError            the caller's mistake; exit code 2
    ├── CardError            an artifact folder that is not whole
    ├── EngineError          a model file that cannot run as asked
    │   └── BrokenError      the device under an engine is lost to this process: only a new one helps
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
        """What a notebook shows: the message alone. IPython asks for this name (``showtraceback``, IPython 8 and 9).

        Raises:
            AttributeError: another exception is the cause, whose traceback IPython then shows.
        """
        if self.__cause__ is not None:
            raise AttributeError("_render_traceback_")
        return f"{type(self).__name__}: {self}".splitlines


class UserError(PipelineError):
    """The caller's mistake (a wrong name, a missing file, an illegal recipe): exit code 2."""

    exit_code = 2


class CardError(PipelineError):
    """An artifact folder whose card is missing, unreadable, or does not match its files."""


class EngineError(PipelineError):
    """A model file that cannot be run as asked: the wrong device, or a provider that is not active."""


class BrokenError(EngineError):
    """What an engine runs on is lost to this process, and every further call fails: end it and start another."""


@dataclass(frozen=True)
class Refusal:
    """What is kept of a request, or one image of it, that gets no answer: an HTTP status and one line of text.

    A record, and not the exception: that one holds its traceback, whose frames hold the decoded image.
    """

    status: int
    message: str


class _RefusedError(PipelineError):
    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refusal(self) -> Refusal:
        """What may be kept of it."""
        return Refusal(self.status, str(self))


class ImageError(_RefusedError):
    """One item of a batch that is not a usable image.

    ``status`` is the HTTP status that tells the client so (400, 413 or 415).
    """


class RequestError(_RefusedError):
    """A request, or one item of it, that does not say what to classify; ``status`` is its HTTP status."""


def first_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an exception's message that is not empty, at most ``limit`` characters; else its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:limit] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """An exception as ``Type: first line of its message``, with the line number of a syntax error."""
    line = first_line(error)
    place = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
    return f"{type(error).__name__}: {line}{place}" if line != type(error).__name__ else line


def message_of(error: BaseException) -> str:
    """What a person is told of an exception: our own whole, and of a library's its type and first line."""
    return str(error) if isinstance(error, PipelineError) else one_line(error)


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first ``most`` of some names, and how many more there are: ``a, b and 3 more``."""
    held = list(names)
    return ", ".join(held[:most]) + (f" and {len(held) - most} more" if len(held) > most else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean …?)`` with those of ``known`` that are closest to ``name``; empty if none is close."""
    by_key = {re.sub(r"[^a-z0-9]", "", entry.lower()): entry for entry in known}
    close = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", name.lower()), by_key, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(by_key[key] for key in close)}?)" if close else ""
