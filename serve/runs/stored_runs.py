"""What a store holds of a run, for serving: artifacts, archives, the recommended one and a sample image.

Where they lie is said in `serve.common.layout`; only what a command needs must be there.
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


#: Stands for every artifact of a run that this machine can run.
ALL = "all"

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)=(?P<target>.+)")


@dataclass(frozen=True)
class Target:
    """What is to be served of a store, as a command line says it: ``[NAME=]RUN[/ARTIFACT]``.

    Attributes:
        run: the run's name.
        artifact: the artifact's; None: which one is said apart.
        name: what it is to be called by requests; None: ``RUN-ARTIFACT``.
    """

    run: str
    artifact: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Selection:
    """What is to be served: archives by model name, those left out with the reason, and the default model."""

    archives: dict[str, Path]
    left_out: dict[str, str]
    default_model: str


def model_name(run: str, artifact: str) -> str:
    """The name that an artifact of a run is served by, ``<run>-<artifact>``.

    Raises:
        UserError: it is not a legal name of a model.
    """
    return check_model_name(layout.served_name(run, artifact))


def find_run(wanted: str, data: str | None = None) -> str:
    """The name of the run that is meant.

    Args:
        wanted: a run's name; or a model as on the command line of `optimize`, which is told by its colon or by data.
        data: the data of that model's run.
    """
    if data is None and ":" not in wanted:
        return wanted
    return layout.run_name(wanted, layout.PLAIN_DATA if data is None else data)


def find_target(word: str, data: str | None = None) -> Target:
    """What a word of the command line means: ``[NAME=]RUN[/ARTIFACT]``.

    Args:
        word: its RUN may be a model, as in `find_run`; its artifact stands behind the colon then.
        data: as in `find_run`.
    """
    named = _NAMED.fullmatch(word)
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
        store: holds the runs.
        targets: what to serve.
        artifacts: of the targets that name none: these, `ALL` of them, or (empty) the one that the run's report
            recommends.
        device: where they are to run.
        strict: refuse where this machine cannot run one of them, and do not leave it out.

    Raises:
        UserError: a run or an archive is missing, two have the same name, CUDA is asked for and is not there, or
            nothing of what was asked for runs here.
    """
    if device == "cuda" and not _has_cuda():
        raise UserError("CUDA was asked for and this machine has no usable CUDA device: use --device cpu")
    wanted: dict[str, Path] = {}
    for target in targets:
        for name, path in _wanted(store, target, artifacts):
            if (taken := wanted.setdefault(name, path)) != path:
                raise UserError(
                    f"{_spelled(taken)} and {_spelled(path)} would both be called {name}: give one another name, as in "
                    f"NAME={_spelled(path)}"
                )
    faults = _faults(wanted, device)
    chosen = {name: path for name, path in wanted.items() if name not in faults}
    if faults and (strict or not chosen):
        reasons = "; ".join(f"{_spelled(wanted[name])}: {reason}" for name, reason in faults.items())
        raise UserError(f"{'one' if chosen else 'nothing'} of what was asked for cannot be served here ({reasons})")
    return Selection(chosen, faults, _first_recommended(store, chosen))


def _faults(wanted: Mapping[str, Path], device: DeviceChoice) -> dict[str, str]:
    """Why some of the archives cannot be served on this machine."""
    found: dict[str, str] = {}
    for name, path in wanted.items():
        try:
            needs = _checked(path).device
        except (CardError, sealed_files.SealError) as error:
            found[name] = str(error)
            continue
        # torch is imported to look for a GPU: not where nothing depends on it.
        if needs == "cuda" and (device == "cpu" or not _has_cuda()):
            found[name] = "it runs on CUDA only"
    return found


def _checked(archive: Path) -> Card:
    """The card of a run's archive that is whole: as the run was sealed, or, where it was not, as the card says.

    Raises:
        CardError: it is not an archive, or not whole.
        SealError: it is not the one that the run was sealed with.
    """
    folder = archive.parents[1]
    if not sealed_files.is_sealed(folder):
        return check_archive(archive)
    with open_archive(archive) as opened:
        card = opened.card()
    sealed_files.require(folder, archive.relative_to(folder).as_posix())
    return card


