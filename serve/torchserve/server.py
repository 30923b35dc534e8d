"""Starts, finds and stops one TorchServe for each store, on loopback, from the store's own private folder.

Java is started directly. The ``torchserve`` command keeps its PID in one file of the machine's temporary folder. A
second server anywhere would refuse to start, and ``--stop`` would stop another user's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from serve.archive.verification import Policy
from serve.common.hints import command, target
from serve.common.server_processes import end
from serve.runtime.errors import PipelineError, UserError
from serve.torchserve.configuration import HOST, Ports, metrics_yaml, properties
from serve.torchserve.java import command_line, environment, java_executable
from serve.torchserve.launcher import launcher
from serve.torchserve.limits import Limits
from serve.torchserve.process_identity import ALIVE_FILE, Identity, hold, is_held, life_of, nameless, new_nonce
from serve.torchserve.staging import Pack, stage
from serve.torchserve.startup_watch import CONSOLE_LOG, Awaited, Log, Progressed, StartError, wait_until_ready
from serve.torchserve.state import (
    LOCK_FILE,
    RunningServer,
    ServedModel,
    archives_folder,
    locked,
    read_state,
    remove_state,
    state_file,
    state_folder,
    write_state,
)

_CONFIG_FILE = "config.properties"

# Measured on 2 cores: a worker imports torch, loads and warms up in about 6 s of CPU time, and all start at once. The
# deadline allows for a cold disk.
_DEADLINE_S = 120.0
_DEADLINE_PER_MODEL_S = 30.0

# Seconds that TorchServe itself needs to end after the last answer.
_SHUTDOWN_S = 20.0


def running(store: Path, *, holding: bool = False) -> RunningServer | None:
    """Return the server of this store. None: there is none, or only the remains of a crash or reboot.

    Args:
        store: the server's store.
        holding: whether the caller holds the store's lock. Without it, a starting server does not count yet.

    Raises:
        UserError: a server may exist, but its state cannot be determined from here.
    """
    folder = state_folder(store)
    state = read_state(store)
    if state is None:
        if not holding and is_held(folder / LOCK_FILE):
            return None
        if (pid := nameless(folder, folder / _CONFIG_FILE)) is not None:
            raise UserError(
                f"a server of this store is running (process {pid or 'unknown'}), but {state_file(store)} is "
                "missing: end that process first"
            )
        return None
    life, why = life_of(state.identity, folder)
    if life == "unknown":
        raise UserError(
            f"cannot tell whether the server of this store is running: {why}. Nothing was changed. If the server "
            f"has ended, remove {state_file(store)}"
        )
    return None if life == "gone" else state


def the_running(store: Path) -> RunningServer:
    """Return the server of this store.

    Raises:
        UserError: a server may exist, but its state cannot be determined from here.
        PipelineError: none is running.
    """
    server = running(store)
    if server is None:
        raise PipelineError(f"no server of {store} is running: start one with `{command('serve start RUN', store)}`")
    return server


def start(
    store: Path,
    archives: Mapping[str, Path],
    *,
    ports: Ports | None = None,
    host: str = HOST,
    limits: Limits | None = None,
    default_model: str | None = None,
    gpus: int | None = None,
    pack: Pack | None = None,
    policy: Policy | None = None,
    strict: bool = False,
    left_out: Mapping[str, str] | None = None,
    deadline_s: float | None = None,
    on_ready: Callable[[str], None] = lambda model: None,
    on_left_out: Callable[[str, str], None] = lambda model, reason: None,
    progressed: Progressed = lambda fraction, message: None,
) -> RunningServer:
    """Start TorchServe with these archives and return when every model answers.

    Args:
        store: the server's store. It has one server at a time.
        archives: the ``.mar`` files in their runs' folders, by model name.
        ports: the ports to listen on. None: the defaults.
        host: the address of predictions over HTTP. Beyond loopback, other machines can connect.
        limits: the server's limits. None: the defaults.
        default_model: the model that `predict` uses by default. None: the first.
        gpus: most GPUs to use. 0: the CPU. None: what TorchServe finds.
        pack: packs a model in place of its archive. The result is removed when the server stops.
        policy: which archives may be loaded. None: complete ones with only this installation's code. The server loads a
            private copy that was checked after copying.
        strict: whether a model that does not start ends the start. Otherwise it is left out, unless it is the last one.
        left_out: models that were left out before, with the reasons, for the record.
        deadline_s: seconds to wait. None: two minutes and half a minute for each model.
        on_ready: called with each model's name when it answers.
        on_left_out: called with the name of a model that does not start, and the reason.
        progressed: called repeatedly while the server starts.

    Raises:
        UserError: a server runs already, or may. Or a port is in use, an archive is missing, or Java is missing.
        CardError: an archive is damaged, or has no known answer and the policy needs one.
        SignatureError: the policy does not allow an archive.
        StartError: the server or the last worker died. The server is stopped again, and the message has their last
            lines.
    """
    ports = ports or Ports()
    for name, path in archives.items():
        if not path.is_file():
            packing = command(f"serve package {ServedModel.of(name, path).run}", store)
            raise UserError(f"{path}: there is no such archive; build it with `{packing}`")
    if not archives:
        raise UserError("there is no model to serve")
    with locked(store) as state:
        if (present := running(store, holding=True)) is not None:
            raise UserError(
                f"a server of this store is already running ({_runs(present)}, port {present.ports.inference}): "
                f"add to it with `{target('add', 'serve add RUN', store, RUN='RUN')}`, or stop it with "
                f"`{target('stop', 'serve stop', store)}`"
            )
        _clean(store)
        java = java_executable()
        ports.check_free(host)
        awaited: dict[str, Awaited] = {}
        served: tuple[ServedModel, ...] = ()
        try:
            for name, path in archives.items():
                model = ServedModel.of(name, path)
                known = stage(archives_folder(store), model, path, pack, policy).known
                awaited[name] = Awaited(model.version, known)
                served += (model.asked_for(known),)
            server, process = _launch(
                store,
                java=java,
                served=served,
                ports=ports,
                host=host,
                limits=limits or Limits(),
                default_model=default_model or served[0].name,
                left_out=dict(left_out or {}),
                gpus=gpus,
            )
            with server.client(store) as client:
                dead: dict[str, str] = {}

                def give_up(model: str, error: StartError) -> None:
                    if strict or len(dead) + 1 == len(served):
                        raise error
                    client.unregister(model)
                    dead[model] = error.reason
                    on_left_out(model, error.reason)

                wait_until_ready(
                    process,
                    client,
                    Log(state / "logs"),
                    awaited,
                    deadline_s=deadline_s or _DEADLINE_S + _DEADLINE_PER_MODEL_S * len(served),
                    on_ready=on_ready,
                    give_up=give_up,
                    progressed=progressed,
                )
                client.write_header_file()
            if dead:
                up = tuple(model for model in served if model.name not in dead)
                default = server.default_model if server.default_model not in dead else up[0].name
                server = replace(server, served=up, default_model=default, left_out=server.left_out | dead)
                write_state(store, server)
                for model in set(served) - set(up):
                    (archives_folder(store) / model.file).unlink(missing_ok=True)
        except BaseException:
            # Also after Ctrl-C: half a server is worse than none.
            if (half := read_state(store)) is not None:
                _stop(store, half)
            else:
                _clean(store)
            raise
        return server


def stop(store: Path, on_wait: Callable[[], None] = lambda: None) -> RunningServer | None:
    """Stop the store's server and its workers. Return the stopped server, or None if none was running.

    It refuses new requests, answers the accepted ones, and ends. If a start is under way, this waits for it first.

    Args:
        store: the server's store.
        on_wait: called before it waits for a start.

    Raises:
        PipelineError: a process did not end.
        UserError: the server cannot be stopped from here, or its state cannot be determined.
    """
    if not state_folder(store).is_dir():
        return None
    with locked(store, on_wait):
        state = running(store, holding=True)
        if state is None:
            _clean(store)
            return None
        _stop(store, state)
        return state


def _launch(
    store: Path,
    *,
    java: Path,
    served: Sequence[ServedModel],
    ports: Ports,
    host: str,
    limits: Limits,
    default_model: str,
    left_out: dict[str, str],
    gpus: int | None,
) -> tuple[RunningServer, psutil.Process]:
    """Write the configuration, start Java, and record it before anything else can fail."""
    state, folder = state_folder(store), archives_folder(store)
    logs, metrics, config = state / "logs", state / "metrics.yaml", state / _CONFIG_FILE
    settings = properties(ports, limits, archives=folder, metrics_file=metrics, gpus=gpus, host=host)
    try:
        logs.mkdir()
        metrics.write_text(metrics_yaml(), encoding="utf-8")
        config.write_text(settings, encoding="ascii")
    except OSError as error:
        raise UserError(f"{state}: cannot be written ({error.strerror or error})") from None
    # Short and private: TorchServe 0.12 creates its workers' sockets here, from .ts.sock.9000 on. A socket's path has
    # at most 107 bytes. In the common temporary folder two servers would use the same paths.
    temporary = tempfile.mkdtemp(prefix="torchserve-")
    nonce = new_nonce()
    alive = _hold(state / ALIVE_FILE)
    try:
        with (logs / CONSOLE_LOG).open("wb") as console:
            popen = subprocess.Popen(
                command_line(
                    java,
                    launcher=launcher(java),
                    nonce=nonce,
                    limits=limits,
                    temporary=Path(temporary),
                    config=config,
                    logs=logs,
                    folder=folder,
                    archives={model.name: model.file for model in served},
                ),
                cwd=state,  # where it writes key_file.json
                env=environment(java, logs, limits),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes only to this process, which stops the server in order
                umask=0o077,
                pass_fds=(alive,),  # Java holds it until it ends, and closes it in its workers
            )
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"Java cannot be started ({error})") from None
    finally:
        os.close(alive)
    try:
        process = psutil.Process(popen.pid)
        identity = Identity.of(popen.pid, nonce)
        server = RunningServer(identity, tuple(served), default_model, temporary, ports, limits, left_out, host)
        write_state(store, server)
    except BaseException:
        popen.kill()  # else nobody would know of it
        popen.wait()
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # The server outlives this function, and perhaps this process. As long as this process lives, a thread must collect
    # its exit status. Otherwise it would remain as a zombie.
    threading.Thread(target=popen.wait, name="torchserve-ends", daemon=True).start()
    return server, process


def _hold(path: Path) -> int:
    """Take the server's lock. A process that only queries the lock holds it for a moment too."""
    for _ in range(50):
        try:
            return hold(path)
        except BlockingIOError:
            time.sleep(0.1)
    raise UserError(f"a server of this store is running: {path} is locked")


