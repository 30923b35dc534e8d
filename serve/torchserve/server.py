"""Starts, finds and stops one TorchServe per store, on loopback, from the store's own private folder.

Java is started directly: the ``torchserve`` command keeps its pid in one file of the machine's temporary
folder, so that a second server anywhere refuses to start and ``--stop`` stops somebody else's.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from serve.client import Client
from serve.hints import command
from serve.runtime.errors import PipelineError, UserError
from serve.torchserve.configuration import Ports, metrics_yaml, properties
from serve.torchserve.identity import ALIVE_FILE, Identity, hold, life_of, nameless, new_nonce
from serve.torchserve.java import command_line, environment, java_executable
from serve.torchserve.limits import Limits
from serve.torchserve.watch import CONSOLE_LOG, StartError, wait_until_ready
from serve.verified import Policy, verified_copy

STATE_FOLDER = ".server"
_STATE_FILE = "state.json"
_ARCHIVES = "archives"  # of this server alone
_CONFIG_FILE = "config.properties"

# Measured on 2 cores: a worker imports torch, loads and warms up in about 6 s of CPU time, and all
# start at once. The deadline is for a cold disk, not for a usual start.
_DEADLINE_S = 120.0
_DEADLINE_PER_MODEL_S = 30.0

# What TorchServe itself takes to end, when all is answered.
_ENDING_S = 20.0


@dataclass(frozen=True)
class RunningServer:
    """A server as its state file records it.

    ``identity`` tells its Java process from every other; ``temporary`` holds its sockets and the unpacked archives.
    """

    identity: Identity
    run: str
    models: tuple[str, ...]
    default_model: str
    temporary: str
    ports: Ports = field(default_factory=Ports)
    limits: Limits = field(default_factory=Limits)

    @property
    def pid(self) -> int:
        """The number of its Java process."""
        return self.identity.pid

    def client(self, store: Path, timeout_s: float = 60.0) -> Client:
        """A client that talks to this server."""
        return Client(self.ports, state_folder(store), timeout_s)


def state_folder(store: Path) -> Path:
    """The private folder (0700) of a store's server: state, configuration, keys and logs."""
    return store.resolve() / STATE_FOLDER


def running(store: Path) -> RunningServer | None:
    """The server of this store, or None; what a crash or a reboot has left behind does not count.

    Raises:
        UserError: there may be one, and nobody can tell from here.
    """
    folder = state_folder(store)
    state = _read_state(store)
    if state is None:
        if (pid := nameless(folder, folder / _CONFIG_FILE)) is not None:
            raise UserError(
                f"a server of this store is alive (process {pid or 'unknown'}), and {folder / _STATE_FILE} does not "
                f"tell of it: end that process first"
            )
        return None
    life, why = life_of(state.identity, folder)
    if life == "unknown":
        raise UserError(
            f"whether the server of this store is running cannot be told: {why}; nothing was changed. If it has "
            f"ended, remove {folder / _STATE_FILE}"
        )
    return None if life == "gone" else state


