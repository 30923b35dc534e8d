"""The site has every page, its reference pages are what the code gives, and MkDocs finds no fault in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import optimize as opt
from optimize import cli as optimize_cli
from optimize.passes.base import passes
from serve import cli as serve_cli
from tools import reference, site

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (reference.REFERENCE / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(site.in_navigation()) == site.pages()


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_reference_page_is_what_the_code_gives_now(name: str) -> None:
    assert page(name) == reference.GENERATED + reference.PAGES[name](), "run `make reference`"


@pytest.mark.parametrize(("module", "app"), [("optimize", optimize_cli.app), ("serve", serve_cli.app)])
def test_the_command_line_has_every_command_and_option(module: str, app: Any) -> None:
    group: Any = get_command(app)
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page("command-line.md"), re.MULTILINE | re.DOTALL))
    assert {name for name in sections if name.startswith(module)} == {f"{module} {name}" for name in group.commands}
    for name, command in group.commands.items():
        options = [option for each in command.params for option in each.opts if option.startswith("--")]
        assert all(f"`{option}`" in sections[f"{module} {name}"] for option in options)


def test_the_page_of_passes_has_every_setting_with_its_meaning() -> None:
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page("passes.md"), re.MULTILINE | re.DOTALL))
    assert set(sections) == set(passes())
    for name, step in passes().items():
        rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", sections[name], re.MULTILINE)
        assert [setting for setting, _ in rows] == list(step.config.model_fields)


def test_the_statuses_are_those_that_the_code_refuses_with() -> None:
    source = """
def refuse(error):
    message = f"{error} is late"
    if error:
        raise RefusedError(504, message, "timeout")
    raise try_again("the server is full", "queue-full")
"""
    assert list(reference.refusals(source)) == [
        (504, "timeout", "… is late"),
        (503, "queue-full", "the server is full"),
    ]
    rows = re.findall(r"^\| (\d+) \|.*?\| `([\w-]+)` \|", page("statuses.md"), re.MULTILINE)
    assert {("401", "unauthorised"), ("413", "too-large"), ("504", "deadline"), ("503", "memory")} <= set(rows)


def test_the_reference_of_the_api_has_every_public_name() -> None:
    assert re.findall(r"^::: optimize\.(\w+)$", page("api.md"), re.MULTILINE) == list(opt.__all__)


def test_a_cell_of_a_table_cannot_end_it() -> None:
    assert reference.table(("a",), [("x | y\nz",)]).splitlines()[-1] == "| x \\| y z |"
    assert reference.plain("see <this> and `a_b`") == "see \\<this> and `a_b`"


def test_mkdocs_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    site.stage(ROOT / "build" / "pages")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "docs" / "guides" / "serve.html").is_file()
