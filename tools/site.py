"""Builds the site of the documentation with MkDocs: ``make docs``. The extra ``docs`` has what it needs.

The pages are copied into a folder that has the repository's own layout, with each file that a page links to. So a
relative link leads to the same file here, in the repository and on the site.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "mkdocs.yml"


def pages() -> list[Path]:
    """Return all pages of the site, as paths below the root: what lies in docs, and the pages beside the code."""
    beside = [*ROOT.glob("*.md"), ROOT / "examples" / "README.md", ROOT / "model_store" / "README.md"]
    return sorted(path.relative_to(ROOT) for path in [*beside, *(ROOT / "docs").rglob("*.md")])


def in_navigation() -> list[Path]:
    """Return the pages that the navigation of mkdocs.yml names, in its order."""
    return [Path(name) for name in _leaves(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"])]


def _leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from _leaves(inner)


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the files that a page links to or shows, as paths below the root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text):
        path = Path(os.path.normpath(page.parent / target))
        if (ROOT / path).is_file():
            yield path


def stage(folder: Path) -> None:
    """Copy the pages, and the files that they link to, into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in {*pages(), *(linked for page in pages() for linked in linked_files(page))}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)


def main() -> int:
    """Build the site into build/site. Return the exit code of MkDocs, which fails at any broken link."""
    stage(ROOT / "build" / "pages")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(CONFIG)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # of mkdocs-material 9.8, at each build
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
