"""The examples on a report's page: images with the answers of two artifacts, drawn once and kept in the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from optimize.measure.figures import Record
from optimize.store.objects import Store

_FILE: Final = "examples.json"


class ShownPanel(Record):
    """One picture of an example: its title, the same in words, and the picture as a data URL."""

    title: str
    said: str
    source: str


class ShownExample(Record):
    """One image: which one it is and how well it is answered, and its pictures from left to right."""

    caption: str
    panels: tuple[ShownPanel, ...]


class ExampleGroup(Record):
    """Examples that one rule has chosen."""

    title: str
    rule: str
    examples: tuple[ShownExample, ...]


class Examples(Record):
    """All examples of a report. ``legend`` has the label and the colour of what the pictures show, most first."""

    about: str
    groups: tuple[ExampleGroup, ...]
    legend: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        """Return how much of a page the pictures take."""
        return sum(len(panel.source) for group in self.groups for each in group.examples for panel in each.panels)


def write_examples(examples: Examples, folder: Path) -> None:
    """Write examples into an object's folder."""
    (folder / _FILE).write_text(json.dumps(examples.to_json()), encoding="utf-8")


def stored_examples(key: str | None, store: Store) -> Examples | None:
    """Return the examples under a key. None: there are none, or the store has lost them."""
    found = store.open(key) if key else None
    return Examples.from_json(json.loads((found.folder / _FILE).read_text(encoding="utf-8"))) if found else None
