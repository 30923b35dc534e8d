"""Starts, finds and stops one TorchServe per store, on loopback, from the store's own private folder.

Java is started directly: the ``torchserve`` command keeps its pid in one file of the machine's temporary
folder, so that a second server anywhere refuses to start and ``--stop`` stops somebody else's.
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

# Measured on 2 cores: a worker imports torch, loads and warms up in about 6 s of CPU time, and all
# start at once. The deadline is for a cold disk, not for a usual start.
_DEADLINE_S = 120.0
_DEADLINE_PER_MODEL_S = 30.0

# What TorchServe itself takes to end, when all is answered.
_ENDING_S = 20.0


def running(store: Path, *, holding: bool = False) -> RunningServer | None:
    """The server of this store, or None; what a crash or a reboot has left behind does not count.

    Args:
        store: whose server it is.
        holding: the caller holds the store's lock. For others a server that is just being started is none yet.

    Raises:
        UserError: there may be one, and nobody can tell from here.
    """
    folder = state_folder(store)
    state = read_state(store)
    if state is None:
        if not holding and is_held(folder / LOCK_FILE):
            return None
        if (pid := nameless(folder, folder / _CONFIG_FILE)) is not None:
            raise UserError(
                f"a server of this store is alive (process {pid or 'unknown'}), and {state_file(store)} does not "
                f"tell of it: end that process first"
            )
        return None
    life, why = life_of(state.identity, folder)
    if life == "unknown":
        raise UserError(
            f"whether the server of this store is running cannot be told: {why}; nothing was changed. If it has "
            f"ended, remove {state_file(store)}"
        )
    return None if life == "gone" else state


def the_running(store: Path) -> RunningServer:
    """The server of this store.

    Raises:
        UserError: there may be one, and nobody can tell from here.
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
        store: the store whose server it is; it has one at a time.
        archives: the ``.mar`` files, as they lie in their runs' folders, by the names of the models.
        ports: where to listen; None takes the defaults.
        host: the address of predictions over HTTP; what is not loopback lets others in.
        limits: what it may hold; None takes the defaults.
        default_model: which model `predict` takes when none is named; None takes the first.
        gpus: most GPUs to use; 0 serves on the CPU, None takes what TorchServe finds.
        pack: packs a model otherwise than its archive; what it packs goes when the server stops.
        policy: what may be loaded; None: what is whole, and has no other code than this installation's. What is loaded
            is a private copy of the server's, which was checked after it was made.
        strict: a model that does not come up ends the start; otherwise it is left out, unless there is no other.
        left_out: what was left out before, with the reasons, for the record.
        deadline_s: seconds to wait; None takes two minutes and half a minute for each model.
        on_ready: called with each model's name when it answers.
        on_left_out: called with the name of a model that does not come up, and why.
        progressed: called again and again while it starts.

    Raises:
        UserError: it runs already, or may; a port is in use, an archive is missing, Java is missing.
        CardError: an archive is not whole, or has no known answer where the policy asks for one.
        SignatureError: the policy does not allow one.
        StartError: the server or the last worker died; it is stopped again, and the message has their last lines.
    """
    ports = ports or Ports()
    for name, path in archives.items():
        if not path.is_file():
            packing = command(f"serve package {ServedModel.of(name, path).run}", store)
            raise UserError(f"{path}: there is no such archive; make it with `{packing}`")
    if not archives:
        raise UserError("there is nothing to serve")
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
            # Whatever ended the wait, Ctrl-C as well: half a server is worse than none.
            if (half := read_state(store)) is not None:
                _stop(store, half)
            else:
                _clean(store)
            raise
        return server


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
    """Write the configuration, start Java, and record it before anything else can go wrong."""
    state, folder = state_folder(store), archives_folder(store)
    logs, metrics, config = state / "logs", state / "metrics.yaml", state / _CONFIG_FILE
    settings = properties(ports, limits, archives=folder, metrics_file=metrics, gpus=gpus, host=host)
    try:
        logs.mkdir()
        metrics.write_text(metrics_yaml(), encoding="utf-8")
        config.write_text(settings, encoding="ascii")
    except OSError as error:
        raise UserError(f"{state}: cannot be written ({error.strerror or error})") from None
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
        server = RunningServer(identity, tuple(served), default_model, temporary, ports, limits, left_out, host)
        write_state(store, server)
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
        end([process], patience_s=state.limits.drain_s + _ENDING_S, ask=False)
        end(workers, patience_s=5.0)  # they have nothing left to answer
    _clean(store)


def _clean(store: Path) -> None:
    """Remove what a server that is gone has left: state, logs of before, archives of its own, unpacked ones.

    Its keys stay: clients have them.
    """
    folder = state_folder(store)
    shutil.rmtree(archives_folder(store), ignore_errors=True)
    state = read_state(store)
    if state is not None and Path(state.temporary).name.startswith("torchserve-"):
        shutil.rmtree(state.temporary, ignore_errors=True)
    remove_state(store)
    if (folder / "logs").is_dir():
        # The last server's logs stay for a reader, out of the way of the next one's.
        shutil.rmtree(folder / "logs.previous", ignore_errors=True)
        (folder / "logs").rename(folder / "logs.previous")


def _runs(server: RunningServer) -> str:
    return f"run{'s' if len(server.runs) > 1 else ''} {', '.join(server.runs)}"
