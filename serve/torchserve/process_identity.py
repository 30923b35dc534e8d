"""The identity of a server process, safe against clock changes, later processes, other users and PID namespaces.

Java holds a lock (``flock``) on a file in the server's folder as long as it lives, and every process can query the
lock. The process is identified by its PID with the PID's namespace and boot, its start in clock ticks since that boot,
and a nonce in its command line.
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

#: ``elsewhere``: it lives, but cannot be reached from here. ``unknown``: it may live on a machine that is not visible
#: here.
Life = Literal["here", "elsewhere", "gone", "unknown"]


@dataclass(frozen=True)
class Identity:
    """A process, identified from anywhere.

    Attributes:
        pid: its PID in ``namespace``.
        ticks: its start, in clock ticks since the boot.
        boot: the kernel's ID of that boot.
        namespace: the PID namespace's inode.
        host: the machine's name.
        nonce: a word in its command line.
    """

    pid: int
    ticks: int
    boot: str
    namespace: str
    host: str
    nonce: str

    @classmethod
    def of(cls, pid: int, nonce: str) -> Identity:
        """Return the identity of a process of this machine and namespace.

        Raises:
            OSError: there is no such process.
        """
        return cls(pid, _ticks(pid), _boot(), _namespace(), platform.node(), nonce)

    def process(self) -> psutil.Process | None:
        """Return the process, if it is in this namespace and still the same one."""
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
    """Return a random word that identifies one server."""
    return secrets.token_hex(16)


def life_of(identity: Identity, folder: Path) -> tuple[Life, str]:
    """Return whether a server lives.

    Args:
        identity: from its state file.
        folder: the server's folder with its lock.

    Returns:
        The verdict, and for ``elsewhere`` and ``unknown`` a clause with the reason.
    """
    if identity.process() is not None:
        return "here", ""
    same_boot = identity.boot == _boot()
    try:
        held = is_held(folder / ALIVE_FILE)
    except OSError as error:
        return "unknown", f"its lock {folder / ALIVE_FILE} cannot be checked ({error.strerror})"
    if held and identity.namespace != _namespace():
        return "elsewhere", f"it is process {identity.pid} in another PID namespace (a container, or its host)"
    if held:
        return "elsewhere", f"process {identity.pid} cannot be inspected: it may belong to another user"
    if not same_boot and identity.host != platform.node():
        return "unknown", f"it was started on another machine, {identity.host}"
    return "gone", ""


def hold(path: Path) -> int:
    """Lock a file for the owner of the returned descriptor, also if it is inherited.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be written or locked.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock(handle)
    except OSError:
        os.close(handle)
        raise
    return handle


def lock(handle: int) -> None:
    """Lock an open file without a wait.

    Raises:
        BlockingIOError: another process has the lock.
    """
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Whether some process has a file locked. False if the file does not exist."""
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
    """Find a living server without a record.

    Args:
        folder: the server's folder with its lock.
        config: a file that its command line names.

    Returns:
        Its PID, 0 if the PID is unknown, None if there is no such server.
    """
    if not folder.is_dir():
        return None
    for process in psutil.process_iter(["cmdline"]):
        if str(config) in (process.info["cmdline"] or ()):
            return int(process.pid)
    return 0 if is_held(folder / ALIVE_FILE) else None


def _ticks(pid: int) -> int:
    # The name in parentheses may have any characters, also parentheses and spaces.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[19])  # field 22 of proc_pid_stat(5): starttime


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the link's target is not a path