def _wanted(store: Path, target: Target, artifacts: Sequence[str]) -> list[tuple[str, Path]]:
    """The archives that a target means, with the names to serve them by."""
    folder = _run_folder(store, target.run) / layout.ARCHIVES
    present = {path.stem.removeprefix(f"{target.run}-"): path for path in sorted(folder.glob(f"{target.run}-*.mar"))}
    report = _report(store, target.run)
    if report is not None:  # others were kept for a server that was serving them when the run was made again
        present = {name: path for name, path in present.items() if name in report.archives}
    if not present:
        raise UserError(
            f"{folder}: there are no archives; make them with `{command(f'serve package {target.run}', store)}`"
        )
    names = [target.artifact] if target.artifact is not None else list(dict.fromkeys(artifacts))
    if not names:
        if report is None and len(present) > 1:
            raise UserError(
                f"{target.run} has no report that recommends an artifact: name one, as in {target.run}/"
                f"{next(iter(present))}, or all with --artifact {ALL}; it has {', '.join(present)}"
            )
        names = [report.recommended if report is not None else next(iter(present))]
    if names == [ALL] and ALL not in present:
        names = list(present)
    for name in names:
        if name not in present:
            raise UserError(
                f"{layout.archive_path(store, target.run, name)}: there is no such archive; {target.run} has "
                f"{', '.join(present)}"
            )
    if target.name is not None and len(names) > 1:
        raise UserError(
            f"{target.name} can name one artifact, not {len(names)}: write {target.name}={target.run}/ARTIFACT"
        )
    return [(check_model_name(target.name or model_name(target.run, name)), present[name]) for name in names]


def _first_recommended(store: Path, chosen: Mapping[str, Path]) -> str:
    """The first model that its run recommends; else the first."""
    for name, path in chosen.items():
        model = ServedModel.of(name, path)
        report = _report(store, model.run)
        if report is not None and report.recommended == model.artifact:
            return name
    return next(iter(chosen))


def _spelled(archive: Path) -> str:
    """An archive as a target."""
    model = ServedModel.of("", archive)
    return f"{model.run}/{model.artifact}"


def remove_left(store: Path, run: str) -> None:
    """Remove archives that a run has no more and had kept for the server that was serving them.

    The caller has seen that no server of the store is running. Where the run is just being made, nothing is removed:
    it looks for itself.
    """
    locks = store / layout.LOCKS
    try:
        report = _report(store, run)
    except UserError:  # nobody can tell what is left
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
    """The folders of a run's artifacts, by name.

    Raises:
        UserError: the run is not in the store, or has none.
    """
    folder = _run_folder(store, run) / layout.ARTIFACTS
    found = sorted(path.parent for path in folder.glob(f"*/{CARD_FILE}"))
    if not found:
        raise UserError(f"{folder}: there are no artifacts; make them with `{command(f'optimize run {run}', store)}`")
    return found


def sample_image(store: Path, run: str) -> Path | None:
    """The run's sample image, if the pipeline has written one."""
    return next(iter(sorted((store / run).glob("sample.*"))), None)


def recommended(store: Path, run: str) -> str:
    """The recommended artifact of a run, or its only one.

    Raises:
        UserError: there is no such run, it has no artifacts, or it says of none of several that it is the recommended.
    """
    present = [folder.name for folder in artifact_folders(store, run)]
    if (found := recommended_among(store, run, present)) is None:
        raise UserError(f"{run} recommends no artifact: say which, as {run}/ARTIFACT; it has {', '.join(present)}")
    return found


def recommended_among(store: Path, run: str, names: Sequence[str]) -> str | None:
    """That of some artifacts of a run which it recommends, or the only one; None where neither is so."""
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
        f"{store}: there is no run {run!r}{did_you_mean(run, known)}; it has {', '.join(known) or 'none yet'}; "
        f"make one with `{command(f'optimize run MODEL --name {run}', store)}`"
    )


@dataclass(frozen=True)
class _Report:
    """What serving reads of a run's report: its artifacts that have an archive, and the recommended one."""

    archives: frozenset[str]
    recommended: str


def _report(store: Path, run: str) -> _Report | None:
    """What serving reads of a run's report; None: it has none and was not sealed, and is served all the same.

    Raises:
        UserError: it is damaged, or the run was not sealed.
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
        raise UserError(f"{path} is not a report of this version; run the model again") from None


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
