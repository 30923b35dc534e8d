"""Pages whose words are written by hand, and what stands below a mark by a command."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MARK: Final = "<!-- measured -->"


def write_below(page: Path, text: str) -> None:
    """Replace what stands below the mark of a page, or append it with one; a page that there is not is made."""
    above = page.read_text(encoding="utf-8").partition(MARK)[0] if page.exists() else ""
    page.write_text(f"{above}{MARK}\n\n{text}", encoding="utf-8")
