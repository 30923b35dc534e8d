"""Where a sensitivity and a search are written: a folder beside the runs, that keeps their trials from pruning."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import yaml

from optimize.precision.chart import sensitivity_svg
from optimize.precision.records import Found, Sensitivity
from optimize.precision.table import sensitivity_markdown
from optimize.store.files import write_atomically, write_json
from optimize.store.objects import Store
from serve import layout


def write_sensitivity(found: Sensitivity, keys: Collection[str], store: Store, name: str) -> Path:
    """Write ``<store>/<name>.sensitivity/``: the figures, a table, a chart. Returns the folder."""
    folder = store.root / f"{name}.sensitivity"
    with store.lock(layout.run_lock(folder.name)):
        write_json(sorted(keys), folder / layout.OBJECTS_FILE)
        write_json(found.to_json(), folder / "sensitivity.json")
        write_atomically(folder / "sensitivity.md", sensitivity_markdown(found).encode())
        write_atomically(folder / "sensitivity.svg", sensitivity_svg(found))
    return folder


def write_search(found: Found, keys: Collection[str], store: Store, name: str) -> Path:
    """Write ``<store>/<name>.search/``: what was found, and a recipe that makes, packs and measures it."""
    folder = store.root / f"{name}.search"
    with store.lock(layout.run_lock(folder.name)):
        write_json(sorted(keys), folder / layout.OBJECTS_FILE)
        write_json(found.to_json(), folder / "search.json")
        if found.stages:
            write_atomically(folder / "recipe.yaml", _recipe(found).encode())
    return folder


def _recipe(found: Found) -> str:
    said = "".join(f"# {sentence}\n" for sentence in found.why)
    return said + yaml.safe_dump({"stages": list(found.stages)}, sort_keys=False, allow_unicode=True, width=120)
