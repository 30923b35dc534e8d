"""Which process a server is, by what no clock step, later process, other user or PID namespace can change.

Java holds a lock (``flock``) on a file of the server's folder as long as it lives: the kernel answers for it to all.
Which process it is, its number says together with the namespace and the boot that the number is of, its start in clock
ticks since that boot, and a nonce in its command line.
"""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

ALIVE_FILE = "alive"

#: ``elsewhere``: it lives, and cannot be reached from here. ``unknown``: it may live where nobody here can see.
Life = Literal["here", "elsewhere", "gone", "unknown"]


@dataclass(frozen=True)
class Identity:
    """A process, wherever it is asked about.

    Attributes:
        pid: its number in ``namespace``.
        ticks: its start, in clock ticks since the boot.
        boot: the kernel's id of that boot.
        namespace: the PID namespace's inode.
        host: the machine's name.
        nonce: stands in its command line.
    """

    pid: int
    ticks: int
    boot: str
    namespace: str
    host: str
    nonce: str

    @classmethod
    def of(cls, pid: int, nonce: str) -> Identity:
        """The identity of a process of this machine and namespace.

        Raises:
            OSError: there is no such process.
        """
        return cls(pid, _ticks(pid), _boot(), _namespace(), platform.node(), nonce)

    def process(self) -> psutil.Process | None:
        """The process, if it is in this namespace and is still that one."""
        try:
            if self.boot != _boot() or self.namespace != _namespace() or self.ticks != _ticks(self.pid):
                return None
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE or not any(self.nonce in word for word in process.cmdline()):
                return None
            return process
        except (OSError, ValueError, psutil.Error):
            return None


def new_nonce() -> str:
    """What tells one server from every other."""
    return secrets.token_hex(16)


def life_of(identity: Identity, folder: Path) -> tuple[Life, str]:
    """Whether a server lives, and if that is not plainly so, why.

    Args:
        identity: what its state file says.
        folder: the server's, where its lock is.

    Returns:
        The verdict, and for ``elsewhere`` and ``unknown`` a clause that says where.
    """
    if identity.process() is not None:
        return "here", ""
    same_boot = identity.boot == _boot()
    try:
        held = is_held(folder / ALIVE_FILE)
    except OSError as error:
        return "unknown", f"its lock {folder / ALIVE_FILE} cannot be asked ({error.strerror})"
    if held and identity.namespace != _namespace():
        return "elsewhere", f"it is process {identity.pid} of another PID namespace (a container, or its host)"
    if held:
        return "elsewhere", f"process {identity.pid} cannot be looked into: it may be another user's"
    if not same_boot and identity.host != platform.node():
        return "unknown", f"it was started on another machine, {identity.host}"
    return "gone", ""


def hold(path: Path) -> int:
    """Lock a file for whoever has the descriptor that is returned, and inherits it.

    Raises:
        BlockingIOError: somebody else has it locked.
        OSError: it cannot be written or locked.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock(handle)
    except OSError:
        os.close(handle)
        raise
    return handle


def lock(handle: int) -> None:
    """Lock an open file, at once.

    Raises:
        BlockingIOError: somebody else has it locked.
    """
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Whether somebody has a file locked; one that does not exist nobody has."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def nameless(folder: Path, config: Path) -> int | None:
    """A living server of which no record tells.

    Args:
        folder: the server's, where its lock is.
        config: a file that its command line names.

    Returns:
        Its process' number, 0 if that is unknown, None if there is none.
    """
    if not folder.is_dir():
        return None
    for process in psutil.process_iter(["cmdline"]):
        if str(config) in (process.info["cmdline"] or ()):
            return int(process.pid)
    return 0 if is_held(folder / ALIVE_FILE) else None


def _ticks(pid: int) -> int:
    # The name, in parentheses, may hold anything: parentheses and spaces too.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[19])  # field 22 of proc_pid_stat(5): starttime


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it names no path
