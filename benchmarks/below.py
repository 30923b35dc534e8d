"""Pages whose words are written by hand, and what stands below a mark by a command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

MARK: Final = "<!-- measured -->"


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option of a command for `tell`."""
    parser.add_argument("--write", type=Path, help=f"replace what stands below the line `{MARK}` of this file")


def tell(text: str, page: Path | None) -> None:
    """Write a text below the mark of a page, or print it where none is named."""
    if page is None:
        sys.stdout.write(text)
    else:
        write_below(page, text)


def write_below(page: Path, text: str) -> None:
    """Replace what stands below the mark of a page, or append it with one; a page that there is not is made."""
    above = page.read_text(encoding="utf-8").partition(MARK)[0] if page.exists() else ""
    page.write_text(f"{above}{MARK}\n\n{text}", encoding="utf-8")