def start(
    store: Path,
    run: str,
    archives: Mapping[str, Path],
    *,
    ports: Ports | None = None,
    limits: Limits | None = None,
    default_model: str | None = None,
    gpus: int | None = None,
    repack: Callable[[Path], Mapping[str, Path]] | None = None,
    policy: Policy | None = None,
    deadline_s: float | None = None,
    on_ready: Callable[[str], None] = lambda model: None,
) -> RunningServer:
    """Start TorchServe with these archives and return when every model answers.

    Args:
        store: the store whose server it is; it has one at a time.
        run: the run that is served, for the record.
        archives: the ``.mar`` files by model name, all in one folder.
        ports: where to listen; None takes the defaults.
        limits: what it may hold; None takes the defaults.
        default_model: which model `predict` takes when none is named; None takes the first.
        gpus: most GPUs to use; 0 serves on the CPU, None takes what TorchServe finds.
        repack: packs other archives of the same models into the folder that it is given, which are served instead and
            go when the server stops.
        policy: what may be loaded; None: what is whole, and has no other code than this installation's. What is loaded
            is a private copy of the server's, which was checked after it was made.
        deadline_s: seconds to wait; None takes two minutes and half a minute for each model.
        on_ready: called with each model's name when it answers.

    Raises:
        UserError: it runs already, or may; a port is in use, an archive is missing, Java is missing.
        CardError: an archive is not whole.
        SignatureError: the policy does not allow one.
        StartError: the server or a worker died; it is stopped again, and the message has their last lines.
    """
    ports = ports or Ports()
    folders = {path.resolve().parent for path in archives.values()}
    for path in archives.values():
        if not path.is_file():
            raise UserError(
                f"{path}: there is no such archive; make it with `{command(f'serve package {run}', store)}`"
            )
    if len(folders) != 1:
        raise UserError("there is nothing to serve" if not folders else "all archives must be in one folder")
    with _lock(store) as state:
        if (present := running(store)) is not None:
            raise UserError(
                f"a server of this store is already running (run {present.run}, port {present.ports.inference}): "
                f"stop it with `{command('serve stop', store)}`"
            )
        _clean(store)
        java = java_executable()
        ports.check_free()
        private = state / _ARCHIVES
        private.mkdir(mode=0o700)
        try:
            archives = _loaded(archives, private, policy or Policy(), repack)
            server, process = _launch(
                state,
                java=java,
                run=run,
                archives=archives,
                folder=private,
                ports=ports,
                limits=limits or Limits(),
                default_model=default_model or next(iter(archives)),
                gpus=gpus,
            )
            with server.client(store) as client:
                wait_until_ready(
                    process,
                    client,
                    state / "logs",
                    server.models,
                    deadline_s=deadline_s or _DEADLINE_S + _DEADLINE_PER_MODEL_S * len(archives),
                    on_ready=on_ready,
                )
                client.write_header_file()
        except BaseException:
            # Whatever ended the wait, Ctrl-C as well: half a server is worse than none.
            if (half := _read_state(store)) is not None:
                _stop(store, half)
            else:
                _clean(store)
            raise
        return server


def _loaded(
    archives: Mapping[str, Path],
    folder: Path,
    policy: Policy,
    repack: Callable[[Path], Mapping[str, Path]] | None,
) -> Mapping[str, Path]:
    """What is really loaded, in the server's own folder: packed anew there, or copied and checked."""
    if repack is None:
        return {model: verified_copy(path, policy, folder) for model, path in archives.items()}
    if policy.keys:
        raise UserError(
            "what must be signed is served as its archive says: pack it so with `python -m serve package … --sign KEY`"
        )
    return repack(folder)


def stop(store: Path, on_wait: Callable[[], None] = lambda: None) -> RunningServer | None:
    """Stop the store's server and its workers; return what was stopped, or None if none was running.

    It refuses what comes, answers what it has accepted, and ends. A start that is under way is waited for first.

    Args:
        store: whose server it is.
        on_wait: called before a wait for a start that is under way.

    Raises:
        PipelineError: a process would not end.
        UserError: it runs where it cannot be stopped from here; or nobody can tell whether it does.
    """
    if not state_folder(store).is_dir():
        return None
    with _lock(store, on_wait):
        state = running(store)
        if state is None:
            _clean(store)
            return None
        _stop(store, state)
        return state


def _launch(
    state: Path,
    *,
    java: Path,
    run: str,
    archives: Mapping[str, Path],
    folder: Path,
    ports: Ports,
    limits: Limits,
    default_model: str,
    gpus: int | None,
) -> tuple[RunningServer, psutil.Process]:
    """Write the configuration, start Java, and record it before anything else can go wrong."""
    logs = state / "logs"
    logs.mkdir()
    metrics = state / "metrics.yaml"
    metrics.write_text(metrics_yaml(), encoding="utf-8")
    config = state / _CONFIG_FILE
    settings = properties(ports, limits, archives=folder, metrics_file=metrics, gpus=gpus)
    config.write_text(settings, encoding="ascii")
    # Short and private: TorchServe 0.12 puts its workers' sockets here, as .ts.sock.9000 and on. A socket's
    # path has at most 107 bytes, and in the common temporary folder two servers would take each other's.
    temporary = tempfile.mkdtemp(prefix="torchserve-")
    nonce = new_nonce()
    alive = _hold(state / ALIVE_FILE)
    try:
        with (logs / CONSOLE_LOG).open("wb") as console:
            popen = subprocess.Popen(
                command_line(
                    java,
                    nonce=nonce,
                    limits=limits,
                    temporary=Path(temporary),
                    config=config,
                    logs=logs,
                    folder=folder,
                    archives={model: path.name for model, path in archives.items()},
                ),
                cwd=state,  # where it writes key_file.json
                env=environment(java, logs),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who stop it in order
                umask=0o077,
                pass_fds=(alive,),  # Java has it until it ends, and closes it in its workers
            )
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"Java cannot be started ({error})") from None
    finally:
        os.close(alive)
    try:
        process = psutil.Process(popen.pid)
        identity = Identity.of(popen.pid, nonce)
        server = RunningServer(identity, run, tuple(archives), default_model, temporary, ports, limits)
        written = state / f".{_STATE_FILE}"
        written.write_text(json.dumps(asdict(server), indent=2), encoding="utf-8")
        written.replace(state / _STATE_FILE)
    except BaseException:
        popen.kill()  # or nobody would know of it
        popen.wait()
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # It outlives this function, and perhaps this process. While this one lasts somebody must take note of its end,
    # or it would stay in the table of processes.
    threading.Thread(target=popen.wait, name="torchserve-ends", daemon=True).start()
    return server, process


