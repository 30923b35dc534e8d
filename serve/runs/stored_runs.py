"""Finds a run's artifacts, archives, recommended artifact and sample image in a store, for serving.

`serve.common.layout` defines the paths. Only the files that a command needs must exist.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from serve.archive.archive_file import check_archive, check_model_name, open_archive
from serve.common import layout
from serve.common.hints import command
from serve.runs import sealed_files
from serve.runtime.card.card import CARD_FILE, Card
from serve.runtime.errors import CardError, UserError, did_you_mean
from serve.torchserve.state import ServedModel

DeviceChoice = Literal["auto", "cpu", "cuda"]


#: Means every artifact of a run that this machine can run.
ALL = "all"

_NAME_AND_TARGET = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)=(?P<target>.+)")


@dataclass(frozen=True)
class Target:
    """A model to serve from a store, as on a command line: ``[NAME=]RUN[/ARTIFACT]``.

    Attributes:
        run: the run's name.
        artifact: the artifact's name. None: chosen elsewhere.
        name: the model's name in requests. None: ``RUN-ARTIFACT``.
    """

    run: str
    artifact: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Selection:
    """The models to serve: archives by model name, omitted ones with the reason, and the default model."""

    archives: dict[str, Path]
    left_out: dict[str, str]
    default_model: str


def model_name(run: str, artifact: str) -> str:
    """Return the served name of an artifact of a run, ``<run>-<artifact>``.

    Raises:
        UserError: the name is not legal for a model.
    """
    return check_model_name(layout.served_name(run, artifact))


def find_run(wanted: str, data: str | None = None) -> str:
    """Return the name of a run.

    Args:
        wanted: a run's name, or a model as on `optimize`'s command line. A colon, or ``data``, shows that it is a
            model.
        data: the data of that model's run.
    """
    if data is None and ":" not in wanted:
        return wanted
    return layout.run_name(wanted, layout.PLAIN_DATA if data is None else data)


def find_target(word: str, data: str | None = None) -> Target:
    """Parse a word of the command line: ``[NAME=]RUN[/ARTIFACT]``.

    Args:
        word: its RUN may be a model, as in `find_run`. Its artifact is then behind the colon.
        data: see `find_run`.
    """
    named = _NAME_AND_TARGET.fullmatch(word)
    if named is not None:
        word = named["target"]
    module, colon, rest = word.rpartition(":")
    run, artifact = layout.run_and_artifact(rest)
    return Target(find_run(f"{module}{colon}{run}", data), artifact, named["name"] if named else None)


def select(
    store: Path,
    targets: Sequence[Target],
    artifacts: Sequence[str] = (),
    device: DeviceChoice = "auto",
    *,
    strict: bool = False,
) -> Selection:
    """Choose the archives to serve.

    Args:
        store: the folder of the runs.
        targets: the models to serve.
        artifacts: for targets without an artifact: these, `ALL`, or (empty) the one that the run's report recommends.
        device: where they must run.
        strict: raise if this machine cannot run one of them. Otherwise it is left out.

    Raises:
        UserError: a run or an archive is missing, or two have the same name. Or CUDA is wanted and missing, or nothing
            of the selection runs here.
    """
    if device == "cuda" and not _has_cuda():
        raise UserError("--device cuda needs a usable CUDA device, and this machine has none: use --device cpu")
    wanted: dict[str, Path] = {}
    for target in targets:
        for name, path in _archives_of(store, target, artifacts):
            if (taken := wanted.setdefault(name, path)) != path:
                raise UserError(
                    f"{_shown(taken)} and {_shown(path)} would both be called {name}: give one another name, as in "
                    f"NAME={_shown(path)}"
                )
    faults = _faults(wanted, device)
    chosen = {name: path for name, path in wanted.items() if name not in faults}
    if faults and (strict or not chosen):
        reasons = "; ".join(f"{_shown(wanted[name])}: {reason}" for name, reason in faults.items())
        raise UserError(f"{'some models' if chosen else 'the models'} cannot be served here ({reasons})")
    return Selection(chosen, faults, _first_recommended(store, chosen))


def _faults(wanted: Mapping[str, Path], device: DeviceChoice) -> dict[str, str]:
    """Return why some of the archives cannot be served on this machine."""
    found: dict[str, str] = {}
    for name, path in wanted.items():
        try:
            needs = _checked_card(path).device
        except (CardError, sealed_files.SealError) as error:
            found[name] = str(error)
            continue
        # The search for a GPU imports torch, so it runs only if something depends on it.
        if needs == "cuda" and (device == "cpu" or not _has_cuda()):
            found[name] = "it runs on CUDA only"
    return found


def _checked_card(archive: Path) -> Card:
    """Return the card of a run's complete archive. It must match the run's list, or without a list its own card.

    Raises:
        CardError: it is not an archive, or damaged.
        SealError: it is not the sealed one.
    """
    folder = archive.parents[1]
    if not sealed_files.is_sealed(folder):
        return check_archive(archive)
    with open_archive(archive) as opened:
        card = opened.card()
    sealed_files.require(folder, archive.relative_to(folder).as_posix())
    return card


def _archives_of(store: Path, target: Target, artifacts: Sequence[str]) -> list[tuple[str, Path]]:
    """Return the archives of a target, with their served names."""
    folder = _run_folder(store, target.run) / layout.ARCHIVES
    present = {path.stem.removeprefix(f"{target.run}-"): path for path in sorted(folder.glob(f"{target.run}-*.mar"))}
    report = _report(store, target.run)
    if report is not None:  # others were kept for a running server when the run was made again
        present = {name: path for name, path in present.items() if name in report.archives}
    if not present:
        raise UserError(
            f"{folder}: there are no archives; build them with `{command(f'serve package {target.run}', store)}`"
        )
    names = [target.artifact] if target.artifact is not None else list(dict.fromkeys(artifacts))
    if not names:
        if report is None and len(present) > 1:
            raise UserError(
                f"{target.run} has no report that recommends an artifact: choose one, such as "
                f"{target.run}/{next(iter(present))}, or all with --artifact {ALL}; it has {', '.join(present)}"
            )
        names = [report.recommended if report is not None else next(iter(present))]
    if names == [ALL] and ALL not in present:
        names = list(present)
    for name in names:
        if name not in present:
            raise UserError(
                f"{layout.archive_path(store, target.run, name)}: there is no such archive; the archives of "
                f"{target.run} are {', '.join(present)}"
            )
    if target.name is not None and len(names) > 1:
        raise UserError(
            f"{target.name} can name only one artifact, not {len(names)}: write {target.name}={target.run}/ARTIFACT"
        )
    return [(check_model_name(target.name or model_name(target.run, name)), present[name]) for name in names]


def _first_recommended(store: Path, chosen: Mapping[str, Path]) -> str:
    """Return the first model that its run recommends, or else the first."""
    for name, path in chosen.items():
        model = ServedModel.of(name, path)
        report = _report(store, model.run)
        if report is not None and report.recommended == model.artifact:
            return name
    return next(iter(chosen))


def _shown(archive: Path) -> str:
    """Return an archive as a target."""
    model = ServedModel.of("", archive)
    return f"{model.run}/{model.artifact}"


def remove_left(store: Path, run: str) -> None:
    """Remove archives that a run no longer has, and had kept for a running server.

    The caller must have checked that no server of the store runs. If the run is just being made, nothing is removed: it
    does this itself.
    """
    locks = store / layout.LOCKS
    try:
        report = _report(store, run)
    except UserError:  # what is left over is unknown then
        return
    if report is None or not locks.is_dir():
        return
    lock = FileLock(locks / layout.run_lock(run))
    with contextlib.suppress(Timeout), lock.acquire(blocking=False):
        left = [
            path
            for path in (store / run / layout.ARCHIVES).glob(f"{run}-*.mar*")
            if layout.archive_of(path).stem.removeprefix(f"{run}-") not in report.archives
        ]
        for path in left:
            path.unlink(missing_ok=True)
        sealed_files.reseal(store / run, left)


def artifact_folders(store: Path, run: str) -> list[Path]:
    """Return the folders of a run's artifacts, by name.

    Raises:
        UserError: the run is not in the store, or has no artifacts.
    """
    folder = _run_folder(store, run) / layout.ARTIFACTS
    found = sorted(path.parent for path in folder.glob(f"*/{CARD_FILE}"))
    if not found:
        raise UserError(f"{folder}: there are no artifacts; make them with `{command(f'optimize run {run}', store)}`")
    return found


def sample_image(store: Path, run: str) -> Path | None:
    """Return the run's sample image, if the pipeline has written one."""
    return next(iter(sorted((store / run).glob("sample.*"))), None)


