"""The process that measures one execution, opened on command from a clean start.

Run as ``python -m optimize.measure.worker FD`` this is the *template*: a process that has imported the libraries, has
started no thread and no CUDA, and forks a child for each execution. So no artifact pays for an import, and none is
warmed up or enlarged by another. A message on the sockets is a line of JSON, and as many bytes as it announces.
`optimize.measure.processes` is the other side.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

if TYPE_CHECKING:
    import torch

    from serve.runtime.outputs import Outputs

#: Untimed calls until a batch size counts as warm: TorchScript optimises on its second call, CUDA on its first.
_WARM_CALLS = 3
_PR_SET_PDEATHSIG: Final = 1

#: Modules that torch (2.14) imports when an exported program is opened: 400 with networkx and sympy, 0.3 s.
OPENED_LATER: Final = (
    "torch.export.passes",
    "torch.export._trace",
    "torch.export._unlift",
    "torch._export.serde.serialize",
    "torch._export.passes.add_runtime_assertions_for_constraints_pass",
    "torch._functorch.aot_autograd",
    "torch._inductor.sizevars",
    "torch.fx.experimental.validator",
    "sympy.tensor.tensor",
)


def send(stream: socket.socket, header: Mapping[str, Any], payload: bytes | memoryview = b"") -> None:
    """Write one message: a line of JSON and the payload."""
    stream.sendall(json.dumps({**header, "bytes": len(payload)}).encode() + b"\n")
    if payload:
        stream.sendall(payload)


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytearray] | None:
    """Read a message of `send`. None if the other side is gone."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    header: dict[str, Any] = json.loads(line)
    payload = bytearray(header.pop("bytes"))
    view = memoryview(payload)
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            return None
        view = view[count:]
    return header, payload


