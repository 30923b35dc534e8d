"""Reads the finished runs of a store: reports, cards, and whether files are complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from optimize.measure.rows import SCHEMA, Report, Row
from optimize.report.number_format import NONE, moment, percent, times
from serve.common import layout
from serve.runs import sealed_files
from serve.runtime.card.card import CARD_FILE, Card, load_card, read_card
from serve.runtime.errors import UserError, did_you_mean

#: The heads of `RunSummary.cells`.
HEADS = ("run", "model", "data", "artifacts", "recommended", "accuracy %", "speed", "measured")


@dataclass(frozen=True)
class RunSummary:
    """One line about a run. ``score`` and ``speedup`` are those of the recommended pair.

    A speed-up is relative to the run's own fastest float execution, because times of different measurements are not
    comparable.
    """

    name: str
    model: str
    data: str
    artifacts: int
    recommended: str | None
    score: float | None
    speedup: float | None
    taken: str

    def cells(self) -> tuple[str, ...]:
        """Return the fields as text."""
        return (
            self.name,
            self.model,
            self.data,
            str(self.artifacts),
            self.recommended or NONE,
            percent(self.score),
            times(self.speedup),
            self.taken,
        )


def read_runs(store: Path) -> Iterator[RunSummary | UserError]:
    """Yield the runs of a store by name. For an unreadable report, yield its error."""
    for path in sorted(store.glob(f"*/{layout.REPORT_FILE}")):
        try:
            report = report_of(store, path.parent.name)
        except UserError as error:
            yield error
            continue
        measured = report.chosen_pair.measured if report.chosen_pair else None
        yield RunSummary(
            name=path.parent.name,
            model=report.model,
            data=report.data.name,
            artifacts=sum(row.file is not None for row in report.rows),
            recommended=report.recommendation.pair,
            score=measured.accuracy.score if measured else None,
            speedup=measured.speedup.value if measured else None,
            taken=moment(report.measurement.taken),
        )


def report_of(store: Path, run: str) -> Report:
    """Return a run's report.

    Raises:
        UserError: the run does not exist (the nearest is named). Or its report cannot be read, is of another version,
            or differs from the sealed one.
    """
    report = _parsed(store, run)
    sealed_files.require(store / run, layout.REPORT_FILE)
    return report


def _parsed(store: Path, run: str) -> Report:
    """Return a run's report without checking its seal."""
    path = layout.report_path(store, run)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return Report.from_json(body)
    except (FileNotFoundError, NotADirectoryError):
        names = sorted(found.parent.name for found in store.glob(f"*/{layout.REPORT_FILE}"))
        raise UserError(
            f"no run {run!r} in {store}{did_you_mean(run, names)}; the runs are: {', '.join(names) or 'none'}"
        ) from None
    except ValidationError as error:
        if isinstance(body, dict) and isinstance(version := body.get("schema"), int) and version != SCHEMA:
            raise UserError(
                f"{path} is of {'an older' if version < SCHEMA else 'a newer'} version (schema {version}, not "
                f"{SCHEMA}); run the model again"
            ) from None
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(
            f"{path} is damaged; run the model again to rebuild it ({where}: {first['msg'].lower()})"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged; run the model again to rebuild it (it is not JSON)") from None


def card_of(store: Path, run: str, artifact: str) -> str:
    """Return the card of an artifact as JSON text.

    Raises:
        UserError: as in `artifact_folder`, or the card differs from the sealed one.
        CardError: the card is missing or damaged.
    """
    folder = artifact_folder(store, run, artifact)
    sealed_files.require(store / run, (folder / CARD_FILE).relative_to(store / run).as_posix())
    read_card(folder)
    return (folder / CARD_FILE).read_text(encoding="utf-8")


def faults_of(
    store: Path, name: str, told: Callable[[float, str], None] = lambda share, name: None
) -> tuple[int, list[sealed_files.Fault]]:
    """Check every file of a run, or the folder and the archive of ``run/artifact``.

    Args:
        store: the folder of the run.
        name: the run, or ``run/artifact``.
        told: called before each artifact with the share that is checked, in [0, 1], and the artifact's name.

    Returns:
        How many artifacts and archives were checked, and the faults of files.

    Raises:
        UserError: the run or its artifact does not exist, its list of files is missing or damaged, or its report cannot
            be read at all.
    """
    run, only = layout.run_and_artifact(name)
    folder = store / run
    rows = _parsed(store, run).rows
    if only:
        _check_artifact(run, only, rows)
        rows = tuple(row for row in rows if row.name == only)
    left = sealed_files.names(folder)
    checked = 0
    faults = []
    for done, row in enumerate(rows):
        told(done / len(rows), row.name)
        if row.file is None:
            continue
        checked += 2
        beneath = f"{layout.ARTIFACTS}/{row.name}/"
        archive = layout.archive_path(store, run, row.name)
        own = [each for each in left if each.startswith(beneath) or layout.archive_of(folder / each) == archive]
        left = [each for each in left if each not in own]
        faults += sealed_files.faults(folder, own)
    return checked, faults if only else faults + sealed_files.faults(folder, left)


def artifact_folder(store: Path, run: str, artifact: str) -> Path:
    """Return the folder of a run's artifact.

    Raises:
        UserError: the run or its artifact does not exist. The nearest name is suggested.
    """
    _check_artifact(run, artifact, report_of(store, run).rows)
    return layout.artifact_folder(store, run, artifact)


def _check_artifact(run: str, artifact: str, rows: Sequence[Row]) -> None:
    names = [row.name for row in rows if row.file is not None]
    if artifact not in names:
        near = did_you_mean(artifact, names)
        raise UserError(f"run {run!r} has no artifact {artifact!r}{near}; it has {', '.join(names)}")


def line_of(store: Path, run: str, artifact: str) -> Iterator[tuple[Path, Card]]:
    """Yield folder and card of an artifact's ancestors that its run still has, and its own last."""
    own = load_card(layout.artifact_folder(store, run, artifact))
    for ancestor in own.lineage:
        folder = layout.artifact_folder(store, run, ancestor.name)
        if not (folder / CARD_FILE).is_file():
            continue
        card = load_card(folder)
        if card.lineage and card.lineage[-1].key == ancestor.key:
            yield folder, card