def _stop(store: Path, state: RunningServer) -> None:
    """End Java and its workers when the accepted requests are answered, then clean up."""
    process = state.identity.process()
    if process is None:
        life, why = life_of(state.identity, state_folder(store))
        if life != "gone":
            raise UserError(f"the server of this store cannot be stopped from here: {why}. Stop it there")
    else:
        # Listed first: when Java is gone, their parent is unknown.
        workers = process.children(recursive=True)
        process.terminate()
        end([process], patience_s=state.limits.drain_s + _SHUTDOWN_S, ask=False)
        end(workers, patience_s=5.0)  # they have no requests left
    _clean(store)


def _clean(store: Path) -> None:
    """Remove what an ended server left: its state, its archives, unpacked archives, and logs of the server before.

    Its keys stay, because clients have them.
    """
    folder = state_folder(store)
    shutil.rmtree(archives_folder(store), ignore_errors=True)
    state = read_state(store)
    if state is not None and Path(state.temporary).name.startswith("torchserve-"):
        shutil.rmtree(state.temporary, ignore_errors=True)
    remove_state(store)
    if (folder / "logs").is_dir():
        # The last server's logs stay for a reader, in another folder than the next one's.
        shutil.rmtree(folder / "logs.previous", ignore_errors=True)
        (folder / "logs").rename(folder / "logs.previous")


def _runs(server: RunningServer) -> str:
    return f"run{'s' if len(server.runs) > 1 else ''} {', '.join(server.runs)}"
