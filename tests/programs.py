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
#: and of the pipe that tells its id and how it ended. A program goes on behind the loop. Where it ends as commands do,
#: the destructors of its modules are left out, which take half a second.
_FORKING = """
import atexit, gc, importlib, json, os, runpy, signal, socket, sys, threading, types

asked = socket.socket(fileno=int(sys.argv[1]))
gc.disable()
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # or numpy (2) starts its pool when it is imported
for name in sys.argv[2:]:
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
    message, descriptors, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    if not message:
        os._exit(0)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if (program := os.fork()) == 0:
            break
        os.write(descriptors[2], b"%d\\n" % program)
        ended = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        os.write(descriptors[2], b"%d\\n" % ended)
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)

asked.close()
os.dup2(descriptors[0], 1)
os.dup2(descriptors[1], 2)
for descriptor in descriptors:
    os.close(descriptor)
words, environment, folder = json.loads(message)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
code = 0
try:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
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
    """Starts programs, each with ``-m MODULE …`` or ``-c CODE …``: what stands behind the interpreter's name."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking

    def start(self, *words: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Program:
        """Start one; by default it has this process's environment."""
        given = dict(os.environ if environment is None else environment)
        request = json.dumps([[str(word) for word in words], given, str(cwd)]).encode()
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
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(asking)
        with asked:
            words = [sys.executable, *(["-I"] if isolated else []), "-c", _FORKING, str(asked.fileno()), *modules]
            process = subprocess.Popen(words, cwd=ROOT, env=environment, pass_fds=[asked.fileno()])
        stack.callback(process.wait, 60)
        stack.callback(asking.shutdown, socket.SHUT_RDWR)
        assert asking.recv(16) == b"ready", "the process that forks has ended"
        yield Programs(asking)
