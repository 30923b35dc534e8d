"""The controlling side of the processes that executions are measured in. `worker` is the other side."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import torch

from optimize.measure.timing import Timing
from optimize.measure.worker import receive, send
from serve.runtime.card.execution import ENVIRONMENT, STARTED_WITH, Execution
from serve.runtime.errors import EngineError, PipelineError, UserError
from serve.runtime.outputs import Outputs

#: Prefixes of environment variables that change the speed or the results of the libraries.
_READ_BY_LIBRARIES: Final = (
    "GOMP_",
    "OMP_",
    "KMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "MALLOC_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "NVIDIA_TF32",
    "TORCH_COMPILE_DISABLE",
    "TORCH_ALLOW_TF32",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_",
    "ATEN_",
    "FBGEMM_",
)

#: Those of them that torch's compiler (2.14) sets itself, so that whatever a process of it starts has them, too. They
#: change no speed: a place, and how Intel's OpenMP begins in a fork, which torch's wheels do not have.
_SET_BY_LIBRARIES: Final = frozenset({"TORCHINDUCTOR_CACHE_DIR", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"})

_START_S = 300.0
_TIMEOUT_S = 600.0  # for one command: compiling a network takes minutes
_LAST_LINES = 3


def environment() -> dict[str, str]:
    """Return the variables for an execution's process that its libraries read: `ENVIRONMENT` and the user's own.

    The user's values win, as they were when this process began: see `STARTED_WITH`.
    """
    return {
        name: value
        for name, value in sorted({**ENVIRONMENT, **STARTED_WITH}.items())
        if name.startswith(_READ_BY_LIBRARIES) and name not in _SET_BY_LIBRARIES
    }


class Worker:
    """One process for one execution. A context manager that ends it. Use it from one thread.

    If a command fails, the method raises. `UserError` and `EngineError` are raised as in the process. Everything else,
    including the end of the process, is a `PipelineError`.
    """

    def __init__(self, template: Template) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._template = template
        self._stream = ours
        self._incoming: BinaryIO = ours.makefile("rb")
        with theirs:
            #: The process's id.
            self.pid = template.fork(theirs.fileno(), self._errors.fileno())
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, folder: Path, execution: Execution, max_batch: int) -> tuple[str, float]:
        """Open an artifact's folder. Returns the library that executes it, and the time in ms without imports."""
        found = self._ask("open", folder=str(folder.resolve()), execution=execution.to_json(), max_batch=max_batch)
        return found["provider"], found["load_ms"]

    def reference(self, name: str, device: str, pickled: bytes) -> str:
        """Load a pickled module and its preprocessing as the reference of this name. Returns what executes it."""
        provider: str = self._ask("reference", pickled, name=name, device=device)["provider"]
        return provider

    def warm(self, sizes: Sequence[int]) -> None:
        """Run each batch size a few times."""
        self._ask("warm", sizes=list(sizes))

    def memory(self) -> int:
        """Return the peak resident memory above the idle process, bytes."""
        return int(self._ask("memory")["memory_bytes"])

    def device_memory(self, device: str) -> int:
        """Return the memory in use on a CUDA device by all processes, bytes."""
        return int(self._ask("device_memory", device=device)["memory_bytes"])

    def probe(self, engine: str, device: str) -> str | None:
        """Say why an engine does not work on a device (``cpu``, ``cuda``) of this machine. None if it works."""
        reason: str | None = self._ask("probe", engine=engine, device=device)["reason"]
        return reason

    def torch_threads(self) -> int:
        """Return the number of threads that torch uses in the process."""
        return int(self._ask("torch_threads")["threads"])

    def ended(self, images: torch.Tensor) -> Outputs:
        """Map ``uint8 (N, C, H, W)`` to the tensors ``(N, …)`` of which answers are made, both on the host."""
        return self._computed("ended", images)

    def outputs(self, images: torch.Tensor) -> Outputs:
        """Map ``uint8 (N, C, H, W)`` to the network's outputs ``(N, …)``, both on the host."""
        return self._computed("outputs", images)

    def _computed(self, command: str, images: torch.Tensor) -> Outputs:
        header, payload = self._exchange(command, _bytes(images))
        found, start = [], 0
        for shape, kind in header["kinds"]:
            dtype: torch.dtype = getattr(torch, kind)
            count = math.prod(shape)
            found.append(torch.frombuffer(payload, dtype=dtype, count=count, offset=start).view(shape))
            start += count * dtype.itemsize
        return tuple(found)

    def keep(self, images: torch.Tensor) -> None:
        """Send a batch ``uint8 (N, C, H, W)`` to the process, for turns at its size."""
        self._ask("keep", _bytes(images))

    def turn(self, size: int, timing: Timing) -> list[float]:
        """Take a turn at a batch size and return the milliseconds of each timed call."""
        times: list[float] = self._ask("turn", size=size, timing=timing.of_a_turn)["ms"]
        return times

    def invoke(self, function: Callable[..., dict[str, Any]], images: torch.Tensor, **arguments: Any) -> dict[str, Any]:
        """Call a top-level function of the project in the process with images as bytes. Returns its JSON values."""
        name = f"{function.__module__}:{function.__name__}"
        found: dict[str, Any] = self._ask("invoke", _bytes(images), function=name, arguments=arguments)["found"]
        return found

    def close(self) -> None:
        """End the process. A second call does nothing."""
        if not self._ended:
            self._end()
        self._errors.close()

    def _ask(self, command: str, payload: bytes | memoryview = b"", **arguments: Any) -> dict[str, Any]:
        return self._exchange(command, payload, **arguments)[0]

    def _exchange(
        self, command: str, payload: bytes | memoryview = b"", **arguments: Any
    ) -> tuple[dict[str, Any], bytearray]:
        if self._ended:
            raise PipelineError("its process has ended")
        self._stream.settimeout(_TIMEOUT_S)
        try:
            send(self._stream, {"command": command, **arguments}, payload)
            answer = receive(self._incoming)
        except TimeoutError:
            self._end()
            raise PipelineError(f"no answer to {command!r} within {_TIMEOUT_S:.0f} s{self._last_words()}") from None
        except ConnectionError:
            answer = None
        except BaseException:  # interrupted within a message: its rest would be read as the next answer
            self._end()
            raise
        if answer is None:
            status = self._end()
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
            raise PipelineError(f"its process {how}{self._last_words()}")
        if "error" in answer[0]:
            kinds: Mapping[str, type[Exception]] = {"user": UserError, "engine": EngineError}
            raise kinds.get(answer[0]["kind"], PipelineError)(answer[0]["error"])
        return answer

    def _end(self) -> int:
        """End the process and reap it. Returns its exit code, or minus the signal that ended it."""
        self._ended = True
        self._incoming.close()
        self._stream.close()
        return self._template.end(self.pid)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return f": {' / '.join(line.strip() for line in lines)}" if lines else ""


