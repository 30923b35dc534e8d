"""Numbers in recipes and files of models: as they look, by the core schema of YAML 1.2."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from optimize.run.recipe import load_recipe
from serve.asgi.process.serving_plan import versions_of
from serve.common.yaml_numbers import Loader


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("010", 10), ("08", 8), ("-012", -12), ("+3", 3), ("0x1F", 31), ("0o17", 15), ("!!int 010", 10)),
        *(("1e-3", 0.001), ("2E4", 20000.0), ("+.5", 0.5), ("3.", 3.0), ("-.inf", float("-inf"))),
    ],
)
def test_a_number_is_what_it_looks_like(text, number):
    found = yaml.load(text, Loader)
    assert found == number
    assert type(found) is type(number)


@pytest.mark.parametrize("text", ["1:30", "0b11", "1_000", "1.5.2", "0x", "e3", "--1", "1e", "."])
def test_what_is_no_number_in_yaml_1_2_is_text(text):
    assert yaml.load(text, Loader) == text


@given(st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.booleans() | st.none())
def test_what_pyyaml_writes_is_read_again(value):
    found = yaml.load(yaml.safe_dump(value), Loader)
    assert found == value
    assert type(found) is type(value)


def test_a_recipe_counts_by_tens(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("baseline: {epochs: 010, learning_rate: 5e-2}\nstages: [{pass: fuse}]\n")
    baseline = load_recipe(file).baseline
    assert (baseline.epochs, baseline.learning_rate) == (10, 0.05)


def test_a_file_of_models_weighs_by_tens() -> None:
    text = "models: {cats: [{archive: a.mar, weight: 010}, {archive: b.mar, version: '2', weight: 90}]}"
    weights = [entry.weight for entry in versions_of(yaml.load(text, Loader))["cats"]]
    assert weights == [10, 90]
