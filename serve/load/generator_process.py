"""Runs the generator in its own process, to separate its interpreter and memory from the caller's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve.load.plan import Plan, Result
from serve.runtime.errors import PipelineError


class LoadError(PipelineError):
    """The generator's process ended without a result."""


def measure(plan: Plan, workload: Path) -> Result:
    """Run a plan and return its result.

    Args:
        plan: how requests are sent.
        workload: the folder of the workload (`Workload.save`).

    Raises:
        LoadError: the generator's process died.
    """
    with started(plan, workload) as process:
        return finished(process, plan)


@contextmanager
def started(plan: Plan, workload: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a generator beside the caller for the block. `finished` returns its result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        file.touch(mode=0o600)  # it may hold a token
        file.write_text(json.dumps(plan.to_json()), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "serve.load", str(file), str(workload)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def finished(process: subprocess.Popen[str], plan: Plan) -> Result:
    """Wait for a started generator and return its result.

    Raises:
        LoadError: it died, or does not end.
    """
    try:
        out, errors = process.communicate(timeout=plan.warm_s + plan.seconds + plan.timeout_s + 60)
    except subprocess.TimeoutExpired:
        raise LoadError("the load generator did not end") from None
    if process.returncode:
        raise LoadError(f"the load generator died: {(errors.strip().splitlines() or ['no message'])[-1]}")
    return Result.from_json(json.loads(out))
