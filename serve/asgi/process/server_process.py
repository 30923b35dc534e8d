"""The server as a foreground process: it listens, loads models, handles signals, drains and ends.

One process serves all models. Each model has a thread that owns its engine, and the engine uses all cores. A second
process for the same model holds the model twice, halves its batches and takes a share of the cores. This pays if
Python's lock is the bottleneck, as on a GPU; see `process_group`. To use more machines or GPUs, run a server on each
behind a load balancer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

from serve.asgi.http.application import Application
from serve.asgi.http.http_server import HttpServer, Loop, raise_file_limit, share_python_lock, uvicorn_config
from serve.asgi.http.listen_sockets import SocketFile
from serve.asgi.http.served_models import Models, Served
from serve.asgi.http.server_settings import Settings
from serve.asgi.http.tokens import Tokens
from serve.asgi.process import watchdog
from serve.asgi.process.extensions import extend
from serve.asgi.process.group_member import SIGNALS, Alive, Change, Changed, Failed, Member, Ready
from serve.asgi.process.metrics_exchange import MetricsExchange
from serve.asgi.process.model_updates import ModelUpdates
from serve.asgi.process.serving_plan import Wanted
from serve.asgi.process.systemd_notify import notify
from serve.asgi.process.watchdog import Watchdog
from serve.asgi.protocols import predictions
from serve.runtime.card.execution import compute_alone
from serve.runtime.errors import EngineError, PipelineError, UserError, message_of, one_line
from serve.runtime.service.logs import RequestLog

_LOG = logging.getLogger(__name__)
# Inference in the event loop takes some milliseconds. In a group, a process that is silent for 30 s is killed.
_LONGEST_INLINE_S = 8.0


def build(settings: Settings, models: Models, siblings: MetricsExchange | None = None) -> Application:
    """Return the application with all its routes and observers.

    Args:
        settings: how it serves.
        models: the models that answer requests.
        siblings: the other processes of the same server. None: there are none.

    Raises:
        UserError: the token file cannot be used.
    """
    tokens = Tokens(settings.token_file) if settings.token_file is not None else None
    application = Application(models, limits=settings.limits, tokens=tokens)
    predictions.add_routes(application)
    application.observers.append(RequestLog(settings.slow_s, every=settings.log_requests))
    extend(application, settings, siblings)
    return application


def run(
    settings: Settings,
    wanted: Callable[[], Sequence[Wanted]],
    say: Callable[[str], None],
    member: Member | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. A second signal ends the process at once. SIGHUP reads the wanted models again.

    Args:
        settings: how it serves.
        wanted: returns the models to serve. It is called again at each SIGHUP, in a thread.
        say: receives each line for a person. It must not raise.
        member: the place in a group of processes. None: it serves alone.

    Returns:
        The exit status: 0 if every accepted request was answered.

    Raises:
        UserError: the address or the token file cannot be used.
        PipelineError: a model cannot be served.
    """
    first = wanted()
    compute_alone()  # for inference in the event loop
    settings = replace(settings, limits=raise_file_limit(settings.limits, ports=1 if settings.grpc_port is None else 2))
    file = None
    if member is None:
        opened: socket.socket | None = settings.listening.open()
        file = settings.listening.socket_file()
    else:
        opened = member.opened
    with share_python_lock(), ExitStack() as stack, asyncio.Runner(loop_factory=Loop) as runner:
        if opened is not None:
            stack.enter_context(opened)
        process = _Process(settings, wanted, say, member)
        try:
            return runner.run(process.serve(opened, file, first))
        finally:
            process.over.set()
            if file is not None and not process.stopped:
                file.remove()