def _hold(path: Path) -> int:
    """The server's lock. Who asks whether it is held holds it for a moment too."""
    for _ in range(50):
        try:
            return hold(path)
        except BlockingIOError:
            time.sleep(0.1)
    raise UserError(f"a server of this store is alive: {path} is locked")


def _stop(store: Path, state: RunningServer) -> None:
    """End Java and its workers when all that was accepted is answered, then tidy up."""
    process = state.identity.process()
    if process is None:
        life, why = life_of(state.identity, state_folder(store))
        if life != "gone":
            raise UserError(f"the server of this store cannot be stopped from here: {why}; stop it there")
    else:
        # Collected first: when Java is gone, nothing tells whose children they were.
        workers = process.children(recursive=True)
        process.terminate()
        _end([process], patience_s=state.limits.drain_s + _ENDING_S)
        _end(workers, patience_s=5.0)
    _clean(store)


def _end(processes: Sequence[psutil.Process], *, patience_s: float) -> None:
    """Wait for processes to end by themselves, then kill them."""
    _, left = psutil.wait_procs(processes, timeout=patience_s)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, left = psutil.wait_procs(left, timeout=10.0)
    if left:
        raise PipelineError(f"processes {', '.join(str(process.pid) for process in left)} do not end")


def _read_state(store: Path) -> RunningServer | None:
    try:
        body = json.loads((state_folder(store) / _STATE_FILE).read_text(encoding="utf-8"))
        body["identity"] = Identity(**body["identity"])
        body["ports"] = Ports(**body["ports"])
        body["limits"] = Limits(**body["limits"])
        body["models"] = tuple(body["models"])
        return RunningServer(**body)
    except (OSError, ValueError, TypeError, KeyError, UserError):
        return None


def _clean(store: Path) -> None:
    """Remove what a server that is gone has left: state, logs of before, archives of its own, unpacked ones.

    Its keys stay: clients have them.
    """
    folder = state_folder(store)
    shutil.rmtree(folder / _ARCHIVES, ignore_errors=True)
    state = _read_state(store)
    if state is not None and Path(state.temporary).name.startswith("torchserve-"):
        shutil.rmtree(state.temporary, ignore_errors=True)
    (folder / _STATE_FILE).unlink(missing_ok=True)
    if (folder / "logs").is_dir():
        # The last server's logs stay for a reader, out of the way of the next one's.
        shutil.rmtree(folder / "logs.previous", ignore_errors=True)
        (folder / "logs").rename(folder / "logs.previous")


@contextmanager
def _lock(store: Path, on_wait: Callable[[], None] | None = None) -> Iterator[Path]:
    """Hold the store's server folder for one start or stop at a time; yields the folder.

    Where somebody else holds it, it is waited for after ``on_wait``, if that is given.
    """
    folder = state_folder(store)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is None:
                raise UserError("another start or stop of this store's server is under way") from None
            on_wait()
            while not _taken(handle):
                time.sleep(0.1)  # and not in flock, which Ctrl-C would not end
        yield folder
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


__all__ = ["RunningServer", "StartError", "running", "start", "state_folder", "stop"]
