"""Load time and peak memory of artifacts, each in a process of its own: nothing else has warmed it or grown it.

Run as ``python -m optimize.measure.footprint DEVICE THREADS`` it imports the libraries once and forks for
each request, because importing torch takes ten times as long as opening a small network.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from optimize.measure.rows import Footprint
from serve.runtime.errors import PipelineError

_TIMEOUT = 300.0  # seconds


class FootprintMeter:
    """Measures artifacts one after the other; a context, whose process starts with the first of them.

    Args:
        device: where to run them.
        threads: intra-op threads.
    """

    def __init__(self, device: str, threads: int) -> None:
        self._command = [sys.executable, "-m", "optimize.measure.footprint", device, str(threads)]
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the meter

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._complaints.close()

    def measure(self, folder: Path, batch: int) -> Footprint:
        """Open the artifact in ``folder`` in a new process and run it.

        Args:
            folder: the artifact's folder.
            batch: images in the batch that the peak is taken with.

        Returns:
            ``load_ms`` (opening the verified folder, without importing the libraries), ``memory_bytes`` (peak
            of the process above what it had with the libraries imported; on CUDA the peak that torch
            allocated on the device).

        Raises:
            PipelineError: it failed; the reason is in the message.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                start_new_session=True,  # Ctrl-C is for us, who end it
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([str(folder.resolve()), batch]).encode() + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], _TIMEOUT)[0]:
            self._stop()
            raise PipelineError(f"no answer within {_TIMEOUT:.0f} s")
        answer = process.stdout.readline()
        if not answer:
            self._stop()
            self._complaints.seek(0)
            last = (self._complaints.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise PipelineError(f"the measuring process ended: {last}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise PipelineError(found["error"])
        return Footprint.from_json(found)

    def _stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


def _serve(device: str, threads: int) -> None:
    """Answer the requests on stdin, each ``[folder, batch]``, with one line of JSON, from a fork of this process."""
    import onnxruntime  # noqa: F401 - so that its own size is in the idle process
    import torch  # noqa: F401

    from serve.runtime import predictor  # noqa: F401

    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    for line in sys.stdin:
        folder, batch = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                answer = _measure(Path(folder), device, threads, batch)
            except BaseException as error:  # noqa: BLE001 - all that a library can raise is an answer here
                answer = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
            os.write(answers, json.dumps(answer).encode() + b"\n")
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            reason = f"the process was ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
            os.write(answers, json.dumps({"error": reason}).encode() + b"\n")


def _measure(folder: Path, device_name: str, threads: int, batch: int) -> dict[str, Any]:
    import torch

    from serve.runtime.card import read_card
    from serve.runtime.engines.base import preferred
    from serve.runtime.predictor import Predictor

    torch.set_num_threads(threads)
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the CUDA context is not the artifact's
    idle = _memory()
    start = time.perf_counter()
    predictor = Predictor(folder, replace(preferred(read_card(folder), device_name), threads=threads))
    load_ms = (time.perf_counter() - start) * 1e3
    predictor.warm_up([1, batch])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _memory() - idle
    return {"load_ms": load_ms, "memory_bytes": peak}


def _memory() -> int:
    """This process's peak resident memory, bytes. Not ``getrusage``: its peak is inherited from the parent's."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise PipelineError("/proc/self/status has no VmHWM line")


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
