"""Load time and peak memory of an artifact, each in a fresh process: nothing else has warmed it or grown it.

Run as ``python -m optimize.measure.footprint FOLDER DEVICE THREADS BATCH`` it prints one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from optimize.errors import PipelineError

_TIMEOUT = 300.0  # seconds


def measure_footprint(folder: Path, device: str, threads: int, batch: int) -> dict[str, Any]:
    """Open the artifact in a new process and run it.

    Args:
        folder: the artifact's folder.
        device: where to run it.
        threads: intra-op threads.
        batch: images in the batch that the peak is taken with.

    Returns:
        ``load_ms`` (opening the verified folder, without importing the libraries), ``memory_bytes`` (peak
        of the process above what it had with the libraries imported; on CUDA the peak that torch
        allocated on the device).

    Raises:
        PipelineError: the process failed; its last line is in the message.
    """
    command = [sys.executable, "-m", "optimize.measure.footprint", str(folder), device, str(threads), str(batch)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise PipelineError(f"measuring memory of {folder.name} failed: {last}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def _main(folder: Path, device_name: str, threads: int, batch: int) -> None:
    import torch

    from serve.runtime.card import read_card
    from serve.runtime.predictor import Predictor

    torch.set_num_threads(threads)
    if read_card(folder).format == "onnx":
        import onnxruntime  # noqa: F401 - so that its own size is in the idle process

    device = torch.device(device_name)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the CUDA context is not the artifact's
    idle = _memory()
    start = time.perf_counter()
    predictor = Predictor(folder, device, threads=threads)
    load_ms = (time.perf_counter() - start) * 1e3
    predictor.warm_up([1, batch])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _memory() - idle
    print(json.dumps({"load_ms": load_ms, "memory_bytes": peak}))


def _memory() -> int:
    """This process's peak resident memory, bytes. Not ``getrusage``: its peak is inherited from the parent's."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise PipelineError("/proc/self/status has no VmHWM line")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