class _Process:
    def __init__(
        self,
        settings: Settings,
        wanted: Callable[[], Sequence[Wanted]],
        say: Callable[[str], None],
        member: Member | None = None,
    ) -> None:
        self._settings = settings
        self._wanted = wanted
        self._say = say
        self._member = member
        self._opened: socket.socket | None = None
        self._serving: asyncio.Future[None] | None = None
        self._ending = asyncio.Event()
        self._begun = asyncio.Event()  # the first wanted models are served, or failed to load
        self._failure: PipelineError | None = None
        self._hangs = False
        self.over = threading.Event()
        self.stopped = False  # whether it has stopped listening
        self._tasks: set[asyncio.Task[None]] = set()
        self._reload_lock = asyncio.Lock()

    async def serve(self, opened: socket.socket | None, file: SocketFile | None, first: Sequence[Wanted]) -> int:
        """Serve on a socket. Without one, load the models first and then join the other processes of the group."""
        self._opened = opened
        self._prepare(first)
        self._handle_signals()
        if self._opened is not None:
            await self._listen(self._opened)
            self._announce(self._opened, first)
        loading: asyncio.Future[None] = asyncio.ensure_future(self._load(first))
        watching = asyncio.ensure_future(self._watch())
        threading.Thread(target=self._watch_loop, name="watch", daemon=True).start()
        ending: asyncio.Future[Any] = asyncio.ensure_future(self._ending.wait())
        over = {loading, ending} if self._serving is None else {loading, ending, self._serving}
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and self._opened is None:
            await self._join()
        if loading.done() and not self._ending.is_set():
            self._is_ready()
        self._begun.set()
        if self._serving is not None:
            await asyncio.wait({ending, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        await self._stop_listening(file)
        watching.cancel()
        ending.cancel()
        # A thread that opens a model cannot be stopped. Its model is closed once it is open.
        await asyncio.wait({loading, *self._tasks}, timeout=self._application.ends_in)
        await asyncio.gather(watching, ending, return_exceptions=True)
        for stop in reversed(self._application.on_stop):
            await stop()
        if not loading.done() or self._tasks:
            _LOG.warning("stopped while a model was loading")
            self._exit(0 if self._failure is None else 1)
        if not await self._updates.end(self._application.ends_in):
            _LOG.error("not all accepted requests were answered in time")
            self._exit(1)
        if self._updates.left_open:
            self._exit(0 if self._failure is None else 1)
        if self._failure is not None:
            raise self._failure
        return 0

    def _prepare(self, first: Sequence[Wanted]) -> None:
        settings = self._settings
        self._models = Models([entry.name for entry in first])
        siblings = None if self._member is None else self._member.siblings()
        self._application = build(settings, self._models, siblings)
        self._updates = ModelUpdates(
            self._models,
            gpu=settings.gpu,
            queue=settings.limits.queue,
            policy=settings.policy,
            drain_s=settings.drain_s,
            on_loaded=self._loaded,
            on_left_out=lambda entry, error: self._say(f"left out: {entry.name} {entry.version}: {error}"),
        )
        self._server = HttpServer(uvicorn_config(self._application, settings))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._change, None)
        if (member := self._member) is not None:
            loop.add_reader(member.parent.fileno(), self._handle_parent, member)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    async def _listen(self, opened: socket.socket) -> None:
        for start in self._application.on_start:
            await start()
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[opened]))

    async def _join(self) -> None:
        """Listen beside the other processes of the group."""
        if self._member is None or self._ending.is_set():
            return
        try:
            self._opened = self._settings.listening.join(self._member.port)
            await self._listen(self._opened)
        except PipelineError as error:
            self._fail(error)

    def _announce(self, opened: socket.socket, first: Sequence[Wanted]) -> None:
        listening = self._settings.listening
        names = ", ".join(f"{entry.name} {entry.version}" for entry in first)
        self._say(f"serving {names} at {listening.url(opened)}: loading")
        for line in (*self._application.notes, *listening.opens(tokens=self._settings.token_file is not None)):
            self._say(line)

    async def _stop_listening(self, file: SocketFile | None) -> None:
        """Wait until load balancers see that the server is not ready. Then stop listening and drain."""
        self._application.draining = True
        notify("STOPPING=1")
        if self._failure is None:
            await asyncio.sleep(self._settings.drain_delay_s)
        self._application.ends = time.monotonic() + self._settings.drain_s
        if self._server.started and self._opened is not None:
            self.stopped = True
            await self._server.stop(self._opened, file)
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        if self._hangs:
            self._exit(1)

    def _exit(self, status: int) -> NoReturn:
        """End although a thread still runs. A normal exit would wait for it, or a library abort."""
        if self._failure is not None and self._member is not None:
            self._member.tell(Failed(str(self._failure), isinstance(self._failure, UserError)))
        elif self._failure is not None:
            _LOG.error("%s", self._failure)
        logging.shutdown()
        os._exit(status)

    async def _load(self, first: Sequence[Wanted]) -> None:
        try:
            await self._updates.change(first, leave_out=self._settings.leave_out)
        except PipelineError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a library may fail in any way
            self._fail(EngineError(one_line(error)))

    def _is_ready(self) -> None:
        if self._member is not None:
            self._member.tell(Ready())
        elif self._opened is not None:
            self._say(f"ready: {self._settings.listening.url(self._opened)}")
        notify("READY=1")

    def _loaded(self, served: Served, seconds: float) -> None:
        info = served.predictor.describe()
        self._say(
            f"loaded {served.name} {served.version}: {info['precision']} with {info['execution']} "
            f"({info['provider']}) in {seconds:.1f} s; {served.checked[-1]}"
        )
        if served.unchecked:
            fields = {"model": served.name, "version": served.version, "why": served.unchecked}
            _LOG.warning("ready, but the known answer was not checked", extra={"fields": fields})
        for entry in served.predictor.passed_over:
            self._say(f"  passed over {entry.execution}: {entry.reason}")

    def _change(self, request: Change | None) -> None:
        task = asyncio.ensure_future(self._reload(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self, request: Change | None = None) -> None:
        await self._begun.wait()  # otherwise systemd would be told READY too early
        if self._ending.is_set():
            return
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        try:
            async with self._reload_lock:  # the last change must use what was read last
                tls = self._settings.listening.tls
                secrets = None if tls is None else await asyncio.to_thread(tls.read)
                wanted = await asyncio.to_thread(self._wanted)
                await self._updates.change(wanted, leave_out=self._settings.leave_out)
                if tls is not None and secrets is not None:
                    tls.newest = secrets
        except Exception as error:  # noqa: BLE001 - the served models stay, whatever the error
            message = message_of(error)
            _LOG.error("nothing was changed: %s", message)
        else:
            shares = ", ".join(f"{served.name} {served.version} (weight {served.weight})" for served in self._models)
            _LOG.info("changed: serving %s", shares)
        notify("READY=1")
        if self._member is not None and request is not None:
            self._member.tell(Changed(request.number))

    async def _watch(self) -> None:
        """End the process if a device is lost or an engine hangs. A new process may work again."""
        looks = Watchdog()
        while True:
            await asyncio.sleep(watchdog.LOOK_S)
            jobs = [(served, job) for served in self._models if (job := served.service.holding) is not None]
            found = next(((served, why) for served in self._models if (why := served.service.broken) is not None), None)
            if found is None and (found := looks.look(jobs)) is not None:
                self._hangs = True
            if found is not None:
                found[0].lost = True
                self._fail(_engine_error(*found))
                return

    def _watch_loop(self) -> None:
        """Do the same from outside the event loop, which handles no signal while it computes."""
        looks = Watchdog(_LONGEST_INLINE_S)
        while not self.over.wait(watchdog.LOOK_S):
            job = self._application.inline.job
            if (found := looks.look([] if job is None else [job])) is not None:
                self._failure = _engine_error(*found)
                self._exit(1)

    def _fail(self, error: PipelineError) -> None:
        self._failure = error
        self._ending.set()

    def _end(self, number: int) -> None:
        if self._member is not None:
            # Any number of signals: systemd signals all processes of a service, and so does the parent.
            self._ending.set()
        elif self._ending.is_set():
            os._exit(128 + number)
        else:
            self._ending.set()
            self._say(f"{signal.Signals(number).name}: finishing accepted requests; send it again to stop at once")

    def _handle_parent(self, member: Member) -> None:
        """Handle a message of the parent process. End if the parent has ended."""
        with contextlib.suppress(EOFError, OSError):
            received = member.parent.recv()
            if isinstance(received, Change):
                self._change(received)
            else:
                member.tell(Alive())
            return
        asyncio.get_running_loop().remove_reader(member.parent.fileno())
        _LOG.error("the main process of the server is gone: stopping this one")
        self._ending.set()


def _engine_error(served: Served, reason: str) -> EngineError:
    return EngineError(f"{served.name}: {reason}: the server ends, to be restarted")
