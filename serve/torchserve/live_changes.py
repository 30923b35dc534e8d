"""Changes the models of a running server without a lost request: add, replace, remove.

TorchServe (0.12) ends a worker in the middle of a batch on removal, and drops its queue. So the server delays a removal
until all requests of that version are answered: see ``ModelQueue.groovy``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

import psutil

from serve.archive.archive_file import Instructions
from serve.archive.verification import Policy
from serve.common.hints import command
from serve.runtime.errors import PipelineError, UserError
from serve.torchserve.client import Client, ServerError
from serve.torchserve.server import running, the_running
from serve.torchserve.staging import Pack, stage
from serve.torchserve.startup_watch import Awaited, Log, Progressed, wait_until_ready
from serve.torchserve.state import (
    RunningServer,
    ServedModel,
    archives_folder,
    locked,
    state_folder,
    write_state,
)

_DEADLINE_S = 600.0


@dataclass
class _Change:
    """A running server, held by its lock, and its client."""

    store: Path
    server: RunningServer
    client: Client

    def record(self, **changes: Any) -> None:
        """Record the new state of the server.

        Raises:
            UserError: the record cannot be written. The old one stays.
        """
        server = with_changes(self.server, **changes)
        write_state(self.store, server)
        self.server = server

    def next_version(self, name: str) -> str:
        """Return a version that the name has never had in this server."""
        number = self.server.last_version(name) + 1
        self.record(versions={**self.server.versions, name: number})
        return f"{number}.0"


@dataclass(frozen=True)
class _Staged:
    """A model whose archive is in the server's folder, and the archive's instructions."""

    model: ServedModel
    instructions: Instructions


def add(
    store: Path,
    archives: Mapping[str, Path],
    *,
    pack: Pack | None = None,
    policy: Policy | None = None,
    deadline_s: float = _DEADLINE_S,
    on_ready: Callable[[str], None] = lambda model: None,
    progressed: Progressed = lambda fraction, message: None,
) -> RunningServer:
    """Add models, and return when each of them answers. The served ones continue meanwhile.

    Args:
        store: the server's store.
        archives: the ``.mar`` files in their runs' folders, by model name.
        pack: packs a model in place of its archive.
        policy: which archives may be loaded; see `server.start`.
        deadline_s: seconds to wait.
        on_ready: called with each model's name when it answers.
        progressed: called repeatedly while they load.

    Raises:
        UserError: a name is taken, or an archive cannot be packed so.
        PipelineError: no server is running.
        StartError: a worker died. None of the models is added.
    """
    with _changing(store) as change:
        for name in archives:
            if name in change.server.models:
                raise UserError(
                    f"a model is already served as {name}: replace it with "
                    f"`{command(f'serve replace {name}', store)}`, or give this one another name with "
                    "NAME=RUN/ARTIFACT"
                )
        added = _load(
            change,
            {ServedModel.of(name, path, change.next_version(name)): path for name, path in archives.items()},
            pack=pack,
            policy=policy,
            deadline_s=deadline_s,
            on_ready=on_ready,
            progressed=progressed,
        )
        left_out = {name: why for name, why in change.server.left_out.items() if name not in archives}
        with _removed_on_failure(change, added):
            change.record(served=(*change.server.served, *added), left_out=left_out)
        return change.server


def replace(
    store: Path,
    name: str,
    archive: Path,
    *,
    pack: Pack | None = None,
    policy: Policy | None = None,
    deadline_s: float = _DEADLINE_S,
    progressed: Progressed = lambda fraction, message: None,
) -> RunningServer:
    """Replace the archive of a served model, and return when the old version is gone.

    Both versions are loaded for a while. The new one gets the requests once it answers. The old one is removed when its
    accepted requests are answered.

    Args:
        store: the server's store.
        name: name of the model.
        archive: the ``.mar`` file in its run's folder.
        pack: packs the model in place of its archive.
        policy: which archives may be loaded; see `server.start`.
        deadline_s: seconds to wait for the new version.
        progressed: called repeatedly while it loads.

    Raises:
        UserError: no such model is served, or the archive cannot be packed so.
        PipelineError: no server is running.
        StartError: the new version did not start. The old one continues.
    """
    with _changing(store) as change:
        old = change.server.model(name)
        wanted = {ServedModel.of(name, archive, change.next_version(name)): archive}
        (new,) = _load(change, wanted, pack=pack, policy=policy, deadline_s=deadline_s, progressed=progressed)
        served = tuple(new if model == old else model for model in change.server.served)
        # Recorded before it gets requests: an unrecorded version must not answer.
        with _removed_on_failure(change, [new]):
            change.record(served=served)
        change.client.set_default(name, new.version)
        _unregister(change, old)
        return change.server


def remove(store: Path, names: list[str]) -> RunningServer:
    """Remove models. Their accepted requests are answered, and later ones are refused.

    Raises:
        UserError: no such model is served, or none would remain.
        PipelineError: no server is running.
    """
    with _changing(store) as change:
        gone = [change.server.model(name) for name in dict.fromkeys(names)]
        left = tuple(model for model in change.server.served if model not in gone)
        if not left:
            raise UserError(
                f"this would remove the last model: stop the server instead, with `{command('serve stop', store)}`"
            )
        for model in gone:
            default = change.server.default_model
            change.record(
                served=tuple(entry for entry in change.server.served if entry != model),
                default_model=default if default != model.name else left[0].name,
            )
            _unregister(change, model)
        return change.server


@contextmanager
def _changing(store: Path) -> Iterator[_Change]:
    """Hold the store's server for one change at a time."""
    the_running(store)
    with locked(store):
        server = running(store, holding=True)
        if server is None:
            raise PipelineError(f"the server of {store} has just been stopped")
        with server.client(store) as client:
            change = _Change(store, server, client)
            _remove_unrecorded(change)
            yield change


