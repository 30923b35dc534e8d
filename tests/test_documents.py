"""README.md, CONTRIBUTING.md and docs/ say what the code does: passes, options, recipes, commands, names."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import optimize as opt
from optimize import cli
from optimize.passes.base import passes
from optimize.run.recipe import DEFAULT_RECIPE, load_recipe
from serve import cli as serve_cli
from serve.runtime.card.budget import SERVING

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
}
BLOCKS = [
    (name, language, text)
    for name, document in DOCUMENTS.items()
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
]


def joined(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def lines_of(*languages: str) -> list[str]:
    return [line for _, language, text in BLOCKS if language in languages for line in joined(text)]


def commands(module: str) -> list[list[str]]:
    """The words after ``-m MODULE`` of every such command in a shell block, by python or torchrun."""
    found = [re.search(rf"-m {module} (.*)", line.partition("  #")[0]) for line in lines_of("bash", "sh", "console")]
    return [shlex.split(match[1]) for match in found if match]


def measured(page: str, heading: str) -> dict[str, list[str]]:
    """The first table below a heading of a page of docs/: a line's cells, by the first of them and by two."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = re.findall(r"^\| (.*) \|$", text.partition("\n\n## ")[0].lstrip().partition("\n\n")[0], re.MULTILINE)
    rows = [[cell.strip(" *") for cell in line.split(" | ")] for line in lines[1:]]
    return {row[0]: row for row in rows} | {f"{row[0]} @ {row[1]}": row for row in rows}


def numbers(text: str) -> list[float]:
    return [float(word.replace(",", "")) for word in re.findall(r"(?<![\w²-])\d[\d,]*(?:\.\d+)?", text)]


def paragraph(document: str, beginning: str, end: str) -> str:
    found = re.search(rf"{re.escape(beginning)}(.*?){re.escape(end)}", DOCUMENTS[document], re.DOTALL)
    assert found is not None, beginning
    return found[1].replace("\n", " ")


def help_of(app: object, *words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"})  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_of_passes_is_the_registry() -> None:
    table = re.search(r"^\| pass \| from \|.*?\n\n", DOCUMENTS["docs/guides/recipes.md"], re.MULTILINE | re.DOTALL)
    assert table is not None
    assert set(re.findall(r"^\| `([\w-]+)` \|", table[0], re.MULTILINE)) == set(passes())


@pytest.mark.parametrize(("module", "app"), [("optimize", cli.app), ("serve", serve_cli.app)])
def test_every_command_and_its_options_exist(module: str, app: object) -> None:
    assert commands(module)
    for words in commands(module):
        described = help_of(app, words[0])
        for option in (word for word in words[1:] if word.startswith("--")):
            assert option in described, words


def test_every_make_target_and_variable_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:RUN|SERVE)_(?:VALUES|LISTS|FLAGS) := (.*)$", makefile.replace("\\\n", ""), re.MULTILINE)
    known = {*re.findall(r"^(\w+) \?=", makefile, re.MULTILINE), *" ".join(lists).split()}
    called = [line.partition("#")[0] for line in lines_of("bash") if line.startswith("make ")]
    assert called
    for line in called:
        target, *variables = shlex.split(line)[1:]
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
        assert {variable.partition("=")[0] for variable in variables} <= known, line
    table = set(re.findall(r"^\| `[^`]+` \| `(\w+)` \|", DOCUMENTS["docs/reference/variables.md"], re.MULTILINE))
    assert "MODEL" in table
    assert table <= known


def test_every_name_that_is_no_file_has_a_rule() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)).split()
    ruled = set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))
    assert set(phony) == ruled
    inline = {
        word
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for word in re.findall(r"`make ([a-z-]+)`", path.read_text(encoding="utf-8"))
    }
    assert inline <= ruled


def test_what_the_default_recipe_runs_is_said_where_it_is_chosen() -> None:
    ran = list(dict.fromkeys(stage.operation.name for stage in load_recipe(DEFAULT_RECIPE).stages))
    said = f"{', '.join(ran[:-1])} and {ran[-1]}"
    (row,) = re.findall(r"^\| `[^`]+` \| `RECIPE` \|.*$", DOCUMENTS["docs/reference/variables.md"], re.MULTILINE)
    assert said in row.replace("`", "")
    assert said in " ".join(help_of(cli.app, "run").replace("│", " ").split())


def test_every_recipe_is_legal(tmp_path: Path) -> None:
    recipes = {text: name for name, language, text in BLOCKS if language == "yaml" and "pass:" in text}
    assert {
        "docs/guides/recipes.md",
        "docs/guides/quantize.md",
        "docs/guides/compress.md",
        "docs/explanations/training.md",
        "docs/design/pruning.md",
        "docs/design/lowbit.md",
        "docs/design/merging.md",
    } <= {*recipes.values()}
    for text in recipes:
        path = tmp_path / "recipe.yaml"
        path.write_text(text if re.search(r"^stages:", text, re.MULTILINE) else f"stages:\n{text}", encoding="utf-8")
        assert load_recipe(path).stages


