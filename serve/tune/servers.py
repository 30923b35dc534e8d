"""Real servers of one archive for measurements: the own server and TorchServe, in a scratch store."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx
import psutil

from serve.common.server_processes import end, process_tree, wait_until_ready
from serve.load.plan import Target
from serve.runtime.card.execution import ENVIRONMENT
from serve.runtime.card.serving import SERVING_FILE, Serving
from serve.torchserve import server as torchserve_process
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.configuration import HOST, Ports
from serve.torchserve.limits import Limits
from serve.torchserve.state import state_folder

ServerKind = Literal["own", "torchserve"]
KINDS: Final[tuple[ServerKind, ...]] = ("own", "torchserve")

_READY_S = 180.0


@dataclass(frozen=True)
class Live:
    """A running server: the target of each model, and the server's processes.

    Attributes:
        targets: targets by model name.
        pid: PID of its first process. The others are its descendants.
        log: its output.
    """

    targets: Mapping[str, Target]
    pid: int
    log: Path

    @property
    def target(self) -> Target:
        """The target of its only model."""
        (target,) = self.targets.values()
        return target

    def processes(self) -> list[psutil.Process]:
        """Return its current processes."""
        return process_tree(self.pid)

    def cpu_s(self) -> float:
        """Return the seconds of CPU time of its processes together."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_bytes(self) -> int:
        """Return the memory of its processes together (resident set size)."""
        return sum(self.memory_by_program().values())

    def memory_by_program(self) -> dict[str, int]:
        """Return the memory by program: ``java`` is TorchServe's frontend, ``python`` its workers or the own server."""
        found: dict[str, int] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                program = "java" if process.name() == "java" else "python"
                found[program] = found.get(program, 0) + process.memory_info().rss
        return found


def pack(artifact: Path, serving: Serving, scratch: Path, model: str) -> Path:
    """Pack an artifact with these settings into ``scratch``. The artifact's folder stays unchanged."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        for file in artifact.iterdir():
            if file.is_file() and file.name != SERVING_FILE:
                _link(file, Path(folder) / file.name)
        (Path(folder) / SERVING_FILE).write_text(serving.text, encoding="utf-8")
        return build_archive(Path(folder), scratch / "archives" / f"{model}.mar", model_name=model)


def free_ports(count: int) -> list[int]:
    """Return ports on which nobody listens now."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in opened:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in opened]


@contextmanager
def serving(
    kind: ServerKind,
    archives: Mapping[str, Path],
    scratch: Path,
    queue: int | None = None,
    on_start: Callable[[int], None] = lambda pid: None,
    *,
    gpus: int | None = 0,
    processes: int | None = None,
) -> Iterator[Live]:
    """Serve archives by model name from ``scratch`` until the block ends. Yield when all of them answer.

    Args:
        kind: which server.
        archives: the ``.mar`` files by model name.
        scratch: a private folder for state and logs.
        queue: most waiting requests of a model. None: the server's default.
        on_start: called with the PID of its first process as soon as it is known, perhaps twice.
        gpus: most GPUs for TorchServe's workers. None: all. The own server uses one if there is one.
        processes: number of the own server's processes. None: as in the archives.

    Raises:
        PipelineError: the server does not start. The message has its last line.
    """
    own = kind == "own"
    with (
        _own(archives, scratch, queue, on_start, processes)
        if own
        else _torchserve(archives, scratch, queue, gpus) as live
    ):
        on_start(live.pid)
        yield live


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Leave the block in order on SIGTERM, so that its servers are stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def remember(pid: int, path: Path) -> None:
    """Record the PID of a server for `end_left`."""
    path.write_text(json.dumps([pid, psutil.Process(pid).create_time()]), encoding="utf-8")


def end_left(path: Path) -> bool:
    """End a recorded server if its parent was killed and it still runs. Return whether it did."""
    try:
        pid, created = json.loads(path.read_text(encoding="utf-8"))
        process = psutil.Process(pid)
        left = bool(process.create_time() == created)
    except (OSError, ValueError, psutil.Error):
        left = False
    if left:
        end(process_tree(pid), patience_s=0, ask=False)
    path.unlink(missing_ok=True)
    return left


@contextmanager
def _own(
    archives: Mapping[str, Path],
    scratch: Path,
    queue: int | None,
    on_start: Callable[[int], None],
    processes: int | None,
) -> Iterator[Live]:
    (port,) = free_ports(1)
    log = scratch / "own.log"
    words = ["run", *map(str, archives.values()), "--port", str(port), "--no-token", "--store", str(scratch)]
    words += [] if queue is None else ["--queue", str(queue)]
    words += [] if processes is None else ["--processes", str(processes)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve", *words],
            cwd=Path(__file__).parents[2],
            env={**ENVIRONMENT, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        on_start(process.pid)
        with httpx.Client(timeout=5, trust_env=False) as client:
            url = f"http://{HOST}:{port}/health/ready"

            def ready() -> bool:  # all of its processes, not only the one that answers
                return client.get(url).is_success and b"\nready: " in log.read_bytes()

            wait_until_ready(process, ready, log, within_s=_READY_S)
        targets = {model: Target(f"{HOST}:{port}", f"/predictions/{model}") for model in archives}
        yield Live(targets, process.pid, log)
    finally:
        members = process_tree(process.pid)
        end(members[-1:], patience_s=40)  # it ends the others in order
        end(members, patience_s=0, ask=False)
        process.wait()


@contextmanager
def _torchserve(archives: Mapping[str, Path], scratch: Path, queue: int | None, gpus: int | None) -> Iterator[Live]:
    ports = Ports(*free_ports(5))
    limits = None if queue is None else Limits(queue=queue)
    running = torchserve_process.start(scratch, archives, ports=ports, limits=limits, gpus=gpus)
    try:
        with running.client(scratch) as client:
            name, _, value = client.write_header_file().read_text(encoding="utf-8").strip().partition(": ")
        targets = {
            model: Target(f"{HOST}:{ports.inference}", f"/predictions/{model}", {name: value}) for model in archives
        }
        yield Live(targets, running.pid, state_folder(scratch) / "logs")
    finally:
        torchserve_process.stop(scratch)


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source.resolve(), destination)
    except OSError:  # another file system
        shutil.copyfile(source, destination)
