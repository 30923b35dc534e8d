"""What a store holds of a run, for serving: artifacts, archives, the recommended one and a sample image.

Where they lie is said in `serve.layout`; only what a command needs must be there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from serve import layout
from serve.hints import command
from serve.options import ServingOptions
from serve.runtime.card import CARD_FILE, read_card
from serve.runtime.engines.base import engines, engines_for
from serve.runtime.errors import UserError, did_you_mean
from serve.torchserve.archive import build_archive, check_archive, check_model_name

DeviceChoice = Literal["auto", "cpu", "cuda"]


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


def package_run(store: Path, run: str, options: ServingOptions | None = None) -> list[Path]:
    """Build an archive of every artifact of a run.

    Args:
        store: holds the run.
        run: its name.
        options: how they are served otherwise than the run decided.

    Raises:
        UserError: the run is not in the store, or has no artifacts, or none that one of the engines opens.
        CardError: an artifact's folder is not whole.
    """
    folder = _run_folder(store, run) / layout.ARTIFACTS
    artifacts = sorted(path.parent for path in folder.glob(f"*/{CARD_FILE}"))
    if not artifacts:
        raise UserError(f"{folder}: there are no artifacts; make them with `{command(f'optimize run {run}', store)}`")
    if options is not None:
        _check_engines(run, artifacts, options)
    return [
        build_archive(
            artifact,
            layout.archive_path(store, run, artifact.name),
            model_name=model_name(run, artifact.name),
            options=options,
        )
        for artifact in artifacts
    ]


def _check_engines(run: str, artifacts: Sequence[Path], options: ServingOptions) -> None:
    """See that every engine that is named opens something."""
    if not options.engines:
        return
    opens = {entry.name for artifact in artifacts for entry in engines_for(read_card(artifact))}
    for word in options.engines:
        if word.partition("[")[0] not in opens:
            raise UserError(f"{word} opens no artifact of {run}; what opens them is {', '.join(sorted(opens))}")


def repacking(
    store: Path, run: str, selection: Selection, options: ServingOptions, device: DeviceChoice = "auto"
) -> Callable[[Path], dict[str, Path]] | None:
    """What packs the selected artifacts into a folder, served otherwise than their archives say; None: nothing differs.

    Args:
        store: holds the run.
        run: its name.
        selection: what is to be served.
        options: what differs.
        device: ``cuda`` puts the executions on a GPU before the others.

    Raises:
        UserError: an engine that is named opens none of them.
    """
    if device == "cuda":
        on_gpu = [f"{name}[cuda]" for name, entry in engines().items() if "cuda" in entry.devices]
        options = options.model_copy(update={"engines": (*options.engines, *on_gpu)})
    elif not options.model_fields_set:
        return None
    names = {model: path.stem.removeprefix(f"{run}-") for model, path in selection.archives.items()}
    folders = {model: layout.artifact_folder(store, run, name) for model, name in names.items()}
    if device != "cuda":
        _check_engines(run, list(folders.values()), options)

    def pack(folder: Path) -> dict[str, Path]:
        return {
            model: build_archive(artifact, folder / f"{model}.mar", model_name=model, options=options)
            for model, artifact in folders.items()
        }

    return pack


def select(store: Path, run: str, artifacts: Sequence[str] = (), device: DeviceChoice = "auto") -> Selection:
    """Choose the archives of a run to serve: those named, or all that this machine can run.

    Raises:
        UserError: the run or an archive is missing, CUDA is asked for and is not there, or an artifact
            that was named cannot run here.
        CardError: an archive is broken.
    """
    folder = _run_folder(store, run) / layout.ARCHIVES
    present = {path.stem.removeprefix(f"{run}-"): path for path in sorted(folder.glob(f"{run}-*.mar"))}
    report = _report(store, run)
    if report is not None:  # others were kept for a server that was serving them when the run was made again
        present = {name: path for name, path in present.items() if name in report.archives}
    if device == "cuda" and not _has_cuda():
        raise UserError("CUDA was asked for and this machine has no usable CUDA device: use --device cpu")
    if not present:
        raise UserError(f"{folder}: there are no archives; make them with `{command(f'serve package {run}', store)}`")
    for name in artifacts:
        if name not in present:
            raise UserError(
                f"{layout.archive_path(store, run, name)}: there is no such archive; {run} has {', '.join(present)}"
            )
    runs_on = {name: check_archive(present[name]).device for name in dict.fromkeys(artifacts or present)}
    # torch is imported to look for a GPU: not where nothing depends on it.
    cuda = device != "cpu" and "cuda" in runs_on.values() and _has_cuda()
    chosen: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for name, needs in runs_on.items():
        reason = "it runs on CUDA only" if needs == "cuda" and not cuda else None
        if reason is None:
            chosen[model_name(run, name)] = present[name]
        elif artifacts:
            raise UserError(f"{name} cannot be served here: {reason}")
        else:
            left_out[name] = reason
    if not chosen:
        raise UserError(f"no archive of {run} can be served here: {'; '.join(left_out.values())}")
    recommended = layout.served_name(run, report.recommended) if report else ""
    return Selection(chosen, left_out, recommended if recommended in chosen else next(iter(chosen)))


def remove_left(store: Path, run: str) -> None:
    """Remove archives that a run has no more and had kept for the server that was serving them.

    The caller has seen that no server of the store is running. Where the run is just being made, nothing is removed:
    it looks for itself.
    """
    report = _report(store, run)
    locks = store / layout.LOCKS
    if report is None or not locks.is_dir():
        return
    lock = FileLock(locks / layout.run_lock(run))
    with contextlib.suppress(Timeout), lock.acquire(blocking=False):
        for path in (store / run / layout.ARCHIVES).glob(f"{run}-*.mar*"):
            if layout.archive_of(path).stem.removeprefix(f"{run}-") not in report.archives:
                path.unlink(missing_ok=True)


def sample_image(store: Path, run: str) -> Path | None:
    """The run's sample image, if the pipeline has written one."""
    return next(iter(sorted((store / run).glob("sample.*"))), None)


def recommended(store: Path, run: str) -> str:
    """The recommended artifact of a run, or its only one.

    Raises:
        UserError: there is no such run, or it says of none of several artifacts that it is the recommended one.
    """
    present = sorted(path.parent.name for path in (_run_folder(store, run) / layout.ARTIFACTS).glob(f"*/{CARD_FILE}"))
    report = _report(store, run)
    if report is not None and report.recommended in present:
        return report.recommended
    if len(present) == 1:
        return present[0]
    raise UserError(
        f"{run} recommends no artifact: say which, as {run}/ARTIFACT; it has {', '.join(present) or 'none'}"
    )


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
    try:
        report = json.loads(layout.report_path(store, run).read_text(encoding="utf-8"))
        archives = frozenset(str(row["name"]) for row in report["rows"] if row["archive"] is not None)
        return _Report(archives, str(report["recommended"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a run without a report is served all the same


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
