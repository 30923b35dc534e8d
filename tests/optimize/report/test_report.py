"""The report's outputs, read back as a reader would: the page by an HTML parser, the table as rendered text."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from rich.console import Console

from optimize.measure.figures import Difference
from optimize.measure.latency import Speed, level
from optimize.measure.rows import Reference, Report, Results, Row
from optimize.measure.stored_examples import Examples, write_examples
from optimize.report.columns import Cell, Column, columns_of
from optimize.report.number_format import times
from optimize.report.page import fragment, plot, write_html
from optimize.report.plots import marks, pareto_front
from optimize.report.report_text import method, verdict
from optimize.report.stored_charts import stored_charts
from optimize.report.table import print_table, table
from optimize.report.table_rows import Line, lines
from optimize.run.recommendation.rule import Recommend
from optimize.run.recommendation.selection import recommend
from optimize.statistics import paired_interval
from optimize.store.atomic_files import write_json
from optimize.store.layer_effects import Effect
from optimize.store.objects import Store
from optimize.tasks.classification import CLASSIFICATION
from tests.optimize.candidates import Case, differences
from tests.optimize.synthetic import NO_GPU, RULE, SELECTION, body, ratio, synthetic, timed


class Page(HTMLParser):
    """The page's text, its tables' rows and all its attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.classes: list[str] = []
        self._in_style = self._in_cell = False
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._in_style = tag == "style"
        if tag == "tr":
            self.rows.append([])
            self.classes.append(dict(attrs).get("class") or "")
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            return
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += f"{data} "

    def row(self, name: str) -> tuple[str, list[str]]:
        """The class and cells of the first table row that is headed by ``name``."""
        for kind, cells in zip(self.classes, self.rows, strict=True):
            if cells and cells[0].split()[:1] == [name]:
                return kind.strip(), [" ".join(cell.split()) for cell in cells]
        raise AssertionError(f"no row is headed {name!r}")


def page_of(report: Report, folder: Path, **options: Any) -> Page:
    write_html(report, folder / "report.html", stored_charts(report, Store(folder / "store")), **options)
    return Page(folder / "report.html")


def rendered(report: Results, width: int, **options: Any) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False)
    console.print(table(report, **options))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return str(text)


