"""Asks onnx's full check and ONNX Runtime, in a separate process, whether they accept a file.

A file that makes them crash, hang or use too much memory ends only that process. ONNX Runtime opens the graph without
optimizing it, and runs none of it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize.lint.graph import printable
from serve.runtime.errors import UserError
from serve.runtime.model_files.telemetry import import_onnxruntime

# Memory that the process may use beside the weights. Both libraries copy the weights.
_ROOM = 4 << 30
_COPIES = 4
# Seconds for the smallest graph on a busy machine, and for each gigabyte.
_SECONDS = 120
_SECONDS_A_GIGABYTE = 60
# With the first, ONNX Runtime (1.31) takes options from the model file. With the second, it accepts any opset.
_UNSET = ("ORT_LOAD_CONFIG_FROM_MODEL", "ALLOW_RELEASED_ONNX_OPSET_ONLY")


@dataclass(frozen=True)
class Acceptance:
    """The libraries' answers about a file.

    Attributes:
        refused: why ONNX Runtime does not open it. None: it does, or that is unknown.
        unjudged: why it is unknown whether ONNX Runtime would open it. None: it is known.
        shapes: the shapes that onnx infers, by tensor. None for sizes that vary.
    """

    refused: str | None
    unjudged: str | None
    shapes: dict[str, list[int | None]]


def acceptance(path: Path, size: int, domains: frozenset[str] = frozenset()) -> Acceptance:
    """Run onnx's full check, with strict inference of shapes and types, and then ONNX Runtime.

    Args:
        path: the ONNX file.
        size: bytes of its weights. They set the limits of memory and time.
        domains: domains of operators that ONNX Runtime does not have. They need a library of the user's, and without it
            ONNX Runtime's answer means nothing.

    Raises:
        UserError: onnx's check refuses the file, or ends the process.
    """
    root = str(Path(__file__).parents[2])
    environment = {name: value for name, value in os.environ.items() if name not in _UNSET}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    limit = _SECONDS + _SECONDS_A_GIGABYTE * size / 2**30
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "optimize.lint.acceptance", str(path), str(_COPIES * size + _ROOM)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=limit,
            check=False,
        )
        printed, ended = done.stdout, _ending(done.returncode)
    except subprocess.TimeoutExpired as error:
        printed, ended = error.stdout or b"", f"it takes longer than {limit:.0f} s"
    told = dict[str, Any]()
    for line in printed.splitlines():
        if line.startswith(b'{"lint": '):
            told |= json.loads(line)["lint"]
    if "invalid" in told:
        raise UserError(f"{path}: not a valid ONNX graph ({printable(told['invalid'])})")
    shapes = told.get("shapes")
    if shapes is None:
        raise UserError(f"{path}: the check of onnx failed: {ended}")
    if domains:
        names = " and ".join(sorted(domains))
        return Acceptance(None, f"it has no operators of {names} without their library", shapes)
    if "load" not in told:
        by_itself = ended.startswith("ended by")
        return Acceptance(ended if by_itself else None, None if by_itself else ended, shapes)
    if told["load"] is not None and "bad_alloc" in told["load"]:
        return Acceptance(None, "it needs more memory than this check allows", shapes)
    return Acceptance(told["load"], None, shapes)


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _judge(path: str, room: int) -> None:
    """Run in the separate process, and print each answer of the libraries as it comes."""
    _limit(room)
    import onnx

    try:
        onnx.checker.check_model(path, full_check=True)
    except Exception as error:  # noqa: BLE001 - onnx (1.23) raises ValueError, RuntimeError and types of its own
        _tell(invalid=_said(error))
        return
    _tell(shapes=_shapes(path))
    try:
        _open(path)
    except Exception as error:  # noqa: BLE001 - as does ONNX Runtime (1.31)
        _tell(load=_said(error))
    else:
        _tell(load=None)


def _limit(room: int) -> None:
    """Limit the address space to the current size plus ``room`` bytes, within any existing limit."""
    import psutil

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most, hard = psutil.Process().memory_info().vms + room, resource.getrlimit(resource.RLIMIT_AS)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _open(path: str) -> None:
    onnxruntime = import_onnxruntime()

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.add_session_config_entry("session.disable_prepacking", "1")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _shapes(path: str) -> dict[str, list[int | None]]:
    """Infer the shapes of a checked graph, as the check returns none. The result is empty if that fails."""
    from onnx import load_model_from_string, shape_inference

    try:
        inferred = shape_inference.infer_shapes(load_model_from_string(Path(path).read_bytes()), data_prop=True)
    except Exception:  # noqa: BLE001 - as above, and the graph has passed the check
        return {}
    found = {}
    for value in inferred.graph.value_info:
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            found[value.name] = [entry.dim_value if entry.dim_value > 0 else None for entry in dims]
    return found


def _said(error: Exception) -> str:
    """Return a library's message in one line, without the file name and without consequences of the first error.

    ONNX Runtime (1.31) puts its own words, a source location and a signature in front of some messages.
    """
    words = " ".join(str(error).split())
    words = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .*? failed: ?)?", "", words)
    words = re.sub(r"(^|: )/\S+:\d+ .*?\)( const| \[with .*?\])? (?=[A-Z\w]+[ =!.])", r"\1", words, count=1)
    first, mark, rest = words.partition("(op_type:")
    words = first + mark + rest.partition("(op_type:")[0].rstrip()
    return f"{type(error).__name__}: {words[:400]}" if words else type(error).__name__


def _tell(**said: Any) -> None:
    sys.stdout.write(json.dumps({"lint": said}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _judge(sys.argv[1], int(sys.argv[2]))
