"""Runs code that AOTInductor compiled in a separate process first, so that a crash ends only that process.

Seen on a GPU's host with torch 2.11 and ``CXX`` set to a compiler with another C++ library than the system's. Each
package crashed where torch parses the device's name (``std::regex``), and ended the process that opened it. Packages
compiled by the system's own ``g++`` worked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import EngineError
from ..outputs import Outputs

_TIMEOUT_S = 600

# It imports nothing of the project: it only has to run a package.
_CHILD = """
import sys
import torch
from torch._inductor import aoti_load_package

package, index, asked, answered = sys.argv[1:]
device = torch.device("cuda", int(index)) if int(index) >= 0 else torch.device("cpu")
with torch.no_grad():
    network = aoti_load_package(package, run_single_threaded=True, device_index=int(index))
    answers = (network(batch.to(device)) for batch in torch.load(asked))
    answers = ((answer,) if isinstance(answer, torch.Tensor) else answer for answer in answers)
    torch.save([tuple(output.cpu() for output in answer) for answer in answers], answered)
"""


def run_isolated(package: Path, index: int, batches: Sequence[torch.Tensor], name: str) -> list[Outputs]:
    """Run a compiled network on batches in another process. Return the outputs for each, on the host.

    Args:
        package: file written by AOTInductor.
        index: index of the CUDA device that it was compiled for. -1: the CPU.
        batches: ``(N, C, H, W)`` each, on the host.
        name: the network's name, for messages.

    Raises:
        EngineError: the process crashed, failed, or took longer than ten minutes.
    """
    with tempfile.TemporaryDirectory(prefix="tried-apart-") as folder:
        asked, answered = Path(folder) / "asked.pt", Path(folder) / "answered.pt"
        torch.save([*batches], asked)
        command = [sys.executable, "-c", _CHILD, str(package), str(index), str(asked), str(answered)]
        compiled = f"{name}: the code that AOTInductor of torch {torch.__version__} compiled"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise EngineError(f"{compiled} gave no answer in {_TIMEOUT_S} seconds") from None
        if done.returncode < 0:
            said = signal.strsignal(-done.returncode) or f"signal {-done.returncode}"
            raise EngineError(f"{compiled} crashes when it is loaded or run ({said}){_other_compiler()}")
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise EngineError(f"{compiled} cannot be run: {lines[-1][:200]}")
        answers: list[Outputs] = torch.load(answered)
        return answers


def _other_compiler() -> str:
    """Return a hint if the environment names the compiler. Empty: it does not."""
    named = os.environ.get("CXX")
    return f"; CXX={named} compiled it: try the system's own compiler, CXX=/usr/bin/g++" if named else ""
