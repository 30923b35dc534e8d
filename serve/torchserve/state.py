"""The record of a store's server in its private folder, and the lock for starting or changing it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from serve.archive.archive_file import MODEL_VERSION
from serve.common import layout
from serve.runtime.card.known_answer import NOTHING_KNOWN, KnownAnswer
from serve.runtime.errors import UserError
from serve.torchserve.client import Client
from serve.torchserve.configuration import HOST, Ports
from serve.torchserve.limits import Limits
from serve.torchserve.process_identity import Identity, lock

STATE_FOLDER = ".server"
_STATE_FILE = "state.json"
_ARCHIVES = "archives"
#: Locked during a start, change or stop of the server.
LOCK_FILE = "lock"


@dataclass(frozen=True)
class ServedModel:
    """A served model: its name in requests, its origin, and its version.

    TorchServe keeps versions of a model. A replacement gets the next number. ``unchecked`` is the reason why its known
    answer was not checked. Empty: it was.
    """

    name: str
    run: str
    artifact: str
    version: str = MODEL_VERSION
    unchecked: str = ""

    @classmethod
    def of(cls, name: str, archive: Path, version: str = MODEL_VERSION) -> Self:
        """Return the model for an archive. Run and artifact follow from the archive's place in the store."""
        run = archive.absolute().parents[1].name
        return cls(name, run, archive.stem.removeprefix(f"{run}-"), version)

    def asked_for(self, known: KnownAnswer | None) -> Self:
        """Return the record after the check of its known answer."""
        return replace(self, unchecked=NOTHING_KNOWN if known is None else "")

    @property
    def file(self) -> str:
        """Name of its archive in the server's own folder."""
        return f"{self.name}@{self.version}.mar"

    @property
    def archive(self) -> str:
        """Name of its original archive in the run's folder."""
        return f"{layout.served_name(self.run, self.artifact)}.mar"


@dataclass(frozen=True)
class RunningServer:
    """A server as recorded in its state file.

    ``identity`` identifies its Java process. ``temporary`` has its sockets and the unpacked archives. ``left_out`` has
    the reason for each wanted model that is not served. ``host`` is the address of predictions over HTTP; all else is
    on loopback. ``versions`` has the last version number that a live change gave to each name.
    """

    identity: Identity
    served: tuple[ServedModel, ...]
    default_model: str
    temporary: str
    ports: Ports = field(default_factory=Ports)
    limits: Limits = field(default_factory=Limits)
    left_out: dict[str, str] = field(default_factory=dict)
    host: str = HOST
    versions: dict[str, int] = field(default_factory=dict)

    def last_version(self, name: str) -> int:
        """Return the number of the last version of a name in this server, served or not. 0: none.

        A number is used only once. If a version's worker dies, TorchServe (0.12) starts it once more after the version
        was unregistered. Its output must not be confused with another version's.
        """
        served = [int(float(model.version)) for model in self.served if model.name == name]
        return max(*served, int(name in self.left_out), self.versions.get(name, 0), 0)

    @property
    def address(self) -> str:
        """The address of predictions, as reached from this machine."""
        return f"http://{HOST if self.host == '0.0.0.0' else self.host}:{self.ports.inference}"

    @property
    def pid(self) -> int:
        """The PID of its Java process."""
        return self.identity.pid

    @property
    def models(self) -> tuple[str, ...]:
        """The names of its models."""
        return tuple(model.name for model in self.served)

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs of its models, each once."""
        return tuple(dict.fromkeys(model.run for model in self.served))

    @property
    def archives(self) -> frozenset[str]:
        """The names of its models' original archives."""
        return frozenset(model.archive for model in self.served)

    def model(self, name: str) -> ServedModel:
        """Return the model of that name.

        Raises:
            UserError: there is none.
        """
        for model in self.served:
            if model.name == name:
                return model
        raise UserError(f"no model {name!r} is served; the models are {', '.join(self.models)}")

    def client(self, store: Path, timeout_s: float = 60.0) -> Client:
        """Return a client of this server."""
        return Client(self.ports, state_folder(store), timeout_s, address=self.address)


def state_folder(store: Path) -> Path:
    """Return the private folder (0700) of a store's server: state, configuration, keys and logs."""
    return store.resolve() / STATE_FOLDER


def state_file(store: Path) -> Path:
    """Return the path of the server's record."""
    return state_folder(store) / _STATE_FILE


def archives_folder(store: Path) -> Path:
    """Return the folder of the server's own archives."""
    return state_folder(store) / _ARCHIVES


def read_state(store: Path) -> RunningServer | None:
    """Read the state file. None: there is none. It does not check whether the server still lives."""
    try:
        body = json.loads(state_file(store).read_text(encoding="utf-8"))
        body["identity"] = Identity(**body["identity"])
        body["limits"] = Limits(**body["limits"])
        body["ports"] = Ports(**body["ports"])
        body["served"] = tuple(ServedModel(**entry) for entry in body["served"])
        return RunningServer(**body)
    except (OSError, ValueError, TypeError, KeyError, UserError):
        return None


def write_state(store: Path, server: RunningServer) -> None:
    """Record a server, atomically. The caller holds the lock.

    Raises:
        UserError: the record cannot be written. The old one stays.
    """
    path = state_file(store)
    written = path.with_name(f".{path.name}")
    try:
        written.write_text(json.dumps(asdict(server), indent=2), encoding="utf-8")
        written.replace(path)
    except OSError as error:
        written.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None


def remove_state(store: Path) -> None:
    """Remove the server's record."""
    state_file(store).unlink(missing_ok=True)


@contextmanager
def locked(store: Path, on_wait: Callable[[], None] | None = None) -> Iterator[Path]:
    """Lock the store's server folder for a start, change or stop of the server. Yield the folder.

    If another process has the lock, ``on_wait`` is called before a wait. None: it raises instead.

    Raises:
        UserError: another process has the lock, or the folder cannot be written.
    """
    folder = state_folder(store)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        if not _try_lock(handle):
            if on_wait is None:
                raise UserError("another command is starting, changing or stopping the server of this store")
            on_wait()
            while not _try_lock(handle):
                time.sleep(0.1)  # a blocking flock could not be ended by Ctrl-C
        yield folder
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        lock(handle)
    except BlockingIOError:
        return False
    return True
