"""Runs what AOTInductor compiled in a process of its own first: native code that crashes ends that one.

Seen on a GPU's host with torch 2.11 and ``CXX`` set to a compiler of another C++ library than the system's: each
package crashed in torch's own reading of the device's name (``std::regex``), and took with it whoever opened it.
Compiled by the system's own ``g++`` a package ran there.
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

_TIMEOUT_S = 600

# It imports nothing of ours: what it runs is all that it is asked for.
_CHILD = """
import sys
import torch
from torch._inductor import aoti_load_package

package, index, asked, answered = sys.argv[1:]
device = torch.device("cuda", int(index)) if int(index) >= 0 else torch.device("cpu")
with torch.no_grad():
    network = aoti_load_package(package, run_single_threaded=True, device_index=int(index))
    torch.save([network(batch.to(device)).cpu() for batch in torch.load(asked)], answered)
"""


def run_isolated(package: Path, index: int, batches: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Logits ``(N, classes)``, on the host, that a compiled network gives for batches in another process.

    Args:
        package: what AOTInductor wrote.
        index: of the CUDA device that it was compiled for; -1: the CPU.
        batches: ``(N, C, H, W)`` each, on the host.
        name: what was compiled, for messages.

    Raises:
        EngineError: the process crashed, failed, or took longer than ten minutes.
    """
    with tempfile.TemporaryDirectory(prefix="tried-apart-") as folder:
        asked, answered = Path(folder) / "asked.pt", Path(folder) / "answered.pt"
        torch.save([*batches], asked)
        command = [sys.executable, "-c", _CHILD, str(package), str(index), str(asked), str(answered)]
        compiled = f"{name}: what AOTInductor of torch {torch.__version__} compiled"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise EngineError(f"{compiled} gave no answer in {_TIMEOUT_S} seconds") from None
        if done.returncode < 0:
            said = signal.strsignal(-done.returncode) or f"signal {-done.returncode}"
            raise EngineError(f"{compiled} crashes where it is loaded or run ({said}){_other_compiler()}")
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise EngineError(f"{compiled} cannot be run: {lines[-1][:200]}")
        answers: list[torch.Tensor] = torch.load(answered)
        return answers


def _other_compiler() -> str:
    """What may help where the environment names the compiler; empty: it does not."""
    named = os.environ.get("CXX")
    return f"; CXX={named} compiled it: try the system's own compiler, CXX=/usr/bin/g++" if named else ""
