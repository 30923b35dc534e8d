"""Programs that are forked from a process which has imported what they begin with: that is most of what they cost.

Such a program does what it does when a user starts it, but that it finds its imports done. What a test says of imports,
of what they print, or of threads that a library starts with them needs a process that begins cold.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]

#: The process that forks. Requests come by a socket, each with descriptors: of what the program prints, of its errors,
#: of the pipe that tells its id and how it ended, and of what else it is to have, under the numbers that it knows.
#: Programs ask so, too, by the other socket; see `_STARTING`. A program goes on behind the loop. Where it ends as
#: commands do, the destructors of its modules are left out, which take half a second.
_FORKING = """
import atexit, fcntl, gc, importlib, json, os, runpy, select, signal, socket, sys, threading, types

asked, programs = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
gc.disable()
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # or numpy (2) starts its pool when it is imported
for name in sys.argv[4:]:
    importlib.import_module(name)
gc.freeze()
gc.enable()
with os.scandir("/proc/self/task") as tasks:
    assert len(list(tasks)) == 1, "a thread that an import has started would be missing in a fork"
asked.send(b"ready")


def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


signal.signal(signal.SIGCHLD, reap)  # not ignored: what programs take counts for what this process takes
while True:
    ready, _, _ = select.select([asked, programs], [], [])
    by = asked if asked in ready else programs.accept()[0]
    message, descriptors, _, _ = socket.recv_fds(by, 1 << 20, 8)
    if by is not asked:
        by.close()
    elif not message:
        os._exit(0)
    if not message:
        continue
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if (program := os.fork()) == 0:
            break
        os.write(descriptors[2], b"%d\\n" % program)
        waiting = select.poll()
        waiting.register(os.pidfd_open(program), select.POLLIN)
        waiting.register(descriptors[2], 0)  # and its other end, which closes with whoever asked
        if descriptors[2] in dict(waiting.poll()):
            os.kill(program, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        try:
            os.write(descriptors[2], b"%d\\n" % ended)
        finally:
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)

asked.close()
programs.close()
words, environment, folder, numbers = json.loads(message)
above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 500) for descriptor in descriptors]
for descriptor in descriptors:
    os.close(descriptor)
os.close(above.pop(2))  # of the pipe, which this process's parent has
for descriptor, number in zip(above, [1, 2, *numbers]):
    os.dup2(descriptor, number)
    os.close(descriptor)
sys.executable = sys.argv[3]
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
if loaded := sys.modules.get("serve.runtime.card.execution"):  # which has kept that of the process which forks
    loaded.STARTED_WITH.clear()
    loaded.STARTED_WITH.update(environment)
sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
code = 0
try:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] != "-c":
        sys.argv = words
        sys.path[:1] = [os.path.dirname(words[0])]
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv = [words[0], *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
except SystemExit as error:
    if not isinstance(code := error.code or 0, int):
        raise
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


#: What such a program has in the place of Python: ``-P -m MODULE`` (its template of executions, the processes that
#: train with it) and ``-u -m MODULE`` (what torchrun starts) are forked as well, with all that they would inherit, and
#: so is a worker of TorchServe where that has it for its Python; anything else begins as usual.
_STARTING = """#!{python} -IS
import json, os, signal, socket, sys

if sys.argv[1:3] in (["-P", "-m"], ["-u", "-m"]):
    words = sys.argv[2:]
elif sys.argv[1:] and sys.argv[1].endswith("/ts/model_service_worker.py"):
    words = sys.argv[1:]
else:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
given = [int(name) for name in os.listdir("/proc/self/fd")]
given = sorted(number for number in given if os.path.exists(f"/proc/self/fd/{{number}}"))
reading, writing = os.pipe()
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
    asking.connect({address!r})
    request = json.dumps([words, dict(os.environ), os.getcwd(), [n for n in given if n not in (1, 2)]])
    descriptors = [1, 2, writing, *(n for n in given if n not in (1, 2))]
    socket.send_fds(asking, [request.encode()], descriptors)
for number in (*given, writing):
    os.close(number)
with open(reading) as told:
    told.readline()
    ended = int(told.readline())
if ended < 0:
    os.kill(os.getpid(), -ended)
os._exit(ended)
"""


@dataclass(frozen=True)
class Program:
    """A program that runs. Its standard error can be read while it does, as that of a `subprocess.Popen`."""

    pid: int
    stderr: IO[str]
    _stdout: IO[str]
    _ended: IO[str]

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait until it has ended: its exit code or minus its signal, what it printed, and the errors not yet read."""
        with self.stderr, self._stdout, self._ended:
            errors, code = self.stderr.read(), int(self._ended.readline())
            self._stdout.seek(0)
            return subprocess.CompletedProcess([], code, self._stdout.read(), errors)


class Programs:
    """Starts programs, by what stands behind the interpreter's name: ``-m MODULE …``, ``-c CODE …`` or ``FILE …``."""

    def __init__(self, asking: socket.socket, executable: Path) -> None:
        self._asking = asking
        #: What starts ``-P -m MODULE`` so, too, and workers of TorchServe, in the place of Python.
        self.executable = executable

    def start(self, *words: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Program:
        """Start one; by default it has this process's environment."""
        given = dict(os.environ if environment is None else environment)
        request = json.dumps([[str(word) for word in words], given, str(cwd), []]).encode()
        printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `Program.end`
        (errors, err), (ended, end) = os.pipe(), os.pipe()
        socket.send_fds(self._asking, [request], [printed.fileno(), err, end])
        os.close(err)
        os.close(end)
        told = os.fdopen(ended)
        return Program(int(told.readline()), os.fdopen(errors), printed, told)

    def run(
        self, *words: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What one has printed, and how it ended."""
        return self.start(*words, cwd=cwd, environment=environment).end()


@contextmanager
def begun(*modules: str, environment: Mapping[str, str] | None = None, isolated: bool = False) -> Iterator[Programs]:
    """The process that has imported these modules, and none of their threads.

    Args:
        modules: what it imports, in this order.
        environment: the variables that what it imports reads then; by default this process's.
        isolated: this project is not on its path, nor is the folder that it is started in.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(asking)
        with asked, listening:
            listening.bind(address := str(folder / "socket"))
            listening.listen()
            executable = folder / "python"
            executable.write_text(_STARTING.format(python=sys.executable, address=address), encoding="utf-8")
            executable.chmod(0o700)
            given = (asked.fileno(), listening.fileno())
            words = [sys.executable, *(["-I"] if isolated else []), "-c", _FORKING, *map(str, given), str(executable)]
            process = subprocess.Popen([*words, *modules], cwd=ROOT, env=environment, pass_fds=given)
        stack.callback(process.wait, 60)
        stack.callback(asking.shutdown, socket.SHUT_RDWR)
        assert asking.recv(16) == b"ready", "the process that forks has ended"
        yield Programs(asking, executable)
