"""Logs as JSON lines. Failed and slow requests get a line, at most a few each second, or every request does."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import TextIO

from ..errors import one_line
from .observation import Observation
from .stages import FRONTEND_STAGE

_LOG = logging.getLogger("serve.requests")
# Many failing requests must not cause as many lines.
_MOST_PER_SECOND = 20


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON: time (UTC), level, logger, event, and the record's ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = one_line(record.exc_info[1])
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr() -> None:
    """Send the process's log to stderr as JSON lines, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("serve").setLevel(logging.INFO)
    silence_pillow()
    # python-multipart 0.0.34 warns of each broken form.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


def silence_pillow() -> None:
    """Turn off Pillow's log of broken images. The client gets the error."""
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


def log_requests_to(stream: TextIO) -> None:
    """Send the log of requests, and nothing else, to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    _LOG.handlers[:] = [handler]
    _LOG.propagate = False
    _LOG.setLevel(logging.INFO)


class RequestLog:
    """An observer that logs each request that failed (status 499 and from 500 on) or was slow.

    It writes at most 20 lines in a second. The next line says how many were left out.

    Args:
        slow_s: seconds from which on a request is slow.
        every: log every request, without a limit.
    """

    def __init__(self, slow_s: float, *, every: bool = False) -> None:
        self._slow_s = slow_s
        self._every = every
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def __call__(self, observation: Observation) -> None:
        """Log a request if it failed or was slow. Probes are never logged: there are thousands a day."""
        if observation.probe:
            return
        slow = observation.seconds >= self._slow_s
        failed = observation.status >= 499
        if not (slow or failed or self._every) or not (self._every or self._room()):
            return
        level = logging.ERROR if observation.status == 500 else logging.WARNING if slow or failed else logging.INFO
        fields: dict[str, object] = {
            "request_id": observation.request_id,
            "route": observation.route,
            "model": observation.model,
            "version": observation.version,
            "status": observation.status,
            "ms": round(observation.seconds * 1e3, 2),
            "images": observation.images,
            "refusals": list(observation.refusals),
        }
        stages: dict[str, float] = {} if observation.frontend_ms is None else {FRONTEND_STAGE: observation.frontend_ms}
        if observation.stages is not None:
            fields["batch_size"] = observation.batch_size
            stages |= dataclasses.asdict(observation.stages)
        if stages:
            fields["stages_ms"] = {name: round(value, 2) for name, value in stages.items()}
        if self._left_out:
            fields["left_out"] = self._left_out
            self._left_out = 0
        _LOG.log(level, "slow request" if slow and not failed else "request", extra={"fields": fields})

    def _room(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > _MOST_PER_SECOND:
            self._left_out += 1
            return False
        return True
