"""What libraries print into file descriptor 2 becomes lines of JSON, the last words of a crash too."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve.asgi.process import library_output

ROOT = Path(__file__).parents[4]


def printed(program: str, status: int = 0) -> list[str]:
    """What a program has on stderr that diverts it first; the last line of its process is waited for by the pipe."""
    text = f"import os, sys\nfrom serve.asgi.process.library_output import divert\ndivert()\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def written(data: bytes) -> list[dict[str, Any]]:
    out = io.BytesIO()
    library_output.run_in_process(io.BytesIO(data), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_what_a_library_prints_is_a_line_of_json_and_what_python_prints_is_as_it_was() -> None:
    lines = printed('os.write(2, b"\\x1b[0;93mW: Corrupt JPEG data\\x1b[m\\n"); print("for a person", file=sys.stderr)')
    assert "for a person" in lines
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    assert (found["level"], found["logger"], found["event"]) == ("warning", "stderr", "W: Corrupt JPEG data")
    assert set(found) == {"time", "level", "logger", "event"}


def test_the_log_of_another_process_passes_as_it_is() -> None:
    line = json.dumps({"time": "now", "event": "request"})
    assert printed(f"import subprocess\nsubprocess.run(['echo', {line!r}], stdout=2)") == [line]


def test_the_last_words_of_a_crash_are_written() -> None:
    lines = printed('import ctypes\nos.write(2, b"last words")\nctypes.CDLL(None).abort()', -signal.SIGABRT)
    assert [json.loads(line)["event"] for line in lines] == ["last words"]


def test_signals_for_all_processes_of_a_service_do_not_lose_lines() -> None:
    program = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
for child in children:
    os.kill(int(child), signal.SIGTERM)
os.write(2, b"after it\\n")
"""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pytest.skip("this kernel does not tell a process's children")
    assert [json.loads(line)["event"] for line in printed(program)] == ["after it"]


@given(st.binary(max_size=400))
@example(b"[" * 100_000)
@example(b'{"a": ' * 20_000 + b"\n")
@example(b"\n\n \n")
def test_whatever_is_printed_each_line_is_one_object(data: bytes) -> None:
    for line in written(data):
        assert isinstance(line, dict)


def test_of_a_flood_a_part_is_written_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, *[1.0] * 300, *[2.0] * 1000])
    monkeypatch.setattr("serve.asgi.process.library_output.time", SimpleNamespace(monotonic=lambda: next(times)))
    found = written(b"a\n" * 300 + b"b\n")
    assert [line["event"] for line in found] == ["a"] * library_output.BURST + ["b"]
    assert found[-1]["left_out"] == 300 - library_output.BURST
    assert not any("left_out" in line for line in found[:-1])
