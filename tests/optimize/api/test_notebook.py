"""What a real notebook shows of the API: tables, plots, data frames and mistakes."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import optimize as opt
from tests.optimize.passes.test_notebook_passes import HELPERS, PASS, digest
from tests.optimize.synthetic import synthetic

SETUP = """
from tests.optimize.synthetic import synthetic
import optimize as opt
table = opt.Comparison(synthetic())
"""

CELLS = {
    "setup": SETUP,
    "shown": "table",
    "printed": "print(table)",
    "plotted": "table.plot()",
    "mistaken": "opt.load(3)",
    "settings": "opt.Ptq(images='many', seed=-1)",
    "caused": "raise opt.PipelineError('it failed') from ValueError('the cause')",
    "helpers": HELPERS,
    "pass": f"{PASS}print(SNAP.source_digest())",
    "caught": "try:\n    opt.load(3)\nexcept opt.UserError as error:\n    print(error)",
}


@pytest.fixture(scope="module")
def outputs() -> Mapping[str, list[Any]]:
    """What each cell of a notebook gave, by its name."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.values()])
    where = {"metadata": {"path": Path(__file__).parents[3]}}
    NotebookClient(notebook, timeout=120, allow_errors=True, resources=where).execute()
    return {name: cell["outputs"] for name, cell in zip(CELLS, notebook["cells"], strict=True)}


def words(element: str) -> str:
    """The text of an element of HTML, as somebody reads it who has none of its styles."""
    return html.unescape(re.sub(r"<[^>]+>", "", element))


def test_a_figure_and_its_small_print_do_not_run_together_without_styles(outputs: Mapping[str, list[Any]]) -> None:
    cells = [words(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", outputs["shown"][0]["data"]["text/html"])]
    assert "29.5 of 250" in cells  # the p99 of the baseline: 22.2 ms * 1.33
    assert "0.60× 1.15× eager" in cells
    assert not [cell for cell in cells if re.search(r"\dof |\dbatch|×\d", cell)]


def test_the_table_that_is_seen_first_has_no_more_columns_than_the_pages_and_the_rest_unfolds(
    outputs: Mapping[str, list[Any]],
) -> None:
    shown = outputs["shown"][0]["data"]["text/html"]
    first, more = (re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", part) for part in shown.split("<details>")[:2])
    assert first[:3] == ["artifact", "runs on", "precision"]
    assert "size" in first
    assert len(first) <= 13
    assert not set(first[1:]) & set(more)
    assert {"SQNR dB", "memory", "made in"} <= set(more)


def test_a_printed_table_is_text_that_fits_into_a_cell(outputs: Mapping[str, list[Any]]) -> None:
    assert [output["output_type"] for output in outputs["printed"]] == ["stream"]
    text = outputs["printed"][0]["text"]
    assert max(map(len, text.splitlines())) <= 115
    assert "\x1b" not in text
    for row in synthetic().rows:
        assert row.name in text


def test_a_plot_without_a_path_is_a_picture_below_its_cell(outputs: Mapping[str, list[Any]]) -> None:
    assert outputs["plotted"][0]["data"]["image/png"].startswith("iVBOR")  # PNG in base64


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("mistaken", r"UserError: model: must be the name of .*, not 3 \(int\)"),
        ("settings", r"UserError: Ptq: images: .*'many'.*; seed: .*-1.*"),
    ],
)
def test_a_mistake_is_one_line_and_no_frames(outputs: Mapping[str, list[Any]], cell: str, line: str) -> None:
    (shown,) = outputs[cell]
    assert shown["ename"] == "UserError"
    (told,) = shown["traceback"]
    assert re.fullmatch(line, told)


def test_what_another_exception_caused_keeps_its_traceback(outputs: Mapping[str, list[Any]]) -> None:
    told = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(outputs["caused"][0]["traceback"]))
    assert "ValueError: the cause" in told
    assert told.endswith("PipelineError: it failed")


def test_a_mistake_can_be_caught_as_anywhere(outputs: Mapping[str, list[Any]]) -> None:
    assert outputs["caught"][0]["text"].startswith("model: must be")


def test_a_pass_of_a_cell_is_known_by_its_code(outputs: Mapping[str, list[Any]]) -> None:
    assert outputs["pass"][0]["text"].strip() == digest(HELPERS, PASS)


def test_a_plot_without_a_path_is_matplotlibs_figure() -> None:
    from matplotlib.figure import Figure

    figure = opt.Comparison(synthetic()).plot()
    assert isinstance(figure, Figure)
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ["median latency of one image, ms (log scale; further left is faster)"]


def test_a_data_frame_begins_with_the_columns_of_the_table_in_its_order() -> None:
    frame = opt.Comparison(synthetic()).to_pandas()
    first = "execution.engine execution.device file.precision accuracy.top1 accuracy.difference.delta"
    times = "latency_ms.p50 latency_ms.p95 latency_ms.p99"
    assert list(frame.columns[:5]) == first.split()
    assert list(frame.columns[7:10]) == times.split()
    places = {name: place for place, name in enumerate(frame.columns)}
    assert places["throughput.1"] < places["file.bytes"] < places["skip.reason"] < places["config.steps"]
    assert frame["skip.reason"]["onnx-half"] == "needs a CUDA device, and this machine has none"
    assert frame.columns.is_unique