@dataclass
class Child:
    """The answering side of an execution's process. Each method is the command of its name.

    Attributes:
        call: ``uint8 (N, C, H, W)`` to the tensors of which answers are made, both on the host, once something is open.
        network: the same to the network's own outputs.
        device: where it runs.
        idle: memory of the process before anything was opened, bytes.
        images: a batch of each size that is timed.
    """

    call: Callable[[torch.Tensor], Outputs] | None = None
    network: Callable[[torch.Tensor], Outputs] | None = None
    device: str = "cpu"
    shape: tuple[int, ...] = ()
    idle: int = 0
    images: dict[int, torch.Tensor] = field(default_factory=dict)

    def open(self, payload: bytearray, folder: str, execution: Mapping[str, Any], max_batch: int) -> dict[str, Any]:
        """Open an artifact's folder and check its files. ``load_ms`` does not include imports."""
        from serve.runtime.card.execution import Execution, settle
        from serve.runtime.engines.base import find_engine, unavailable
        from serve.runtime.errors import EngineError
        from serve.runtime.service.predictor import Predictor

        by = Execution.from_json(execution)
        settle(by, computes_with_torch=find_engine(by.engine).computes_with_torch)
        # The probe imports the engine's libraries. The template must not: onnxruntime (1.31) starts a thread when it is
        # imported, which a forked child would lack.
        if (reason := unavailable(by.engine, by.device_type)) is not None:
            raise EngineError(reason)
        self.idle = _memory(anew=True)
        start = time.perf_counter()
        predictor = Predictor(Path(folder), by, max_batch=max_batch)
        load_ms = (time.perf_counter() - start) * 1e3
        self.call, self.network, self.device = predictor.ended, predictor.outputs, by.device
        self.shape = predictor.card.preprocessing.shape
        return {"provider": predictor.engine.provider, "load_ms": load_ms}

    def reference(self, payload: bytearray, name: str, device: str) -> dict[str, Any]:
        """Load an eager module and run it as the reference of this name."""
        from optimize.measure.references import open_reference

        # From our own parent, through a socket that only it has.
        module, preprocessing, task = pickle.loads(payload)
        self.call, provider = open_reference(name, module, preprocessing, task, device)
        self.device, self.shape = device, preprocessing.shape
        return {"provider": provider}

    def warm(self, payload: bytearray, sizes: list[int]) -> dict[str, Any]:
        """Run each batch size a few times."""
        import torch

        for size in sizes:
            images = self.images.get(size)
            if images is None:
                images = torch.zeros((size, *self.shape), dtype=torch.uint8)
            for _ in range(_WARM_CALLS):
                self._run(images)
        return {}

    def memory(self, payload: bytearray) -> dict[str, Any]:
        """Return the peak resident memory above that of the idle process, bytes."""
        return {"memory_bytes": _memory() - self.idle}

    def device_memory(self, payload: bytearray, device: str) -> dict[str, Any]:
        """Return the memory in use on a CUDA device by all processes, bytes."""
        import torch

        free, total = torch.cuda.mem_get_info(torch.device(device))
        return {"memory_bytes": total - free}

    def probe(self, payload: bytearray, engine: str, device: str) -> dict[str, Any]:
        """Return why an engine does not work here, or None."""
        from serve.runtime.engines.base import unavailable

        return {"reason": unavailable(engine, device)}

    def torch_threads(self, payload: bytearray) -> dict[str, Any]:
        """Return the number of threads that torch uses."""
        import torch

        return {"threads": torch.get_num_threads()}

    def ended(self, payload: bytearray) -> tuple[dict[str, Any], bytes]:
        """Map ``uint8`` images to the tensors of which answers are made, both as raw memory."""
        return self._sent(self._run(self._batch(payload)))

    def outputs(self, payload: bytearray) -> tuple[dict[str, Any], bytes]:
        """Map ``uint8`` images to the network's outputs, both as raw memory."""
        assert self.network is not None, "no artifact is open"
        return self._sent(self.network(self._batch(payload)))

    def _sent(self, found: Outputs) -> tuple[dict[str, Any], bytes]:
        kinds = [[list(output.shape), str(output.dtype).removeprefix("torch.")] for output in found]
        return {"kinds": kinds}, b"".join(output.numpy().tobytes() for output in found)

    def keep(self, payload: bytearray) -> dict[str, Any]:
        """Keep a batch of images for `turn`, by its size."""
        batch = self._batch(payload)
        self.images[len(batch)] = batch
        return {}

    def turn(self, payload: bytearray, size: int, timing: Mapping[str, Any]) -> dict[str, Any]:
        """Take a turn at a batch size. Returns the milliseconds of each timed call."""
        from optimize.measure.latency import clock_of, take_turn
        from optimize.measure.timing import Timing

        return {"ms": take_turn(self._run, self.images[size], clock_of(self.device), Timing(**timing))}

    def invoke(self, payload: bytearray, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function of this project (``module:name``) on the payload. Returns its JSON values."""
        module, _, name = function.partition(":")
        return {"found": getattr(importlib.import_module(module), name)(payload, **arguments)}

    def _run(self, images: torch.Tensor) -> Outputs:
        assert self.call is not None, "nothing is open"
        return self.call(images)

    def _batch(self, payload: bytearray) -> torch.Tensor:
        import torch

        return torch.frombuffer(payload, dtype=torch.uint8).view(-1, *self.shape)


_COMMANDS: Final = (
    "open", "reference", "warm", "memory", "device_memory", "probe", "torch_threads", "ended", "outputs", "keep",
    "turn",
    "invoke",
)  # fmt: skip


def answer_commands(stream: socket.socket) -> None:
    """Answer the commands on ``stream`` until the other side closes it. A failure is an answer too."""
    child = Child()
    with stream.makefile("rb") as incoming:
        while (message := receive(incoming)) is not None:
            header, payload = message
            command = header.pop("command")
            try:
                assert command in _COMMANDS, command
                found = getattr(child, command)(payload, **header)
                answer, outgoing = found if isinstance(found, tuple) else (found, b"")
                send(stream, answer, outgoing)
            except Exception as error:  # noqa: BLE001 - whatever a library raises is an answer here
                from serve.runtime.errors import EngineError, UserError, message_of

                kinds = (("user", UserError), ("engine", EngineError))
                kind = next((name for name, type_ in kinds if isinstance(error, type_)), "failed")
                send(stream, {"error": message_of(error), "kind": kind})


def _memory(*, anew: bool = False) -> int:
    """Return this process's peak resident memory in bytes. ``anew`` resets the peak first if the kernel allows it.

    ``getrusage`` does not work here, because it inherits its peak from the parent.
    """
    if anew:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # proc(5): resets VmHWM
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def prepare() -> None:
    """Import the libraries of executions, as far as that starts no thread. CUDA is not touched."""
    # numpy's OpenBLAS (numpy 2) starts its thread pool at import. Nothing that is measured uses it.
    given = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    importlib.import_module("numpy")
    del os.environ["OPENBLAS_NUM_THREADS"]
    if given is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = given
    for name in ("optimize.measure.references", "serve.runtime.service.predictor", "torchvision.models", *OPENED_LATER):
        importlib.import_module(name)
    from serve.runtime.engines.base import engines
    from serve.runtime.tasks.base import tasks

    engines()
    tasks()
    gc.collect()
    gc.freeze()  # keeps memory shared with the children


def _die_with(parent: int) -> None:
    """Make the kernel end this process when ``parent`` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _template(control: socket.socket) -> None:
    """Fork a child for each pair of descriptors (its socket, its stderr) that arrives. End children on request."""
    prepare()
    control.send(b"{}")
    me = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 256, 2)
        if not message:
            return  # the owner is gone, and our children end with us
        if descriptors:
            pid = os.fork()
            if pid == 0:
                _die_with(me)
                control.close()
                stream, errors = descriptors
                os.dup2(errors, 1)  # a library's prints must not be read as an answer
                os.dup2(errors, 2)
                os.close(errors)
                try:
                    answer_commands(socket.socket(fileno=stream))
                finally:
                    sys.stderr.flush()
                    os._exit(0)  # does not wait for the destructors of libraries
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(json.dumps({"pid": pid}).encode())
        else:
            pid = json.loads(message)["end"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            control.send(json.dumps({"status": status}).encode())


if __name__ == "__main__":
    _template(socket.socket(fileno=int(sys.argv[1])))
