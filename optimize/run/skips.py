"""Why something was not made, as the row of a report that stands in its place."""

from __future__ import annotations

from typing import Literal

from optimize.errors import NotApplicableError
from optimize.measure.rows import Row, Skip
from optimize.passes.base import pass_of
from serve.common.config import Config
from serve.runtime.errors import EngineError, message_of


def skip_of(error: Exception) -> Skip:
    """The reason in one line, of an exception that ended a pass."""
    kind: Literal["not_applicable", "cannot_run_here", "failed"] = "failed"
    if isinstance(error, NotApplicableError):
        kind = "not_applicable"
    elif isinstance(error, EngineError):  # no kernels for it on this machine
        kind = "cannot_run_here"
    return Skip(kind=kind, reason="; ".join(line.strip() for line in message_of(error).splitlines() if line.strip()))


def not_made(name: str, config: Config, parent: str, skip: Skip) -> Row:
    """The row of what the pass of ``config`` did not make."""
    settings = config.model_dump(mode="json")
    return Row(name=name, operation=pass_of(config).name, config=settings, parent=parent, skip=skip)