def test_every_python_block_parses_and_names_what_the_api_has() -> None:
    blocks = [text for _, language, text in BLOCKS if language == "python"]
    assert blocks
    for text in blocks:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "opt":
                assert node.attr in opt.__all__


def test_every_public_name_is_in_the_reference() -> None:
    for name in opt.__all__:
        assert re.search(rf"\b{name}\b", DOCUMENTS["docs/reference/api.md"]), name


def test_every_link_leads_to_a_file_that_is_tracked() -> None:
    tracked = set(
        subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    )
    folders = {str(parent) for path in tracked for parent in Path(path).parents}
    targets = [
        (name, target) for name, text in DOCUMENTS.items() for target in re.findall(r"\]\((?!https?:)([^)]+)", text)
    ]
    assert "README.md" in dict(targets)
    for name, target in targets:
        path, _, heading = target.partition("#")
        found = os.path.normpath(Path(name).parent / path) if path else name
        assert found in tracked | folders, f"{name}: {target}"
        assert not heading or heading in anchors(DOCUMENTS[found]), f"{name}: {target}"


def anchors(document: str) -> set[str]:
    """What the headings of a document are called in links, as GitHub does it."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", document, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_example_and_benchmark_that_a_document_or_a_recipe_runs_is_there() -> None:
    recipes = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.yaml"))]
    for text in [*DOCUMENTS.values(), *recipes]:
        for path in re.findall(r"\bexamples/[\w/-]+\.(?:py|yaml)\b", text):
            assert (ROOT / path).is_file(), path
        for name in re.findall(r"python -m (benchmarks\.\w+)", text):
            assert importlib.util.find_spec(name) is not None, name


def test_every_file_of_code_that_a_document_names_is_there() -> None:
    for name, text in DOCUMENTS.items():
        for path in re.findall(r"\b(?:optimize|serve|tests|benchmarks|tools)/[\w/]+\.py\b", text):
            assert (ROOT / path).is_file(), f"{name}: {path}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_among_the_examples_is_legal_and_told_of(path: Path) -> None:
    assert load_recipe(path).stages
    assert f"({path.name})" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


def test_what_serving_costs_is_what_its_table_says() -> None:
    table = measured("benchmarks/serve.md", "Photographs")
    subjects = (
        "in process, pipelined",
        "our own server",
        "our archive behind TorchServe",
        "TorchServe's image_classifier, FP32",
    )
    told = paragraph("docs/guides/serve.md", "32 clients on the same machine, ", " ms ([benchmark]")
    rates, p50 = told.split("At one client p50 is ")
    assert numbers(rates) == [numbers(table[name][4])[0] for name in subjects]
    alone = ("in process, one after the other", *subjects[1:])
    assert numbers(p50) == pytest.approx([numbers(table[name][5])[0] for name in alone], abs=0.0501)
    told = paragraph("README.md", "With 32 clients our server gives ", " ([benchmark](docs/benchmarks/serve.md)")
    assert numbers(told) == [numbers(rates)[1], numbers(rates)[3]]


def test_what_int8_wins_is_what_its_table_says() -> None:
    table = measured("benchmarks/cpu.md", "resnet18")
    floats = [numbers(row[2])[0] for name, row in table.items() if name.startswith("float")]
    ours, nncf = (numbers(table[name][2])[0] for name in ("ours, onnx-int8 @ openvino", "NNCF @ openvino"))
    told = paragraph("README.md", "ResNet-18 at 224² takes ", " as NNCF's int8")
    assert numbers(told) == [ours, min(floats), nncf]


def test_the_first_figure_is_that_of_the_table_of_the_first_run() -> None:
    (times,) = numbers(paragraph("README.md", "**INT8 is ", " times as fast"))
    (row,) = re.findall(r"^ ★ .*$", DOCUMENTS["docs/get-started.md"], re.MULTILINE)
    (speed, _) = re.findall(r"([\d.]+)×", row)
    assert times == pytest.approx(float(speed), abs=0.05)


def test_the_budget_of_a_request_is_the_servers() -> None:
    beginning, end = "counts it from headers before it decodes anything: ", " scans of a progressive JPEG"
    told = numbers(paragraph("docs/guides/serve.md", beginning, end))
    pixels = [SERVING.image_pixels, SERVING.request_pixels, SERVING.batch_pixels]
    others = [SERVING.request_seconds, SERVING.batch_seconds, SERVING.jpeg_scans]
    assert told == [*(count / 1e6 for count in pixels if count is not None), *others]