def test_the_page_shows_every_artifact_and_baseline_with_its_numbers(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    for line in lines(synthetic(), every=True):
        assert page.row(line.name)
        assert page.row(line.id if not line.first else line.name)
    heads, (kind, cells) = page.row("artifact")[1], page.row("ptq")
    assert kind == ""
    shown = dict(zip(heads, cells, strict=True))
    assert shown["top-1 %"] == "90.88"
    assert (shown["Δ points"], shown["95 %"]) == ("−0.23", "−0.85 to +0.35")
    assert (shown["p50 ms"], shown["p99 ms"]) == ("4.44", "5.91 of 250")
    assert shown["speed"] == "3.00× 5.74× eager"
    assert shown["runs on"] == "torchscript"
    assert shown["size"] == "11.1 MB"
    assert "25.5" in page.row("eager")[1]


def test_the_page_opens_with_the_verdict_and_its_rule(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    verdict = (
        "qat@torchscript is recommended: 2.92× the speed of the fastest float execution (onnx@openvino; 4.55 instead "
        "of 13.3 ms at p50), 5.60× eager PyTorch; "
    )
    assert verdict + "11.1 MB instead of 44.4 MB; top-1 91.33 % (+0.22 points" in page.text
    assert page.text.index(verdict) < page.text.index("img/s")
    assert f"Rule: {RULE}" in page.text
    assert page.row("qat")[0] == "recommended"
    assert "its interval reaches below the limit" in page.text


def trained(scores: list[float], best: int | None, **more: Any) -> dict[str, Any]:
    times = {"data": 1.0, "compute": 7.0, "communication": 0.0, "judgement": 2.0, "checkpoints": 0.0}
    steps = range(1, 2 * len(scores) + 1)
    return {
        "epochs": [{"loss": 1.0, "held_out_score": score, "times": times} for score in scores],
        "points": [{"step": step, "loss": 2.0 / step, "learning_rate": 0.01 * step} for step in steps],
        **{"steps": 2, "best": best, "before": None, "processes": 1, **more},
    }


def test_the_page_draws_each_training_and_says_where_its_time_went(tmp_path: Path) -> None:
    assert "Training" not in page_of(synthetic(), tmp_path / "none").text
    report = body()
    by_name = {row["name"]: row for row in report["rows"]}
    by_name["baseline"]["training"] = [trained([0.5, 0.8125, 0.75], 1, processes=2)]
    by_name["qat"]["training"] = [trained([0.6], None, before=0.71875), trained([0.9], 0)]
    page = page_of(Report.from_json(report), tmp_path)
    heads = re.findall(r'<h3 class="after">(.*?)</h3>', page.source)
    assert [head for head in heads if head != "Good to know"] == ["baseline, 2 processes", "qat, 1 of 2", "qat, 2 of 2"]
    first, *_ = re.findall(r'aria-label="(Training of .*?)"', page.source)
    assert first == "Training of baseline: loss 2 to 0.333 in 3 epochs."
    for words in ("kept: 81.25 %", "kept: 71.88 %", "kept: 90.00 %", "loss (nats)", "learning rate (dashed)"):
        assert words in page.text
    said = " ".join(page.text.split())
    assert said.count("10.0 s an epoch: data 10 % compute 70 % held-out images 20 %") == 3
    assert "communication" not in said
    identities = re.findall(r'\sid="([^"]+)"', page.source)
    assert len(identities) == len(set(identities))
    assert Report.from_json(json.loads(json.dumps(Report.from_json(report).to_json()))) == Report.from_json(report)


def test_what_was_skipped_says_why_and_shows_no_number(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    kind, cells = page.row("onnx-half")
    assert kind == "skipped"
    assert cells[1:] == [f"Skipped: {NO_GPU}"]
    assert "Skipped: no C++ compiler on this machine" in page.row("torch.compile")[1]


def test_the_page_tells_that_images_are_kept_whole(tmp_path: Path) -> None:
    report = synthetic()
    whole = dataclasses.replace(report.data.preprocessing, resize="letterbox")
    data = report.data.model_copy(update={"preprocessing": whole})
    assert "letterbox in 224" in page_of(report.model_copy(update={"data": data}), tmp_path).text


def test_what_is_slower_than_its_parent_says_so_in_words(tmp_path: Path) -> None:
    cells = page_of(synthetic(), tmp_path).row("half")[1]
    assert "0.82× slower 0.77× to 0.88×" in cells
    assert "slower" not in " ".join(page_of(synthetic(), tmp_path).row("ptq")[1])


def test_the_page_tells_machine_data_versions_method_and_discordant_counts(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    assert "Imaginary CPU 9000" in page.text
    assert "synthetic squares" in page.text
    assert "2,222 to judge" in page.text
    assert "the weights: resize, crop, interpolation; --mean: mean; ImageNet's, as nobody said otherwise" in page.text
    assert "onnxruntime" in page.text
    assert "5 rounds" in page.text
    assert "are of 250 calls each" in page.text
    assert "+11" in page.text
    assert "−13" in page.text
    assert "exact" in page.text
    assert "–, –" not in page.text


def test_of_memory_on_a_gpu_it_is_said_that_other_processes_enter_it() -> None:
    def said(device: str) -> list[str]:
        document = body()
        document["rows"][0]["pairs"][0]["execution"]["device"] = device
        return [sentence for sentence in method(Report.from_json(document)) if "by whomever" in sentence]

    assert said("cpu") == []
    (sentence,) = said("cuda")
    assert "what other processes took or gave back meanwhile" in sentence


def test_the_page_refers_to_nothing_outside_itself_and_runs_no_script(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page.source)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#")


def with_classes(count: int, losing: int) -> Report:
    """A report of so many classes, of which one loses beyond chance and the last has no images."""
    classes = [
        {
            "name": f"class {place}",
            "count": 100 + place,
            "images": 100 + place,
            "scores": {"baseline@torchscript": 0.9, "ptq@torchscript": 0.5 if place == losing else 0.9},
            "differences": {
                "ptq@torchscript": {"delta": -0.4, "low": -0.5, "high": -0.3, "worse": True}
                if place == losing
                else {"delta": place / 1e4, "low": -0.01, "high": 0.03, "worse": False}
            },
        }
        for place in range(count - 1)
    ]
    none = {"name": "absent", "count": 0, "images": 0, "scores": {}, "differences": {}}
    return synthetic(classes=[*classes, none])


@pytest.mark.parametrize("count", [3, 11, 150])
def test_the_page_lists_classes_with_the_largest_losses_first(count: int, tmp_path: Path) -> None:
    report = with_classes(count, losing=1)
    page = page_of(report, tmp_path)
    start = next(place for place, row in enumerate(page.rows) if row[0].strip() == "class")
    heads = [" ".join(head.split()) for head in page.rows[start]]
    first, second = ([" ".join(cell.split()) for cell in page.rows[start + 1 + place]] for place in range(2))
    assert heads == [
        *("class", "Δ points ptq@torchscript", "95 %", "accuracy % baseline@torchscript"),
        *("accuracy % ptq@torchscript", "images"),
    ]
    assert first == ["class 1 loses", "−40.00", "−50.00 to −30.00", "90.00", "50.00", "101"]
    assert second[:2] == ["class 0", "0.00"]
    listed = [
        row[0].split()[1] for row in page.rows if row and row[0].startswith("class ") and row[0].strip() != "class"
    ]
    assert sorted(listed, key=int) == [str(place) for place in range(count - 1)]
    assert page.row("absent")[1][1:5] == ["–"] * 4
    assert (f"{count - 20} more classes" in page.text) == (count > 20)
    said = (
        f"ptq@torchscript against baseline@torchscript: accuracy is lower in 1 of {count - 1} classes, beyond chance: "
        "class 1 −40.00."
    )
    assert said in page.text
    assert said in rendered(report, 400)
    assert Report.from_json(report.to_json()) == report


def test_pictures_of_answers_are_in_the_page_with_words_for_each(tmp_path: Path) -> None:
    hostile = "cat</li><script>"
    panel = {"title": "target", "said": "cat 50.0%", "source": "data:image/png;base64,iVBORw0KGgo="}
    examples = Examples.from_json(
        {
            "about": "What the last panel shows.",
            "groups": [
                {
                    "title": "From hard to easy",
                    "rule": "The middle of each part.",
                    "examples": [{"caption": f"Image 3 ({hostile})", "panels": [panel, panel]}],
                }
            ],
            "legend": [[hostile, "#800000"], ["dog", "#008000"]],
        }
    )
    store = Store(tmp_path / "store")
    store.obtain("e" * 64, lambda folder: write_examples(examples, folder))
    page = page_of(synthetic(examples="e" * 64), tmp_path)
    pictures = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    assert pictures == [panel["source"]] * 2
    assert [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")] == ["target: cat 50.0%"] * 2
    assert "script" not in page.tags
    assert page.text.count(hostile) == 2
    assert "The middle of each part." in page.text
    assert ("i", "style", "background:#800000") in page.attributes
    assert "img" not in page_of(synthetic(examples="f" * 64), tmp_path).tags  # the store has lost them


def test_each_chart_is_described_in_words_and_ids_are_unique(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    described = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(described) == page.tags.count("svg") == 3
    assert all("qat" in words for words in described)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert all(value[1:] in ids for _, name, value in page.attributes if name in ("href", "xlink:href"))


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><b onmouseover=x>', "a & b $x^2$ {{ run }} [red]"])
def test_names_are_shown_and_never_obeyed(hostile: str, tmp_path: Path) -> None:
    made = body()
    made["model"] = made["title"] = made["data"]["name"] = made["versions"]["torch"] = hostile
    made["rows"][4]["name"] = made["recommended"] = made["recommendation"]["name"] = hostile
    made["rows"][4]["pairs"][0]["id"] = made["recommendation"]["pair"] = f"{hostile}@torchscript"
    made["rows"][6] |= {"notes": [hostile], "parent": hostile}
    made["rows"][7]["skip"]["reason"] = made["recommendation"]["rule"] = hostile
    report = Report.from_json(made)
    page = page_of(report, tmp_path)
    assert not {"script", "b"} & set(page.tags)
    assert page.text.count(hostile) >= 8
    assert any(tag == "svg" and hostile in value for tag, _, value in page.attributes)
    assert hostile[:8] in rendered(report, 120)


def test_the_same_report_gives_the_same_page(tmp_path: Path) -> None:
    # In two stores, so that the charts are drawn twice.
    assert page_of(synthetic(), tmp_path / "one").source == page_of(synthetic(), tmp_path / "two").source


def test_charts_are_drawn_once_and_anew_where_what_they_show_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    first = stored_charts(synthetic(), store)
    assert first.paper is not None
    assert first.paper.startswith(b"<?xml")
    faster = body()
    faster["rows"][4]["pairs"][0]["measured"]["latency_ms"]["p50"] = 0.77
    changed = stored_charts(Report.from_json(faster), store)
    assert "0.77 ms" in changed.pareto
    assert "0.77 ms" not in first.pareto
    assert stored_charts(synthetic(title="other"), store).key != first.key

    def broken(*args: object) -> None:
        raise AssertionError("drawn again")

    for name in ("pareto_svg", "pareto_image", "throughput_svg"):
        monkeypatch.setattr(f"optimize.report.plots.{name}", broken)
    again = body() | {"seconds": 1.5, "created": "2002-02-03T04:05:06Z"}
    again["measurement"]["cached"] = True
    again["rows"] = [row | {"cached": True, "seconds": 0.25} for row in again["rows"]]
    assert stored_charts(Report.from_json(again), store) == first
    victim = store.objects / first.key / "pareto-page.svg"
    victim.write_text("damaged")
    with pytest.raises(AssertionError, match="drawn again"):
        stored_charts(synthetic(), store)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_keeps_the_key_figures(width: int) -> None:
    text = rendered(synthetic(), width)
    lines = {words[0]: line for line in text.splitlines() if (words := line.replace("★", " ").split())}
    for row in synthetic().rows:
        assert row.name in lines
    for figure in ("90.88", "−0.23", "4.44", "3.00×", "11.1 MB"):
        assert figure in lines["ptq"]
    assert "…" not in text.replace(" … ", "")
    assert ("0.82× slower" in text) is (width == 120)  # too narrow for the column, it is said beneath
    assert "0.82× the speed of fuse, slower than its parent" in " ".join(text.split())
    assert f"onnx-half: skipped, {NO_GPU}" in " ".join(text.split())
    assert "★ qat" in text
    assert RULE in " ".join(text.split())


def test_a_table_between_the_two_drops_columns_and_not_the_interval() -> None:
    text = rendered(synthetic(), 104)
    assert "−0.85 … +0.35" in text
    assert "p99 ms" not in text


def test_the_wide_table_adds_interval_tail_and_throughput() -> None:
    assert "−0.85 … +0.35" in rendered(synthetic(), 120)
    assert "img/s" in rendered(synthetic(), 120)
    assert "p99 ms" in rendered(synthetic(), 160)
    assert "p99 ms" not in rendered(synthetic(), 80)


def test_an_artifact_stands_there_as_its_fastest_execution_and_as_all_of_them_when_asked() -> None:
    def int8(**options: bool) -> list[list[str]]:
        text = rendered(synthetic(), 160, **options)
        return [line.split()[:2] for line in text.splitlines() if line.split()[:1] == ["onnx-int8"]]

    assert int8() == [["onnx-int8", "openvino"]]  # though it is not the first of the row
    assert int8(every=True) == [["onnx-int8", "openvino"], ["onnx-int8", "onnxruntime"]]
    assert f"onnx@onnxruntime-cuda: skipped, {NO_GPU}" not in rendered(synthetic(), 160)
    assert f"onnx@onnxruntime-cuda: skipped, {NO_GPU}" in rendered(synthetic(), 160, every=True)


def test_the_recommended_pair_stands_for_its_artifact_though_another_is_faster() -> None:
    made = body() | {"recommended": "onnx"}
    made["recommendation"] |= {"name": "onnx", "pair": "onnx@onnxruntime"}
    report = Report.from_json(made)
    assert "★ onnx           onnxruntime" in rendered(report, 160)
    assert report.rows[6].best is not None
    assert report.rows[6].best.id == "onnx@openvino"


def test_on_the_page_the_other_executions_unfold_without_a_script(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    kind, cells = page.row("onnx")
    assert cells[0] == "onnx from fuse 2 other executions"
    assert "13.3" in cells
    kind, cells = page.row("onnx@onnxruntime")
    assert kind == "other"
    assert "14.4" in cells
    assert page.row("onnx@onnxruntime-cuda") == ("other skipped", ["onnx@onnxruntime-cuda", f"Skipped: {NO_GPU}"])
    # In both tables, and only where there is something to unfold.
    assert page.source.count('<details class="more"><summary>') == 4
    assert "tbody.artifact:not(:has(details.more[open])) tr.other { display: none; }" in page.source


def test_the_page_says_what_speeds_are_multiples_of_and_what_the_references_are(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    assert "Speed is a multiple of that of onnx@openvino, the fastest float execution" in page.text
    assert "“eager”: as PyTorch runs it by default" in page.text
    assert "“torch.compile”: compiled by" in page.text
    assert SELECTION in page.text
    assert SELECTION in " ".join(rendered(synthetic(), 120).split())


def test_the_other_executions_of_an_artifact_are_rejected_out_of_the_way(tmp_path: Path) -> None:
    source = page_of(synthetic(), tmp_path).source
    heads = ("Why not the others", "Why not their other executions")
    best, rest = (source.index(f"<summary>{head}</summary>") for head in heads)
    assert best < source.index("<strong>ptq@torchscript</strong>") < rest
    assert rest < source.index("<strong>onnx-int8@onnxruntime</strong>")


def test_every_other_execution_is_a_pale_mark_without_words() -> None:
    found = {point.name: point for point in marks(synthetic())}
    assert found["onnx-int8"].latency == 6.66
    assert not found["onnx-int8"].beside
    assert (found["onnx-int8@onnxruntime"].latency, found["onnx-int8@onnxruntime"].beside) == (8.88, True)
    assert found["onnx-int8@onnxruntime"].bounds is None


def nothing_measured() -> Report:
    """The same report of a machine that can run nothing of it."""
    made = body()
    skip = {"kind": "cannot_run_here", "reason": NO_GPU}
    made["rows"] = [row | {"pairs": [], "skip": skip} for row in made["rows"]]
    made["references"] = [line | {"measured": None, "skip": skip} for line in made["references"]]
    made["recommended"] = made["yardstick"] = made["eager"] = None
    made["recommendation"] |= {"name": None, "pair": None, "execution": None}
    return Report.from_json(made)


def test_a_report_without_numbers_is_still_a_report(tmp_path: Path) -> None:
    report = nothing_measured()
    page = page_of(report, tmp_path)
    assert "No artifact is recommended." in page.text
    assert "None" not in page.text
    assert "nan" not in page.text
    assert "No artifact is recommended." in rendered(report, 80)
    for row in report.rows:
        assert row.name in page.text


def test_json_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_json(synthetic().to_json(), path)
    assert Report.from_json(json.loads(path.read_text(encoding="utf-8"))) == synthetic()
    assert path.stat().st_mode & 0o044


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_no_json_is_written_with_a_number_it_cannot_hold(number: float, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")
    made = body()
    made["rows"][3]["pairs"][0]["measured"]["accuracy"]["top1"] = number
    with pytest.raises(ValueError, match="JSON"):
        write_json(made, path)
    with pytest.raises(ValidationError, match="finite"):
        Report.from_json(made)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(body(), path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_the_plot_is_an_image_of_its_suffix(tmp_path: Path) -> None:
    plot(synthetic(), tmp_path / "pareto.png")
    plot(synthetic(), tmp_path / "pareto.svg")
    with Image.open(tmp_path / "pareto.png") as image:
        assert image.width > 1200
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50
    drawn = (tmp_path / "pareto.svg").read_text(encoding="utf-8")
    assert "★ qat, 11.1 MB" in drawn
    assert "half, 22.2 MB (slower)" in drawn
    assert "onnx-half" not in drawn
    with pytest.raises(ValueError, match="gif"):
        plot(synthetic(), tmp_path / "pareto.gif")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot(nothing_measured(), tmp_path / "none.png")


def test_the_front_holds_what_no_other_beats_in_both() -> None:
    known = [(5.0, 0.90), (4.0, 0.80), (6.0, 0.90), (4.0, 0.85), (9.0, 0.95), (10.0, 0.10)]
    assert [known[i] for i in pareto_front(known)] == [
        (4.0, 0.85),
        (5.0, 0.9),
        (9.0, 0.95),
    ]


def test_a_new_column_is_one_record_and_stands_in_the_terminal_and_on_the_page(tmp_path: Path) -> None:
    def letters(line: Line, _: Results) -> Cell:
        return Cell(f"{len(line.name)} letters")

    columns = (*columns_of(synthetic()), Column("letters", "length of name", "", letters, rank=1))
    heads, cells = (page_of(synthetic(), tmp_path, columns=columns).row(name)[1] for name in ("artifact", "ptq"))
    assert dict(zip(heads, cells, strict=True))["length of name"] == "3 letters"
    for width in (110, 400):
        text = rendered(synthetic(), width, columns=columns)
        assert "length of name" in text
        assert "3 letters" in next(line for line in text.splitlines() if line.split()[:1] == ["ptq"])


def test_every_column_stands_on_the_page_and_in_a_terminal_that_is_wide_enough(tmp_path: Path) -> None:
    page, text = page_of(synthetic(), tmp_path), rendered(synthetic(), 600)
    columns = columns_of(synthetic())
    assert len({column.key for column in columns}) == len(columns)
    heads = {" ".join(cell.split()) for cells in page.rows for cell in cells}
    for column in columns:
        assert column.head in text
        assert column.head in heads


def test_whiskers_end_at_a_hundred_per_cent() -> None:
    accuracy = {"top1": 0.998, "top5": 1.0, "interval": [0.99, 1.0], "images": 500, "answers": "a" * 64}
    difference = {"delta": 0.002, "low": -0.006, "high": 0.012, "gained": 1, "lost": 0}
    made = body()
    made["rows"][5]["pairs"][0]["measured"]["accuracy"] = accuracy | {"difference": difference}
    bounds = {point.name: point.bounds for point in marks(Report.from_json(made))}
    assert bounds["qat"] == pytest.approx((0.990, 1.0))
    assert bounds["ptq"] == pytest.approx((0.9111 - 0.0023 - 0.0062, 0.9111 - 0.0023 + 0.0058))
    assert bounds["baseline"] is None


def test_output_that_is_no_terminal_gets_every_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with (tmp_path / "out.txt").open("w+") as out, contextlib.redirect_stdout(out):
        print_table(synthetic())
    text = (tmp_path / "out.txt").read_text()
    assert all(column.head in text for column in columns_of(synthetic()))


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ({"extra": 1}, "extra"),
        ({"recommended": "ptq"}, "recommended"),
        ({"schema": 1}, "schema"),
        ({"seconds": "soon"}, "seconds"),
    ],
)
def test_a_report_that_is_not_of_its_schema_is_refused(fault: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        Report.from_json(body() | fault)


def test_a_row_is_measured_or_skipped_and_never_both_or_neither() -> None:
    made = body()["rows"][4]
    skip = {"kind": "failed", "reason": "it fell over"}
    for row in (made | {"pairs": []}, made | {"skip": skip}):
        with pytest.raises(ValidationError, match="a row is either measured or skipped"):
            Row.from_json(row)
    for pair in (made["pairs"][0] | {"measured": None}, made["pairs"][0] | {"skip": skip}):
        with pytest.raises(ValidationError, match="a pair is either measured or skipped"):
            Row.from_json(made | {"pairs": [pair], "skip": skip})


def test_a_report_says_when_it_was_measured_and_not_when_it_was_looked_up(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    assert "measured 2001-02-02 03:04 UTC" in page.text
    assert "2001-02-03" not in page.text
    assert "12 s on 2001-01-31" in page.text.replace("\n", " ")  # fuse, which was made at an earlier run
    made = body()
    made["measurement"]["cached"] = True
    page = page_of(Report.from_json(made), tmp_path)
    assert "measured 2001-02-02 03:04 UTC, looked up 2001-02-03 04:05 UTC" in page.text
    assert "and come from the cache" in page.text


def test_remarks_and_notes_stand_where_they_are_seen(tmp_path: Path) -> None:
    made = body()
    made["recommendation"]["remarks"] = ["60 images cannot show it"]
    report = Report.from_json(made)
    page = page_of(report, tmp_path)
    closed = re.findall(r"<details><summary>.*?</details>", page.source, flags=re.DOTALL)
    for words in ("half: bfloat16 in place of FP16", "60 images cannot show it"):
        assert words in page.text
        assert not any(words in part for part in closed)
    assert "60 images cannot show it" in rendered(report, 120)


def test_captions_wrap_and_what_scrolls_says_so(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    assert "caption" not in page.tags  # a table's caption is as wide as the table, and scrolls out of sight
    outside = re.sub(r"<details><summary>.*?</details>", "", page.source, flags=re.DOTALL)
    assert outside.count('class="scroll"') == outside.count("scrolls sideways") == 5


def test_a_verdict_for_the_baseline_says_whether_the_others_are_worse_or_only_unproven() -> None:
    made = body() | {"recommended": "baseline"}
    made["recommendation"] |= {"name": "baseline", "pair": "baseline@torchscript", "rejected": {}}
    assert "no other artifact is better by the rule below" in verdict(Report.from_json(made))
    made["recommendation"]["unproven"] = "qat@torchscript"
    assert "of no other artifact do the images show that it is accurate enough" in verdict(Report.from_json(made))


def test_a_verdict_says_against_what_it_is_so_fast() -> None:
    """The fastest float execution may be the chosen one, or a reference; where it was not measured, it says so."""
    made = body()
    made["yardstick"] = "eager"
    assert "the fastest float execution (eager; 4.55 instead of 25.5 ms at p50), 5.60× eager PyTorch" in verdict(
        Report.from_json(made)
    )
    made["references"], made["eager"], made["yardstick"] = [], "ptq@torchscript", "ptq@torchscript"
    assert "the speed of the baseline (ptq@torchscript; 4.55 instead of 4.44 ms at p50), 5.60× the baseline (ptq" in (
        verdict(Report.from_json(made))
    )
    made = body() | {"recommended": "onnx"}
    made["recommendation"] |= {"name": "onnx", "pair": "onnx@openvino"}
    assert "onnx@openvino is recommended: it is the fastest float execution (13.3 ms at p50), 1.92× eager" in verdict(
        Report.from_json(made)
    )


def test_a_verdict_says_slower_where_a_float_engine_is_plainly_faster() -> None:
    made = body()
    made["references"].append({"name": "onnxruntime FP32", "measured": timed(1.82), "skip": None})
    made["yardstick"] = "onnxruntime FP32"
    qat = next(row for row in made["rows"] if row["name"] == "qat")
    qat["pairs"][0]["measured"]["speedup"] = ratio(0.4, 0.38, 0.42, slower=True)
    assert verdict(Report.from_json(made)).startswith(
        "qat@torchscript is recommended: slower: 0.40× the speed of the fastest float execution (onnxruntime FP32; "
        "4.55 instead of 1.82 ms at p50), 5.60× eager PyTorch"
    )


def test_a_float_engine_that_is_a_reference_is_named_as_what_runs_it(tmp_path: Path) -> None:
    made = body()
    made["references"] += [
        {"name": name, "measured": timed(9.87), "skip": None} for name in ("onnxruntime FP32", "openvino FP32")
    ]
    page = page_of(Report.from_json(made), tmp_path)
    place = page.row("artifact")[1].index("runs on")
    assert page.row("eager")[1][place] == "PyTorch"
    assert page.row("onnxruntime")[1][place] == "onnxruntime"
    assert page.row("openvino")[1][place] == "openvino"
    assert "“openvino FP32”: the float graph, its norms folded into its convolutions, run by OpenVINO" in page.text


@pytest.mark.parametrize(
    ("ratio", "word"), [(0.0047, "0.0047×"), (0.82, "0.82×"), (5.874, "5.87×"), (12.34, "12.3×"), (215.6, "216×")]
)
def test_a_ratio_keeps_its_digits_however_small(ratio: float, word: str) -> None:
    assert times(ratio) == word


def test_verdict_table_page_and_json_have_the_same_numbers_of_the_recommended_pair(tmp_path: Path) -> None:
    """Whatever is said of it in words stands in its row, and in the JSON, digit for digit."""
    baseline = Case("baseline", [[40.0]] * 7, 44_000_000, images=750)
    int8 = Case("ptq", [[20.0 + i / 70] for i in range(7)], 11_000_000, gained=9, lost=12, images=750)
    other = Case("qat", [[25.0]] * 7, 11_000_000, gained=2, lost=12, images=750)
    speeds = {case.id: case.speed() for case in (baseline, int8, other)}
    graph = Speed({1: [[1.0 - i / 70] for i in range(7)], 8: [[1.0]] * 7})
    rows = []
    for case in (baseline, int8, other):
        made = case.row(graph)
        (pair,) = made.pairs
        assert pair.measured is not None
        found = paired_interval(case.gained, case.lost, 750)
        accuracy = pair.measured.accuracy.model_copy(
            update={
                "scores": {"top1": (361 + case.gained - case.lost) / 750, "top5": 1.0},
                "difference": None if case is baseline else Difference.of(found),
            }
        )
        pair = pair.model_copy(update={"measured": pair.measured.model_copy(update={"accuracy": accuracy})})
        rows.append(made.model_copy(update={"pairs": (pair,), "operation": case.name}))
    speeds["openvino FP32"] = graph
    chosen = recommend(rows, speeds, Recommend(), CLASSIFICATION, differences=differences(baseline, int8, other))
    reference = Reference(name="openvino FP32", measured=graph.against(graph, graph))
    results = {
        "rows": [row.to_json() for row in rows],
        "references": [reference.to_json()],
        "yardstick": "openvino FP32",
        "eager": "baseline@e",
        "recommendation": chosen.to_json(),
        "recommended": chosen.name,
    }
    report = Report.from_json(body() | results)
    write_json(report.to_json(), tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    (pair_json,) = next(row["pairs"] for row in stored["rows"] if row["name"] == stored["recommended"])
    difference = pair_json["measured"]["accuracy"]["difference"]
    top1 = f"{100 * pair_json['measured']['accuracy']['top1']:.2f}"
    signed = [f"{100 * difference[end]:+.2f}".replace("-", "−") for end in ("delta", "low", "high")]
    assert (chosen.name, top1) == ("ptq", "47.73")
    said = verdict(report)
    assert f"top-1 {top1} % ({signed[0]} points, 95 % interval {signed[1]} to {signed[2]})" in said
    page = page_of(report, tmp_path)
    head = page.row("artifact")[1]
    cells = page.row("ptq")[1]
    assert cells[head.index("top-1 %")] == top1
    assert cells[head.index("Δ points")] == signed[0]
    assert cells[head.index("95 %")] == f"{signed[1]} to {signed[2]}"
    shown = rendered(report, 300)
    line = next(line.split() for line in shown.splitlines() if line.split()[:3] == ["★", "ptq", "e"])
    assert line[4:9] == [top1, signed[0], signed[1], "…", signed[2]]
    # What judged it is in the JSON, and in words beside the verdict; so is what the recipe lacks.
    judged = stored["recommendation"]["proof"]
    assert judged["tested"] == 2
    assert judged["low"] == paired_interval(9, 12, 750, 1 - 2 * judged["level"]).low
    bound = f"{100 * judged['low']:+.2f}".replace("-", "−")
    lower = [f"ptq@e passed: its lower bound is {bound} points", "Add a stage `onnx` to the recipe"]
    for words in lower:
        for text in (page.text, " ".join(shown.split()), json.dumps(stored, ensure_ascii=False), fragment(report)):
            assert words in text
    remark = next(each for each in stored["recommendation"]["remarks"] if "reference" in each)
    ratio = level(int8.speed().medians(), graph.medians())
    assert (
        f"is {times(ratio.value)[:-1]} times (98.4 % interval {times(ratio.low)[:-1]} to {times(ratio.high)[:-1]})"
        in remark
    )


def test_what_a_pass_changed_of_the_whole_network_is_said_in_the_terminal_and_on_the_page(tmp_path: Path) -> None:
    report = synthetic()
    effects = (
        Effect("whole network", "multiply-accumulates of one image (millions)", 1814.25, 902.25),
        Effect("layer4.1.conv2", "output channels", 512, 248),
    )
    first, second, *others = report.rows
    report = report.model_copy(update={"rows": (first, second.model_copy(update={"effects": effects}), *others)})
    said = f"{second.name}: multiply-accumulates of one image (millions) 1,814 → 902"
    assert said in rendered(report, 400)
    assert "output channels" not in rendered(report, 400)
    _, cells = page_of(report, tmp_path).row("layer4.1.conv2")
    assert cells[1:] == ["output channels", "512", "248"]