def recommended(store: Path, run: str) -> str:
    """Return the recommended artifact of a run, or its only one.

    Raises:
        UserError: there is no such run, it has no artifacts, or it has several and recommends none.
    """
    present = [folder.name for folder in artifact_folders(store, run)]
    if (found := recommended_among(store, run, present)) is None:
        raise UserError(f"{run} recommends no artifact: choose one, as {run}/ARTIFACT; it has {', '.join(present)}")
    return found


def recommended_among(store: Path, run: str, names: Sequence[str]) -> str | None:
    """Return the recommended one of some artifacts of a run, or the only one. None if there is neither."""
    report = _report(store, run)
    if report is not None and report.recommended in names:
        return report.recommended
    return names[0] if len(names) == 1 else None


def _run_folder(store: Path, run: str) -> Path:
    check_model_name(run)
    folder = store / run
    if folder.is_dir():
        return folder
    known = sorted(path.name for path in store.glob("*") if (path / layout.ARCHIVES).is_dir())
    raise UserError(
        f"{store}: there is no run {run!r}{did_you_mean(run, known)}, only {', '.join(known) or 'none yet'}; make "
        f"one with `{command(f'optimize run MODEL --name {run}', store)}`"
    )


@dataclass(frozen=True)
class _Report:
    """The parts of a run's report for serving: its artifacts with an archive, and the recommended one."""

    archives: frozenset[str]
    recommended: str


def _report(store: Path, run: str) -> _Report | None:
    """Return the parts of a run's report for serving. None: the run has no report and no list, and is served anyway.

    Raises:
        UserError: the report is damaged, or the run is not sealed.
    """
    content = sealed_files.read(store / run, layout.REPORT_FILE)
    if content is None:
        return None
    try:
        report = json.loads(content)
        archives = frozenset(str(row["name"]) for row in report["rows"] if row["archive"] is not None)
        return _Report(archives, str(report["recommended"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        path = layout.report_path(store, run)
        raise UserError(f"{path} was not written by this version; run the model again") from None


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