def _remove_unrecorded(change: _Change) -> None:
    """Remove what a killed change left behind: versions that are not in the record."""
    recorded = {model.name: model for model in change.server.served}
    for name in change.client.models():
        kept = recorded.get(name)
        left = [version for version in change.client.versions(name) if kept is None or version != kept.version]
        if left and kept is not None:
            change.client.set_default(name, kept.version)
        # The default version can be removed only as the last one.
        left.sort(key=lambda version: version == change.client.registered(name)["modelVersion"])
        for version in left:
            _unregister(change, ServedModel(name, "", "", version))


def _load(
    change: _Change,
    archives: Mapping[ServedModel, Path],
    *,
    pack: Pack | None,
    policy: Policy | None,
    deadline_s: float,
    on_ready: Callable[[str], None] = lambda model: None,
    progressed: Progressed,
) -> tuple[ServedModel, ...]:
    """Stage and start models, and return their records. If one does not start, all are removed again."""
    folder = archives_folder(change.store)
    with _removed_on_failure(change, archives):
        staged = []
        for model, archive in archives.items():
            staged.append(_Staged(model, stage(folder, model, archive, pack, policy)))
        _start(change, staged, deadline_s, on_ready, progressed)
    return tuple(entry.model.asked_for(entry.instructions.known) for entry in staged)


@contextmanager
def _removed_on_failure(change: _Change, models: Iterable[ServedModel]) -> Iterator[None]:
    """Remove unrecorded versions again if the block fails."""
    try:
        yield
    except BaseException:
        for model in models:
            _unregister(change, model)
        raise


def _start(
    change: _Change,
    staged: Sequence[_Staged],
    deadline_s: float,
    on_ready: Callable[[str], None],
    progressed: Progressed,
) -> None:
    log = Log.from_now(state_folder(change.store) / "logs")
    for entry in staged:
        change.client.register(entry.model.name, entry.model.file, workers=entry.instructions.serving.workers)
    wait_until_ready(
        psutil.Process(change.server.pid),
        change.client,
        log,
        {entry.model.name: Awaited(entry.model.version, entry.instructions.known) for entry in staged},
        deadline_s=deadline_s,
        on_ready=on_ready,
        progressed=progressed,
    )


def _unregister(change: _Change, model: ServedModel) -> None:
    """Remove a version once its requests are answered, and its archive. Its lines stay in the log."""
    with contextlib.suppress(ServerError):  # it was never registered, or the server is gone
        change.client.unregister(model.name, model.version)
    (archives_folder(change.store) / model.file).unlink(missing_ok=True)