class Template:
    """The process that the workers are forked from. Safe to use from several threads."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables
        self.owner = os.getpid()
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        root = str(Path(__file__).parents[2])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "optimize.measure.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                # Finds our own sources from any working directory, and no module of that directory.
                env={name: value for name, value in os.environ.items() if not name.startswith(_READ_BY_LIBRARIES)}
                | {name: value for name, value in STARTED_WITH.items() if name.startswith(_READ_BY_LIBRARIES)}
                | dict(variables)
                | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
                start_new_session=True,  # this process handles Ctrl-C and ends the template
            )
        self._control.settimeout(_START_S)
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether it still runs."""
        return self._process.poll() is None

    def fork(self, stream: int, errors: int) -> int:
        """Fork a worker that talks on the socket ``stream`` and prints to ``errors``. Returns its process id."""
        with self._lock:
            socket.send_fds(self._control, [b"{}"], [stream, errors])
            return int(self._receive()["pid"])

    def end(self, pid: int) -> int:
        """Kill a worker if it lives, and reap it. Returns its exit code, or minus the signal that ended it."""
        with self._lock, contextlib.suppress(OSError, PipelineError):
            self._control.send(json.dumps({"end": pid}).encode())
            return int(self._receive()["status"])
        return -signal.SIGKILL  # the template is gone, and so are its children

    def close(self) -> None:
        """End the template, and with it all of its workers."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._control.recv(256)
        except TimeoutError:
            message = b""
        if not message:
            self._errors.seek(0)
            last = (self._errors.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise PipelineError(f"the measuring process could not be started: {last}")
        found: dict[str, Any] = json.loads(message)
        return found


_template: Template | None = None
_starting = threading.Lock()


def template() -> Template:
    """Return this process's template. It starts with the first worker, and again if the environment has changed."""
    global _template  # noqa: PLW0603 - one for a process, which its end ends
    with _starting:
        wanted = environment()
        if _template is not None and _template.owner != os.getpid():
            _template = None  # this process is a fork of the template's owner
        if _template is not None and (not _template.alive or _template.variables != wanted):
            _template.close()
            _template = None
        if _template is None:
            _template = Template(wanted)
        return _template


@atexit.register
def _close() -> None:
    if _template is not None and _template.owner == os.getpid():
        _template.close()


def worker() -> Worker:
    """Start a new process for an execution.

    Raises:
        PipelineError: it cannot be started.
    """
    return Worker(template())


def _bytes(images: torch.Tensor) -> memoryview:
    return memoryview(images.contiguous().numpy().data).cast("B")
