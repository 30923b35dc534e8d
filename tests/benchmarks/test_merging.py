"""The page of int8 on merged branches: the recipe is legal, and the tables have what a run's report has."""

from __future__ import annotations

from benchmarks import merging
from optimize.run.recipe import load_recipe
from optimize.store.layer_effects import Effect
from tests.optimize.runs_fixtures import TinyRun, tiny_run

__all__ = ["tiny_run"]  # a fixture


def test_every_line_of_the_table_is_a_stage_of_the_recipe_and_no_stage_is_left_out() -> None:
    recipe = load_recipe(merging.RECIPE)
    names = {stage.name for stage in recipe.stages}
    assert set(merging.TITLES) - {"baseline"} <= names
    assert names - set(merging.TITLES) == {"fuse", "equalize"}


def test_the_page_has_the_figures_of_the_report(tiny_run: TinyRun) -> None:
    rows = {row.name: row for row in tiny_run.report.rows}
    effects = (Effect("stem", "range", 2.0, 5.0), Effect("head", "range", 4.0, 3.0))
    cast = {
        **dict.fromkeys(merging.TITLES, rows["ptq"]),
        "baseline": rows["baseline"],
        "merge": rows["fuse"].model_copy(update={"effects": effects}),
        "equalize": rows["fuse"].model_copy(update={"effects": effects[:1]}),
    }
    renamed = tuple(row.model_copy(update={"name": name}) for name, row in cast.items())
    text = merging.page(tiny_run.report.model_copy(update={"rows": renamed}))
    measured = rows["ptq"].measured
    assert measured is not None
    assert f"| merged, one scale a tensor | {100 * measured.accuracy.score:.2f} |" in text
    assert "| stem | 2 | 5 |" in text
    assert "| median | 3 | 4 |" in text
    assert "goes from 2 to 5" in text
