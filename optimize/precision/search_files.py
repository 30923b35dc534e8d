"""Writes a sensitivity or a search into a folder beside the runs. The folder protects their trials from pruning."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

import yaml

from optimize.precision.precision_records import Found, Sensitivity
from optimize.precision.precision_table import sensitivity_markdown
from optimize.precision.sensitivity_chart import sensitivity_svg
from optimize.run.recipe import Recipe
from optimize.store.atomic_files import write_atomically, write_json
from optimize.store.objects import Store
from serve.common import layout
from serve.runs import sealed_files

RECIPE_FILE: Final = "recipe.yaml"
#: The sections of a recipe, beside its stages.
_SECTIONS: Final = ("baseline", "preprocessing", "measure", "recommend", "serving")


def write_sensitivity(found: Sensitivity, keys: Collection[str], store: Store, name: str) -> Path:
    """Write ``<store>/<name>.sensitivity/``: the figures, a table, a chart. Return the folder."""
    folder = store.root / f"{name}{layout.SENSITIVITY_ENDING}"
    with store.lock(layout.run_lock(folder.name)):
        write_json(sorted(keys), folder / layout.OBJECTS_FILE)
        write_json(found.to_json(), folder / "sensitivity.json")
        write_atomically(folder / "sensitivity.md", sensitivity_markdown(found).encode())
        write_atomically(folder / "sensitivity.svg", sensitivity_svg(found))
        sealed_files.seal(folder)
    return folder


def write_search(found: Found, keys: Collection[str], store: Store, name: str, recipe: Recipe) -> Path:
    """Write ``<store>/<name>.search/``: the result, and a recipe that makes, packs and measures it.

    Args:
        found: the result. If nothing was found, there is no recipe, and one of an earlier search is removed.
        keys: keys of its objects, which are protected from pruning.
        store: where to write.
        name: name of the search.
        recipe: the recipe of the search. The new one has its sections, and other stages.

    Returns:
        The folder.
    """
    folder = store.root / f"{name}{layout.SEARCH_ENDING}"
    with store.lock(layout.run_lock(folder.name)):
        write_json(sorted(keys), folder / layout.OBJECTS_FILE)
        write_json(found.to_json(), folder / "search.json")
        if found.pair:
            write_atomically(folder / RECIPE_FILE, _recipe(found, recipe).encode())
        else:
            (folder / RECIPE_FILE).unlink(missing_ok=True)
        sealed_files.seal(folder)
    return folder


def _recipe(found: Found, recipe: Recipe) -> str:
    said = "".join(f"# {' '.join(sentence.split())}\n" for sentence in found.why)
    # Settings that were not given are not written. They would count as given then, and a server's setting may have no
    # fixed default.
    given = {name: getattr(recipe, name).model_dump(mode="json", exclude_unset=True) for name in _SECTIONS}
    body = {"stages": list(found.stages)} | {name: section for name, section in given.items() if section}
    return said + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=120)
