"""The file ``layers.json`` of an artifact, which tells its report what a pass did to each layer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimize.store.atomic_files import write_json
from serve.runtime.display import Described

EFFECTS_FILE = "layers.json"
#: Replaces the layer's name if a figure is about all layers.
WHOLE = "whole network"


@dataclass(frozen=True)
class Effect(Described):
    """One figure about one layer.

    Attributes:
        layer: its name in the graph, or `WHOLE`.
        figure: what was measured, with its unit.
        before: the value without the pass, or before its work.
        after: the value with the pass.
    """

    layer: str
    figure: str
    before: float
    after: float


def write_effects(effects: Sequence[Effect], folder: Path) -> None:
    """Write ``layers.json`` if there are effects."""
    if effects:
        write_json([dataclasses.asdict(effect) for effect in effects], folder / EFFECTS_FILE)


def read_effects(folder: Path) -> tuple[Effect, ...]:
    """Read what `write_effects` wrote. Empty if there is no such file."""
    path = folder / EFFECTS_FILE
    if not path.is_file():
        return ()
    return tuple(Effect(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))
