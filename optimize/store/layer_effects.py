"""What a pass did to each layer: a file beside the artifact's, for its report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimize.store.atomic_files import write_json
from serve.runtime.display import Described

EFFECTS_FILE = "layers.json"
#: In a layer's place, for a figure of all of them.
WHOLE = "whole network"


@dataclass(frozen=True)
class Effect(Described):
    """One figure of one layer.

    Attributes:
        layer: its name in the graph; or `WHOLE`.
        figure: what was measured, with its unit in words.
        before: without the pass, or before it did its work.
        after: with it.
    """

    layer: str
    figure: str
    before: float
    after: float


def write_effects(effects: Sequence[Effect], folder: Path) -> None:
    """Write ``layers.json``, where there is something to tell."""
    if effects:
        write_json([dataclasses.asdict(effect) for effect in effects], folder / EFFECTS_FILE)


def read_effects(folder: Path) -> tuple[Effect, ...]:
    """Read what `write_effects` wrote; nothing where there is no such file."""
    path = folder / EFFECTS_FILE
    if not path.is_file():
        return ()
    return tuple(Effect(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))
