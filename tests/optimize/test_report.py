"""The report's outputs, read back as a reader would: the page by an HTML parser, the table as rendered text."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from optimize.report.page import plot, write_html
from optimize.report.plots import pareto_front
from optimize.report.table import table
from optimize.store.files import write_json

RULE = "the fastest artifact whose accuracy interval stays above minus one point"
NO_GPU = "needs a CUDA device, and this machine has none"


def artifact(name: str, parents: list[str], precision: str, figures: tuple[float, float, float]) -> dict[str, Any]:
    top1, ms, mb = figures
    return {
        "name": name,
        "pass": "train" if not parents else name.rsplit("-", 1)[-1],
        "config": {"synthetic": True, "steps": [1, 2]},
        "format": "onnx" if name.startswith("onnx") else "torchscript",
        "precision": precision,
        "path": f"artifacts/{name}",
        "archive": f"archives/toy-{name}.mar",
        "parents": parents,
        "key": "0" * 64,
        "bytes": int(mb * 1e6),
        "top1": top1,
        "top1_delta": top1 - 0.9111,
        "top1_delta_ci95": [top1 - 0.9111 - 0.0062, top1 - 0.9111 + 0.0058] if parents else None,
        "discordant": {"gained": 11, "lost": 13} if parents else None,
        "top5": 0.9922,
        "images": 2222,
        "latency_ms": {"p50": ms, "p95": ms * 1.11, "p99": ms * 1.33},
        "throughput": {str(b): 1000 / ms * (1 + math.log2(b) / 8) for b in (1, 4, 16, 32)},
        "best_batch": 32,
        "parity": {
            "reference": parents[0],
            "max_abs": 0.0123,
            "mean_abs": 0.000456,
            "sqnr_db": 33.3,
            "top1_agreement": 0.9876,
            "images": 256,
        }
        if parents
        else None,
        "vs_parent": {"speedup": 1.23, "low": 1.11, "high": 1.44, "slower": False} if parents else None,
        "speedup": 22.2 / ms,
        "memory_bytes": int(3 * mb * 1e6),
        "load_ms": 77.7,
        "provider": "CPUExecutionProvider" if name.startswith("onnx") else "torch",
        "threads": 2,
        "notes": [],
        "skipped": None,
        "cached": False,
        "seconds": 12.5,
    }


def synthetic() -> dict[str, Any]:
    """A report whose numbers no machine measured; it has one of everything that a report can hold."""
    artifacts = [
        artifact("baseline", [], "float32", (0.9111, 22.2, 44.4)),
        artifact("fuse", ["baseline"], "float32", (0.9111, 15.5, 44.3)),
        artifact("half", ["fuse"], "bfloat16", (0.9106, 18.8, 22.2)),
        artifact("dynamic", ["fuse"], "int8", (0.9109, 16.6, 43.3)),
        artifact("ptq", ["fuse"], "int8", (0.9088, 4.44, 11.1)),
        artifact("qat", ["fuse"], "int8", (0.9133, 4.55, 11.1)),
        artifact("onnx", ["fuse"], "float32", (0.9111, 13.3, 44.2)),
        artifact("onnx-half", ["onnx"], "float16", (0.9111, 1.0, 22.1)),
        artifact("onnx-int8", ["ptq"], "int8", (0.9077, 6.66, 11.3)),
        artifact("onnx-int8-qat", ["qat"], "int8", (0.9122, 6.77, 11.3)),
    ]
    by_name = {a["name"]: a for a in artifacts}
    by_name["half"]["vs_parent"] = {"speedup": 0.82, "low": 0.77, "high": 0.88, "slower": True}
    by_name["half"]["notes"] = ["bfloat16 in place of FP16: this processor has no FP16 kernels"]
    by_name["onnx-half"]["skipped"] = NO_GPU
    by_name["fuse"]["cached"] = True
    by_name["onnx"]["parity"] |= {"sqnr_db": None, "max_abs": 0.0, "mean_abs": 0.0}
    return {
        "schema": 1,
        "run": "toynet",
        "model": "toynet",
        "created": "2001-02-03T04:05:06+00:00",
        "seconds": 321.0,
        "data": {
            "name": "synthetic squares",
            "fingerprint": "f" * 64,
            "fingerprint_kind": "content",
            "classes": 7,
            "train": 8888,
            "val": 2222,
            "preprocessing": {
                "resize": 256,
                "crop": [224, 224],
                "mean": [0.5, 0.4, 0.3],
                "std": [0.2, 0.2, 0.2],
                "interpolation": "bilinear",
            },
        },
        "machine": {
            "cpu": "Imaginary CPU 9000",
            "cores": 2,
            "threads": 2,
            "memory_bytes": 16_000_000_000,
            "os": "Linux",
            "python": "3.11.2",
            "isa": ["AVX2", "AVX512_VNNI"],
            "gpu": None,
        },
        "device": "cpu",
        "versions": {"torch": "2.0.0", "onnxruntime": "1.0.0"},
        "recommended": "qat",
        "recommendation": {"rule": RULE, "rejected": {"ptq": "its interval reaches below the limit"}},
        "artifacts": artifacts,
        "baselines": [
            {
                "name": "eager",
                "latency_ms": {"p50": 25.5, "p95": 26.6, "p99": 27.7},
                "throughput": {"1": 39.0, "4": 44.0, "16": 47.0, "32": 48.0},
                "best_batch": 32,
                "speedup": 0.87,
                "skipped": None,
            },
            {
                "name": "torch.compile",
                "latency_ms": None,
                "throughput": {},
                "best_batch": None,
                "speedup": None,
                "skipped": "no C++ compiler on this machine",
            },
        ],
        "stages": [
            {"name": a["name"], "pass": a["pass"], "parents": a["parents"], "seconds": 3.0 * i, "cached": i == 1}
            | {"skipped": a["skipped"]}
            for i, a in enumerate(artifacts)
        ],
        "measurement": {
            "rounds": 5,
            "batch_sizes": [1, 4, 16, 32],
            "warmup": 10,
            "latency_samples": 250,
            "seconds": 66.0,
            "cached": False,
        },
    }


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


def page_of(report: dict[str, Any], folder: Path) -> Page:
    write_html(report, folder / "report.html")
    return Page(folder / "report.html")


def rendered(report: dict[str, Any], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False)
    console.print(table(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return str(text)


def test_the_page_shows_every_artifact_and_baseline_with_its_numbers(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    for record in synthetic()["artifacts"]:
        assert page.row(record["name"])
    kind, cells = page.row("ptq")
    assert kind == ""
    assert cells[2] == "90.88"
    assert cells[3] == "−0.23 −0.85 to +0.35"
    assert cells[4] == "4.44"
    assert cells[7] == "5.00×"
    assert cells[-1] == "11.1 MB"
    assert "25.5" in page.row("eager")[1]


def test_the_page_opens_with_the_verdict_and_its_rule(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    verdict = "qat is recommended: 4.88× the speed of the baseline (4.55 instead of 22.2 ms at p50); "
    assert verdict + "11.1 MB instead of 44.4 MB; top-1 91.33 % (+0.22 points" in page.text
    assert page.text.index(verdict) < page.text.index("Images/s")
    assert f"Rule: {RULE}" in page.text
    assert page.row("qat")[0] == "recommended"
    assert "its interval reaches below the limit" in page.text


def test_what_was_skipped_says_why_and_shows_no_number(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    kind, cells = page.row("onnx-half")
    assert kind == "skipped"
    assert cells[2:] == [f"Skipped: {NO_GPU}"]
    assert "Skipped: no C++ compiler on this machine" in page.row("torch.compile")[1]


def test_what_is_slower_than_its_parent_says_so_in_words(tmp_path: Path) -> None:
    cells = page_of(synthetic(), tmp_path).row("half")[1]
    assert "0.82× 0.77× to 0.88× slower than its parent" in cells
    assert "slower" not in " ".join(page_of(synthetic(), tmp_path).row("ptq")[1])


def test_the_page_tells_machine_data_versions_method_and_discordant_counts(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    assert "Imaginary CPU 9000" in page.text
    assert "synthetic squares" in page.text
    assert "2,222 to judge" in page.text
    assert "onnxruntime" in page.text
    assert "5 rounds" in page.text
    assert "250 samples" in page.text
    assert "+11" in page.text
    assert "−13" in page.text
    assert "exact" in page.text
    assert "–, –" not in page.text


def test_the_page_refers_to_nothing_outside_itself_and_runs_no_script(tmp_path: Path) -> None:
    page = page_of(synthetic(), tmp_path)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page.source)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#")


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
    report = synthetic()
    report["model"] = report["run"] = report["data"]["name"] = report["versions"]["torch"] = hostile
    report["artifacts"][4]["name"] = report["recommended"] = hostile
    report["artifacts"][6]["notes"] = report["artifacts"][6]["parents"] = [hostile]
    report["artifacts"][7]["skipped"] = report["recommendation"]["rule"] = hostile
    page = page_of(report, tmp_path)
    assert not {"script", "b"} & set(page.tags)
    assert page.text.count(hostile) >= 8
    assert any(tag == "svg" and hostile in value for tag, _, value in page.attributes)
    assert hostile[:8] in rendered(report, 120)


def test_the_same_report_gives_the_same_page(tmp_path: Path) -> None:
    assert page_of(synthetic(), tmp_path).source == page_of(synthetic(), tmp_path).source


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_keeps_the_key_figures(width: int) -> None:
    text = rendered(synthetic(), width)
    lines = {words[0]: line for line in text.splitlines() if (words := line.replace("★", " ").split())}
    for record in synthetic()["artifacts"]:
        assert record["name"] in lines
    for figure in ("90.88", "−0.23", "4.44", "5.00×", "11.1 MB"):
        assert figure in lines["ptq"]
    assert "…" not in text.replace(" … ", "")
    assert "0.82× slower" in text
    assert "0.82× the speed of fuse, slower than its parent" in " ".join(text.split())
    assert f"onnx-half: skipped, {NO_GPU}" in " ".join(text.split())
    assert "★ qat" in text
    assert RULE in " ".join(text.split())


def test_a_table_between_the_two_drops_columns_and_not_the_interval() -> None:
    text = rendered(synthetic(), 104)
    assert "−0.85 … +0.35" in text
    assert "p99" not in text


def test_the_wide_table_adds_interval_tail_and_throughput() -> None:
    assert "−0.85 … +0.35" in rendered(synthetic(), 120)
    assert "p99" in rendered(synthetic(), 120)
    assert "p99" not in rendered(synthetic(), 80)


def emptied(report: dict[str, Any]) -> dict[str, Any]:
    """The same report with every optional entry null."""
    kept = {"name", "parents", "throughput", "notes", "cached"}
    for group in ("artifacts", "baselines", "stages"):
        report[group] = [{k: v if k in kept else None for k, v in r.items()} for r in report[group]]
        for record in report[group]:
            record["throughput"] = {}
    return {k: v if k in ("artifacts", "baselines", "stages") else None for k, v in report.items()}


@pytest.mark.parametrize("report", [emptied(synthetic()), {}, {"artifacts": [], "recommended": None}])
def test_a_report_without_numbers_is_still_a_report(report: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(report, tmp_path)
    assert "No artifact is recommended." in page.text
    assert "None" not in page.text
    assert "nan" not in page.text
    assert "No artifact is recommended." in rendered(report, 80)
    for record in report.get("artifacts", []):
        assert record["name"] in page.text


def test_one_null_at_a_time_is_tolerated(tmp_path: Path) -> None:
    keys = sorted(synthetic()["artifacts"][4].keys() - {"name"})
    for start in range(0, len(keys), 10):  # each key in an artifact of its own, so that no null hides another
        report = synthetic()
        for record, key in zip(report["artifacts"], keys[start:], strict=False):
            record[key] = None
        page = page_of(report, tmp_path)
        assert all(page.row(record["name"]) for record in report["artifacts"])
        rendered(report, 120)


def test_json_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_json(synthetic(), path)
    assert json.loads(path.read_text(encoding="utf-8")) == synthetic()
    assert path.stat().st_mode & 0o044


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_no_json_is_written_with_a_number_it_cannot_hold(number: float, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")
    report = synthetic()
    report["artifacts"][3]["top1"] = number
    with pytest.raises(ValueError, match="JSON"):
        write_json(report, path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(synthetic(), path)
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
        plot({}, tmp_path / "none.png")


def test_the_front_holds_what_no_other_beats_in_both() -> None:
    known = [(5.0, 0.90), (4.0, 0.80), (6.0, 0.90), (4.0, 0.85), (9.0, 0.95), (10.0, 0.10)]
    assert [known[i] for i in pareto_front(known)] == [
        (4.0, 0.85),
        (5.0, 0.9),
        (9.0, 0.95),
    ]


def test_the_report_is_left_as_it_was(tmp_path: Path) -> None:
    report = synthetic()
    before = copy.deepcopy(report)
    page_of(report, tmp_path)
    rendered(report, 120)
    assert report == before
