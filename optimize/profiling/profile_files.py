"""Writes profiles into a folder beside the run, with figures, tables and charts, and updates the run's page."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from optimize.profiling.chrome_trace import chrome_trace
from optimize.profiling.profile_records import Profiled
from optimize.profiling.profile_table import markdown
from optimize.report.finished_runs import report_of
from optimize.report.number_format import number
from optimize.report.page import LayerChart, write_html
from optimize.report.stored_charts import stored_charts
from optimize.store.atomic_files import write_atomically, write_json
from optimize.store.keys import content
from optimize.store.objects import Store
from serve.common import layout
from serve.runs import sealed_files
from serve.runtime.card.card import read_card
from serve.runtime.errors import CardError, UserError


def write_profile(found: Profiled, store: Path, run: str) -> Path:
    """Write ``<store>/<run>.profile/``: an artifact's figures and tables, and a chart for each execution.

    Args:
        found: the profiles.
        store: the run's store.
        run: its name.

    Returns:
        The folder.
    """
    from optimize.profiling.profile_chart import profile_svg  # imports matplotlib, which showing charts does not need

    folder = _folder(store, run)
    folder.mkdir(parents=True, exist_ok=True)
    with Store(store).lock(layout.run_lock(folder.name)):
        written = [folder / f"{found.artifact}.json", folder / f"{found.artifact}.md"]
        write_json(found.to_json(), written[0])
        write_atomically(written[1], markdown(found).encode())
        for one in found.profiles:
            title = f"{found.title}: {found.artifact} by {one.runs_on}, batch {found.batch}"
            written.append(folder / f"{chart_name(found.artifact, one.runs_on)}.svg")
            write_atomically(written[-1], profile_svg(title, one))
        if sealed_files.is_sealed(folder):
            sealed_files.reseal(folder, written)
        else:
            sealed_files.seal(folder)
    return folder


def layer_charts(store: Path, run: str) -> list[LayerChart]:
    """Return the charts of a run's profiles, without damaged ones, and without those of artifacts made anew since."""
    found = []
    whole = functools.partial(sealed_files.holds, _folder(store, run))
    for path in sorted(_folder(store, run).glob("*.json")):
        try:
            profiled = Profiled.from_json(json.loads(path.read_text(encoding="utf-8")))
            card = read_card(layout.artifact_folder(store, run, profiled.artifact))
        except (OSError, ValueError, CardError):  # another version, or an artifact that the run no longer has
            continue
        if content(card) != profiled.content or not whole(path.name):
            continue
        for one in profiled.profiles:
            drawn = path.with_name(f"{chart_name(profiled.artifact, one.runs_on)}.svg")
            if drawn.is_file() and whole(drawn.name):
                said = f"batch {profiled.batch}, {len(one.layers)} layers, {number(one.call_ms, 'ms')} a call"
                found.append(LayerChart(f"{profiled.artifact} by {one.runs_on}", said, drawn.read_bytes()))
    return found


def write_page(store: Path, run: str) -> None:
    """Write a run's page again, with the charts of its profiles."""
    objects = Store(store)
    with objects.lock(layout.run_lock(run)):
        report = report_of(store, run)
        page = store / run / layout.PAGE_FILE
        write_html(report, page, stored_charts(report, objects), layer_charts(store, run))
        sealed_files.reseal(page.parent, [page])


def _folder(store: Path, run: str) -> Path:
    return store / f"{run}{layout.PROFILE_ENDING}"


def chart_name(artifact: str, runs_on: str) -> str:
    """Return the file name of an execution's chart, without its ending."""
    return f"{artifact}@{re.sub(r'[^A-Za-z0-9_.=+-]+', '-', runs_on).strip('-')}"


def write_trace(found: Profiled, path: Path) -> None:
    """Write a Chrome trace.

    Raises:
        UserError: it cannot be written there.
    """
    try:
        write_atomically(path, json.dumps(chrome_trace(found), indent=1).encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
