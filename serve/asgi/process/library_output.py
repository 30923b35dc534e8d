"""Converts what libraries print on stderr to JSON lines, like the server's own log.

ONNX Runtime, torch, libtiff and the C library print to file descriptor 2 without Python. The descriptor becomes a pipe.
A small process at its other end writes each line as JSON. It is a process of its own so that the last lines of a
crashing server are written too. It runs `run_in_process` and imports no other module of this project.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
from datetime import UTC, datetime
from typing import BinaryIO

#: Lines that may arrive at once, and how many more each second. Broken images from a client must not fill the disk.
BURST, PER_SECOND = 200, 20

_LONGEST_LINE = 1 << 16
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def divert() -> None:
    """Send file descriptor 2 through a process that writes JSON lines. ``sys.stderr`` keeps the old target.

    Lines that are JSON objects already pass unchanged: child processes of the server write them. Nothing changes if
    ``sys.stderr`` is not descriptor 2.
    """
    try:
        if sys.stderr.fileno() != 2:
            return
        before = os.dup(2)
    except (AttributeError, OSError):  # no stderr, or not a file
        return
    reading, writing = os.pipe()
    streams = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_DUP2, before, 1)]
    # It ends when the last writer closes the pipe. systemd and terminals send these signals to all processes, and it
    # must outlive the server.
    blocked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    program = [sys.executable, "-I", "-S", "-B", __file__]
    os.posix_spawn(sys.executable, program, os.environ, file_actions=streams, setsid=True, setsigmask=blocked)
    os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)
    # Unbuffered. Python would retry lines that a full disk refused at exit, and exit with status 120.
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    sys.stderr = io.TextIOWrapper(io.FileIO(before, "w"), encoding=encoding, errors=errors, write_through=True)


def run_in_process(lines: BinaryIO, out: BinaryIO) -> None:
    """Write each line as one line of JSON until the input ends.

    Args:
        lines: the printed lines, in any encoding.
        out: receives the JSON lines. A line that cannot be written is lost. Reading continues, so that no writer
            blocks.
    """
    allowed, since, left_out = float(BURST), time.monotonic(), 0
    while line := lines.readline(_LONGEST_LINE):
        if not _is_json(line):
            now = time.monotonic()
            allowed, since = min(BURST, allowed + (now - since) * PER_SECOND), now
            if allowed < 1:
                left_out += 1
                continue
            text = _COLOURS.sub("", line.decode("utf-8", "backslashreplace")).strip()
            if not text:
                continue
            allowed -= 1
            line = _as_json(text, left_out)
            left_out = 0
        try:
            out.write(line)
            out.flush()
        except OSError:
            continue


def _is_json(line: bytes) -> bool:
    if not line.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _as_json(text: str, left_out: int) -> bytes:
    found: dict[str, object] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": "warning",
        "logger": "stderr",
        "event": text,
    }
    if left_out:
        found["left_out"] = left_out
    return json.dumps(found).encode() + b"\n"


if __name__ == "__main__":
    run_in_process(sys.stdin.buffer, io.FileIO(1, "wb"))
