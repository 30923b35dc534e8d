"""What is recorded of a store's server, in its private folder; and the lock of whoever starts or changes it."""

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
#: Locked by whoever starts, changes or stops the server.
LOCK_FILE = "lock"


@dataclass(frozen=True)
class ServedModel:
    """A model that is served: the name that requests call it by, what it was made from, and its version.

    TorchServe knows versions of a model: the one that takes the place of another has the next number.
    ``unchecked`` says why it was not asked for a known answer before it was called ready; empty: it gave it.
    """

    name: str
    run: str
    artifact: str
    version: str = MODEL_VERSION
    unchecked: str = ""

    @classmethod
    def of(cls, name: str, archive: Path, version: str = MODEL_VERSION) -> Self:
        """What an archive is served as; where it lies in its store says of which run and artifact it is."""
        run = archive.absolute().parents[1].name
        return cls(name, run, archive.stem.removeprefix(f"{run}-"), version)

    def asked_for(self, known: KnownAnswer | None) -> Self:
        """The same, as it is recorded when it has been asked for what is known of it."""
        return replace(self, unchecked=NOTHING_KNOWN if known is None else "")

    @property
    def file(self) -> str:
        """Its archive in the server's own folder."""
        return f"{self.name}@{self.version}.mar"

    @property
    def archive(self) -> str:
        """The name, in its run's folder, of the archive that it is served from."""
        return f"{layout.served_name(self.run, self.artifact)}.mar"


@dataclass(frozen=True)
class RunningServer:
    """A server as its state file records it.

    ``identity`` tells its Java process from every other; ``temporary`` holds its sockets and the unpacked archives;
    ``left_out`` has the reason for each model that was asked for and is not served; ``host`` is the address that
    predictions over HTTP are answered on, all else being on loopback; ``versions`` has the last number that a live
    change gave to a version of a name.
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
        """The number of the last version that a name has had in this server, whether it is served or not; 0: none.

        A number is given once: TorchServe (0.12) starts the worker of a version that died once more after it was told
        to forget it, and what that one writes must not be taken for another's.
        """
        served = [int(float(model.version)) for model in self.served if model.name == name]
        return max(*served, int(name in self.left_out), self.versions.get(name, 0), 0)

    @property
    def address(self) -> str:
        """Where predictions are answered, as this machine reaches it."""
        return f"http://{HOST if self.host == '0.0.0.0' else self.host}:{self.ports.inference}"

    @property
    def pid(self) -> int:
        """The number of its Java process."""
        return self.identity.pid

    @property
    def models(self) -> tuple[str, ...]:
        """The names that requests call them by."""
        return tuple(model.name for model in self.served)

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that they are of, each once."""
        return tuple(dict.fromkeys(model.run for model in self.served))

    @property
    def archives(self) -> frozenset[str]:
        """Names of the archives that they are served from."""
        return frozenset(model.archive for model in self.served)

    def model(self, name: str) -> ServedModel:
        """The model of that name.

        Raises:
            UserError: none is served by it.
        """
        for model in self.served:
            if model.name == name:
                return model
        raise UserError(f"no model {name!r} is served; there are {', '.join(self.models)}")

    def client(self, store: Path, timeout_s: float = 60.0) -> Client:
        """A client that talks to this server."""
        return Client(self.ports, state_folder(store), timeout_s, address=self.address)


def state_folder(store: Path) -> Path:
    """The private folder (0700) of a store's server: state, configuration, keys and logs."""
    return store.resolve() / STATE_FOLDER


def state_file(store: Path) -> Path:
    """Where the server is recorded."""
    return state_folder(store) / _STATE_FILE


def archives_folder(store: Path) -> Path:
    """Where the server has the archives that it serves: links to those of the runs, or others of its own."""
    return state_folder(store) / _ARCHIVES


def read_state(store: Path) -> RunningServer | None:
    """What the state file says, or None; whether that server is still there is not looked at."""
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
    """Record a server, atomically; the caller holds the lock.

    Raises:
        UserError: it cannot be written; what was recorded before stays.
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
    """Forget the server."""
    state_file(store).unlink(missing_ok=True)


@contextmanager
def locked(store: Path, on_wait: Callable[[], None] | None = None) -> Iterator[Path]:
    """Hold the store's server folder for whoever starts, changes or stops the server; yields the folder.

    Where somebody else holds it, it is waited for after ``on_wait``, if that is given.

    Raises:
        UserError: somebody else holds it, or it cannot be written.
    """
    folder = state_folder(store)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        if not _taken(handle):
            if on_wait is None:
                raise UserError("another start, change or stop of this store's server is under way")
            on_wait()
            while not _taken(handle):
                time.sleep(0.1)  # and not in flock, which Ctrl-C would not end
        yield folder
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        lock(handle)
    except BlockingIOError:
        return False
    return True
