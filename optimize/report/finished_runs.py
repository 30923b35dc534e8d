"""The finished runs of a store: their reports, their cards, and whether their files are whole."""

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

#: What stands above `RunSummary.cells`.
HEADS = ("run", "model", "data", "artifacts", "recommended", "top-1 %", "speed", "measured")


@dataclass(frozen=True)
class RunSummary:
    """One line about a run; ``top1`` and ``speedup`` are those of the recommended pair.

    A speed-up is to the run's own fastest float execution: times of different measurements do not compare.
    """

    name: str
    model: str
    data: str
    artifacts: int
    recommended: str | None
    top1: float | None
    speedup: float | None
    taken: str

    def cells(self) -> tuple[str, ...]:
        """The fields as text."""
        return (
            self.name,
            self.model,
            self.data,
            str(self.artifacts),
            self.recommended or NONE,
            percent(self.top1),
            times(self.speedup),
            self.taken,
        )


def read_runs(store: Path) -> Iterator[RunSummary | UserError]:
    """The runs of a store, by name; of a report that cannot be read, what is wrong with it."""
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
            top1=measured.accuracy.top1 if measured else None,
            speedup=measured.speedup.value if measured else None,
            taken=moment(report.measurement.taken),
        )


def report_of(store: Path, run: str) -> Report:
    """A run's report.

    Raises:
        UserError: there is no such run (the nearest is named), its report cannot be read, is of another version, or is
            not what the run was sealed with.
    """
    report = _parsed(store, run)
    sealed_files.require(store / run, layout.REPORT_FILE)
    return report


def _parsed(store: Path, run: str) -> Report:
    """A run's report, which may have been changed."""
    path = layout.report_path(store, run)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return Report.from_json(body)
    except (FileNotFoundError, NotADirectoryError):
        names = sorted(found.parent.name for found in store.glob(f"*/{layout.REPORT_FILE}"))
        raise UserError(
            f"no run {run!r} in {store}{did_you_mean(run, names)}; there are: {', '.join(names) or 'none'}"
        ) from None
    except ValidationError as error:
        if isinstance(body, dict) and isinstance(version := body.get("schema"), int) and version != SCHEMA:
            raise UserError(
                f"{path} is of {'an older' if version < SCHEMA else 'a newer'} version (schema {version}, and not "
                f"{SCHEMA}); run the model again to make it anew"
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
    """The card of an artifact as JSON text.

    Raises:
        UserError: as `artifact_folder`; or the card is not what the run was sealed with.
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
        store: where the run is.
        name: of the run, or ``run/artifact``.
        told: called before each artifact with the share of them, in [0, 1], that is checked, and its name.

    Returns:
        How many artifacts and archives were checked, and what is wrong with files.

    Raises:
        UserError: there is no such run, it has no such artifact, its list of files is missing or damaged, or its report
            cannot be read at all.
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
    """Where a run's artifact is.

    Raises:
        UserError: there is no such run, or it has no such artifact: the nearest is named.
    """
    _check_artifact(run, artifact, report_of(store, run).rows)
    return layout.artifact_folder(store, run, artifact)


def _check_artifact(run: str, artifact: str, rows: Sequence[Row]) -> None:
    names = [row.name for row in rows if row.file is not None]
    if artifact not in names:
        near = did_you_mean(artifact, names)
        raise UserError(f"run {run!r} has no artifact {artifact!r}{near}; it has {', '.join(names)}")


def line_of(store: Path, run: str, artifact: str) -> Iterator[tuple[Path, Card]]:
    """Folder and card of what an artifact was made from, as far as its run still has it, and its own, the last."""
    own = load_card(layout.artifact_folder(store, run, artifact))
    for ancestor in own.lineage:
        folder = layout.artifact_folder(store, run, ancestor.name)
        if not (folder / CARD_FILE).is_file():
            continue
        card = load_card(folder)
        if card.lineage and card.lineage[-1].key == ancestor.key:
            yield folder, card
