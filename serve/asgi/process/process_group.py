"""Several processes that serve the same models at one port, and the parent that starts, watches and ends them.

Each has its own engine and a share of the cores, and the kernel distributes connections. This pays if Python's lock is
the bottleneck, not the device. On an H200 one process answered some 1,900 JPEGs a second, three processes twice that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from serve.archive.archive_file import serving_in
from serve.asgi.http.call import Limits
from serve.asgi.http.listen_sockets import Listening, shared
from serve.asgi.http.server_settings import Settings
from serve.asgi.process.group_member import (
    SIGNALS,
    Alive,
    Change,
    Changed,
    Failed,
    Member,
    Message,
    Notice,
    Ready,
)
from serve.asgi.process.serving_plan import Wanted
from serve.asgi.process.systemd_notify import notify
from serve.common.scratch import scratch
from serve.runtime.device.cores import cores, quota
from serve.runtime.errors import EngineError, PipelineError, UserError, one_line
from serve.runtime.service.logs import log_to_stderr

_LOG = logging.getLogger(__name__)
# Pause before a process is started again. It doubles each time, until the process is ready.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# A process whose event loop hangs keeps its share of the connections. The limit counts unanswered questions, not
# seconds: a suspended machine or group is then no fault of one process.
_ASK_AGAIN_S, _MOST_UNANSWERED = 1.0, 30


def run_group(
    count: int, settings: Settings, wanted: Callable[[], Sequence[Wanted]], say: Callable[[str], None]
) -> int:
    """Serve with several processes until a signal ends them. See `server_process.run`; all processes get its signals.

    The limits for clients apply to all processes together, except the queue of a model: each process has its own. A
    process that ends unexpectedly is restarted if others serve. Otherwise the server ends.

    Args:
        count: number of processes, at least 2.
        settings: how they serve.
        wanted: returns the models to serve. It is sent to the processes and called there.
        say: receives each line for a person. It must not raise.

    Returns:
        The exit status: 0 if every accepted request was answered.

    Raises:
        UserError: there are fewer cores than processes, or too little of a limit for each, or see `server_process.run`.
        PipelineError: a model cannot be served.
    """
    if count > cores():
        raise UserError(f"--processes must be at most the number of cores, {cores()}{_quota_remark()}, got {count}")
    if settings.listening.path is not None:
        raise UserError("--processes needs a port: connections to a --socket cannot be shared out evenly")
    wanted()  # reports a mistake once
    settings = replace(settings, limits=_share(settings.limits, count))
    with scratch("serve-group-") as folder, settings.listening.open() as opened, asyncio.Runner() as runner:
        shared(opened)
        if settings.grpc_port is not None:  # HTTP's port is taken by now, so that this is another one
            settings = replace(settings, grpc_port=_free_port(settings.listening, settings.grpc_port))
        return runner.run(_Group(settings, wanted, say, _divided_cores(count), folder).serve(opened))


def process_count(
    wanted: Sequence[Wanted], listening: Listening, limits: Mapping[str, int], say: Callable[[str], None]
) -> int:
    """Return the default number of processes: the most ``workers`` in an archive's ``serving.json``, if there is room.

    Args:
        wanted: the models to serve.
        listening: the address.
        limits: how many processes there is room for, by the reason.
        say: receives a line for a person if fewer processes are used.

    Raises:
        UserError: an archive is missing.
        CardError: an archive is damaged.
    """
    workers, name = max((serving_in(entry.archive).workers, entry.name) for entry in wanted)
    room = {f"this machine has {cores()} cores{_quota_remark()}": cores(), **limits}
    if listening.path is not None:
        room["a --socket allows one process"] = 1
    why = min(room, key=lambda reason: room[reason])
    count = max(1, min(workers, room[why]))
    if count < workers:
        say(f"{name}: its serving.json asks for {workers} workers, but {why}: starting {count}")
    return count


def _quota_remark() -> str:
    """Return the reason for fewer cores than the machine has, for a message. Empty: there is none."""
    return "" if quota() is None else f" (a quota of {quota():g})"


def _divided_cores(count: int) -> list[list[int]]:
    """Return the cores of each process.

    Under a quota the processes together get as many cores as the quota allows. Libraries start as many threads as their
    process has cores.
    """
    paid = sorted(os.sched_getaffinity(0))[: cores()]
    return [paid[number * len(paid) // count : (number + 1) * len(paid) // count] for number in range(count)]


def _share(limits: Limits, count: int) -> Limits:
    """Return the limits of one process, so that all together keep to the limits.

    Raises:
        UserError: a process would accept no connection, or no body of the allowed size.
    """
    if limits.connections < count:
        raise UserError(f"--connections must be at least the number of --processes, {count}, got {limits.connections}")
    if limits.held_bytes < count * limits.body_bytes:
        body = limits.body_bytes >> 20
        raise UserError(
            f"--held-limit-mb must be at least {count * body}, a body of --body-limit-mb {body} for each of {count} "
            f"processes, got {limits.held_bytes >> 20}"
        )
    return replace(limits, held_bytes=limits.held_bytes // count, connections=limits.connections // count)


def _free_port(listening: Listening, port: int) -> int:
    """Return a free port for gRPC. The processes share it, so a port that another server shares must be refused.

    Raises:
        UserError: somebody listens at the port.
    """
    try:
        with replace(listening, port=port).open() as probe:
            free: int = probe.getsockname()[1]
            return free
    except UserError as error:
        raise UserError(f"gRPC: {str(error).removesuffix('--port')}--grpc-port") from None


@dataclass
class _Started:
    """A started process."""

    process: SpawnProcess
    pipe: Connection
    ready: bool = False
    failed: Failed | None = None
    killed: str = ""  # why the parent killed it
    change: int = 0  # number of the newest change that is not reported as finished; 0: none
    waits_for_answer: bool = False  # whether it has not answered the last question yet
    unanswered: int = 0  # how many questions were due since then


class _Group:
    def __init__(
        self,
        settings: Settings,
        wanted: Callable[[], Sequence[Wanted]],
        say: Callable[[str], None],
        shares: Sequence[Sequence[int]],
        folder: Path,
    ) -> None:
        self._settings, self._wanted, self._say = settings, wanted, say
        self._shares, self._folder = shares, folder
        self._members: dict[int, _Started] = {}
        self._pauses = [_FIRST_PAUSE_S] * len(shares)
        self._ending = False
        self._over = asyncio.Event()
        self._was_ready = False
        self._reloading = False
        self._changes = 0
        self._failure: PipelineError | None = None
        self._status = 0

    async def serve(self, opened: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, self._end, one)
        loop.add_signal_handler(signal.SIGHUP, self._change)
        self._port = opened.getsockname()[1]
        self._url = self._settings.listening.url(opened)
        for number in range(len(self._shares)):
            self._start(number, opened if number == 0 else None)
        opened.close()  # the first process owns it now: its connections must not wait here
        watching = asyncio.ensure_future(self._watch())
        await self._over.wait()
        watching.cancel()
        if self._failure is not None:
            raise self._failure
        return self._status

    # Methods for one process.

    def _start(self, number: int, opened: socket.socket | None = None) -> None:
        if self._ending:
            return
        try:
            self._members[number] = started = self._started(number, opened)
        except OSError as error:  # too many files or processes, or no memory
            self._replace(number, f"cannot be started ({error.strerror or error})")
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(started.pipe.fileno(), self._read_messages, number, started)
        loop.add_reader(started.process.sentinel, self._handle_exit, number, started)

    def _started(self, number: int, opened: socket.socket | None) -> _Started:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        member = Member(number, len(self._shares), self._port, opened, theirs, self._folder)
        process = context.Process(
            target=_serve, args=(self._settings, self._wanted, member), name=f"serve-{number}", daemon=False
        )
        try:
            with theirs, _use_cores(self._shares[number]), _block_signals():
                process.start()
        except OSError:
            ours.close()
            raise
        return _Started(process, ours)

    def _read_messages(self, number: int, started: _Started) -> None:
        while True:
            try:
                if not started.pipe.poll():
                    return
                message: Message = started.pipe.recv()
            except (EOFError, OSError):  # the process ends
                asyncio.get_running_loop().remove_reader(started.pipe.fileno())
                return
            if isinstance(message, Alive):
                started.waits_for_answer, started.unanswered = False, 0
            elif isinstance(message, Notice):
                self._say(f"process {number}: {message.line}")
            elif isinstance(message, Failed):
                started.failed = message
            elif isinstance(message, Ready):
                started.ready = True
                self._pauses[number] = _FIRST_PAUSE_S
                self._is_ready(number)
            elif isinstance(message, Changed):
                if started.change == message.number:
                    started.change = 0
                self._finish_reload()

    async def _watch(self) -> None:
        """Kill a process that does not answer, for whatever reason. Another one takes its place.

        A process may be silent until it is ready and during a change of models: a library that opens a model may keep
        Python's lock. During shutdown this exception does not hold.
        """
        while True:
            await asyncio.sleep(_ASK_AGAIN_S)
            for number, started in self._members.items():
                opens = not started.ready or started.change
                if not started.waits_for_answer:
                    started.waits_for_answer = True
                    with contextlib.suppress(OSError):  # the process ends
                        started.pipe.send(None)
                elif self._ending or not opens:
                    started.unanswered += 1
                    if started.unanswered == _MOST_UNANSWERED:
                        self._kill(number, started)

    def _kill(self, number: int, started: _Started) -> None:
        started.killed = f"did not answer for {_MOST_UNANSWERED * _ASK_AGAIN_S:g} s; it was killed"
        if self._ending:  # otherwise the restart is logged
            _LOG.error("process %d: %s", number, started.killed)
        started.process.kill()

    def _is_ready(self, number: int) -> None:
        if self._ending:
            return
        if self._was_ready:
            self._say(f"process {number}: ready again")
        elif len(self._members) == len(self._shares) and all(one.ready for one in self._members.values()):
            self._was_ready = True
            self._say(f"ready: {self._url} ({len(self._shares)} processes)")
            notify("READY=1")

    def _handle_exit(self, number: int, started: _Started) -> None:
        self._read_messages(number, started)
        loop = asyncio.get_running_loop()
        loop.remove_reader(started.process.sentinel)
        loop.remove_reader(started.pipe.fileno())
        started.pipe.close()
        started.process.join()
        status = started.process.exitcode or 0
        started.process.close()
        del self._members[number]
        self._finish_reload()
        if not self._ending:
            self._replace(number, started.killed or _exit_reason(status), started.failed)
        else:
            if status and not self._status:
                self._status = status if status > 0 else 128 - status
            if not self._members:
                self._over.set()

    def _replace(self, number: int, why: str, failed: Failed | None = None) -> None:
        """Start a replacement if other processes serve meanwhile. Otherwise end."""
        if self._was_ready and any(other.ready for other in self._members.values()):
            pause = self._pauses[number]
            self._pauses[number] = min(2 * pause, _LONGEST_PAUSE_S)
            _LOG.error("process %d: %s; starting another in %g s", number, failed.message if failed else why, pause)
            asyncio.get_running_loop().call_later(pause, self._start, number)
        elif failed is None:
            self._stop(EngineError(f"a process {why}"))
        else:
            self._stop(UserError(failed.message) if failed.users else EngineError(failed.message))

    # Methods for all processes.

    def _change(self) -> None:
        """Make all processes read the wanted models again."""
        if self._ending:
            return
        if self._was_ready:  # before that, READY=1 must not follow a change
            notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
            self._reloading = True
        self._changes += 1
        for started in self._members.values():
            with contextlib.suppress(OSError):  # the process ends
                started.pipe.send(Change(self._changes))
                started.change = self._changes

    def _finish_reload(self) -> None:
        """Notify systemd once all processes have finished the change."""
        if self._reloading and not self._ending and not any(started.change for started in self._members.values()):
            self._reloading = False
            notify("READY=1")

    def _end(self, number: int) -> None:
        """Handle a signal to end. The second one kills all processes, stopped and hanging ones too."""
        if self._ending:
            self._status = 128 + number
            self._signal(signal.SIGKILL)
        else:
            self._say(f"{signal.Signals(number).name}: finishing accepted requests; send it again to stop at once")
            self._stop()

    def _stop(self, failure: PipelineError | None = None) -> None:
        self._ending, self._failure = True, failure
        notify("STOPPING=1")
        self._signal(signal.SIGTERM)
        if not self._members:
            self._over.set()

    def _signal(self, number: int) -> None:
        for started in self._members.values():
            with contextlib.suppress(ProcessLookupError):
                if started.process.is_alive() and started.process.pid is not None:
                    os.kill(started.process.pid, number)


@contextlib.contextmanager
def _use_cores(share: Sequence[int]) -> Iterator[None]:
    """Let child processes of the block use only these cores. Libraries then start that many threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, share)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Block the signals of a child process that starts in the block, until it can handle them.

    Ctrl-C goes to all foreground processes of a terminal, and systemd signals all processes of a service.
    """
    resource_tracker.ensure_running()  # CPython 3.11 unblocks signals when it starts the tracker
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_reason(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _serve(settings: Settings, wanted: Callable[[], Sequence[Wanted]], member: Member) -> None:
    """Run one process of the group. The imports are here because the parent needs none of the runtime."""
    from serve.asgi.process.server_process import run

    os.setpgid(0, 0)  # Ctrl-C goes only to the parent, which signals the group
    os.environ.pop("NOTIFY_SOCKET", None)
    log_to_stderr()
    try:
        status = run(settings, wanted, lambda line: member.tell(Notice(line)), member)
    except PipelineError as error:
        member.tell(Failed(str(error), isinstance(error, UserError)))
        status = error.exit_code
    except OSError as error:
        member.tell(Failed(one_line(error), users=False))
        status = 1
    sys.exit(status)
