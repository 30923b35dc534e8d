"""A recipe is legal or refused, with its line and the reason; nothing else can come out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimize.measure.timing import Timing
from optimize.run.recipe import DEFAULT_RECIPE, Recipe, load_recipe
from optimize.training.config import TrainingConfig
from serve.common.options import ServingOptions
from serve.runtime.card.budget import SERVING
from serve.runtime.card.execution import Execution
from serve.runtime.errors import UserError


def load(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def test_the_default_recipe_runs_every_pass_of_the_issue() -> None:
    recipe = load_recipe()
    by_name = {stage.name: stage for stage in recipe.stages}
    assert {stage.operation.name for stage in recipe.stages} == {
        "fuse", "half", "dynamic", "ptq", "qat", "onnx", "onnx-half", "onnx-int8",
    }  # fmt: skip
    assert by_name["onnx-int8"].parent == "ptq"
    assert by_name["onnx-int8-qat"].parent == "qat"
    assert recipe.baseline == TrainingConfig()
    assert recipe.measure == Timing()
    assert DEFAULT_RECIPE.name == "default.yaml"


def test_settings_names_and_parents_are_taken_from_the_file(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        """
baseline: {epochs: 3, learning_rate: 1e-3}
stages:
  - pass: fuse
  - pass: ptq
    name: ptq-minmax
    config:
      observer: minmax
      images: 12
      keep_float: [head, "*.conv"]
      overrides: {stem: {observer: histogram}}
  - {pass: onnx, from: baseline}
measure: {rounds: 2, batch_sizes: [1, 4]}
recommend: {max_drop: 0.01}
""",
    )
    assert [(s.name, s.operation.name, s.parent) for s in recipe.stages] == [
        ("fuse", "fuse", "baseline"),
        ("ptq-minmax", "ptq", "fuse"),
        ("onnx", "onnx", "baseline"),
    ]
    assert recipe.stages[1].config.model_dump(exclude_unset=True) == {
        "observer": "minmax",
        "images": 12,
        "keep_float": ("head", "*.conv"),
        "overrides": {"stem": {"observer": "histogram"}},
    }
    assert (recipe.baseline.epochs, recipe.baseline.learning_rate) == (3, 0.001)
    assert recipe.measure.batch_sizes == (1, 4)
    assert recipe.recommend.max_drop == 0.01


def test_a_recipe_names_what_its_artifacts_are_measured_with(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        "stages: [pass: onnx]\nmeasure: {executions: [onnxruntime, {engine: openvino, threads: 1}]}\n",
    )
    assert recipe.measure.executions == ("onnxruntime", Execution("openvino", threads=1))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("openvin", "unknown engine 'openvin' .did you mean openvino"),
        ("{engine: openvino, thread: 1}", "unknown field 'thread' .did you mean threads"),
        ("{engine: openvino, options: {precison: f32}}", "no option 'precison' .did you mean precision"),
        ("{engine: openvino, device: cuda}", "openvino runs on cpu, not on cuda"),
        ("5", "an execution must be a mapping, found 5"),
    ],
)
def test_an_execution_that_nobody_has_is_refused_with_its_line(tmp_path: Path, entry: str, said: str) -> None:
    text = f"stages: [pass: onnx]\nmeasure:\n  rounds: 2\n  executions: [onnxruntime, {entry}]\n"
    with pytest.raises(UserError, match=rf"recipe\.yaml:4: measure\.executions.*: .*{said}"):
        load(tmp_path, text)


def test_a_recipe_says_how_its_archives_are_served(tmp_path: Path) -> None:
    assert load(tmp_path, "stages: [{pass: fuse}]\n").serving == ServingOptions()
    text = "serving: {workers: 2, engines: [onnxruntime, openvino], strict: yes, budget: {image_pixels: 9}}\n"
    found = load(tmp_path, f"stages: [{{pass: fuse}}]\n{text}").serving
    assert found == ServingOptions(
        workers=2, engines=["onnxruntime", "openvino"], strict=True, budget=replace(SERVING, image_pixels=9)
    )


def test_anchors_mean_what_yaml_says(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        "stages:\n- {pass: ptq, config: &c {images: 7}}\n- {pass: ptq, name: b, from: baseline, config: *c}\n",
    )
    assert [stage.config.model_dump()["images"] for stage in recipe.stages] == [7, 7]


ILLEGAL = {
    "unknown pass": ("stages:\n  - pass: fuse\n  - pass: ptqq\n", 3, r"unknown pass 'ptqq' \(did you mean ptq"),
    "unknown field of a stage": (
        "stages:\n  - pass: fuse\n    form: baseline\n",
        3,
        "unknown field 'form'.*did you mean from",
    ),
    "unknown field of a pass": (
        "stages:\n  - pass: ptq\n    config:\n      image: 3\n",
        4,
        "unknown field 'image'.*did you mean images",
    ),
    "unknown section": ("stage:\n  - pass: fuse\n", 1, "unknown field 'stage'.*did you mean stages"),
    "unknown parent": (
        "stages:\n  - pass: fuse\n  - pass: ptq\n    from: fused\n",
        4,
        "no earlier stage.*did you mean fuse",
    ),
    "a later parent": ("stages:\n  - {pass: ptq, from: fuse}\n  - pass: fuse\n", 2, "'fuse', which is no earlier"),
    "two of a name": ("stages:\n  - pass: fuse\n  - pass: fuse\n", 3, "two artifacts are called 'fuse'"),
    "called baseline": ("stages:\n  - pass: fuse\n    name: baseline\n", 3, "two artifacts are called 'baseline'"),
    "called as a reference": ("stages:\n  - pass: fuse\n    name: torch.compile\n", 3, "reference"),
    "illegal order": (
        "stages:\n  - pass: ptq\n  - pass: fuse\n",
        3,
        "fuse cannot follow ptq: fuse takes a float module",
    ),
    "int8 graph of a float": (
        "stages:\n  - pass: onnx-int8\n",
        2,
        r"takes .* a quantized \(int8\) module, not a float",
    ),
    "illegal name": (
        "stages:\n  - pass: fuse\n    name: ../up\n",
        3,
        "name '../up' must have at most 64 of the characters a-z",
    ),
    "long name": (f"stages:\n  - pass: fuse\n    name: {'a' * 65}\n", 3, "at most 64"),
    "value out of range": ("stages:\n  - pass: ptq\n    config:\n      images: 0\n", 4, "ptq.images: .*(it is 0)"),
    "wrong type": ("stages:\n  - pass: ptq\n    config: {images: many}\n", 3, "ptq.images: .*'many'"),
    "a truth value": (
        "stages:\n  - pass: qat\n    config: {epochs: yes}\n",
        3,
        "qat.epochs: must not be true or false",
    ),
    "an infinite number": ("stages:\n  - pass: fuse\n    config: {tolerance: .inf}\n", 3, "tolerance.*finite"),
    "no number": ("measure:\n  seconds: .nan\nstages:\n  - pass: fuse\n", 2, "measure.seconds"),
    "unknown choice": ("stages:\n  - pass: ptq\n    config: {observer: mean}\n", 3, "ptq.observer.*histogram"),
    "two fields that disagree": (
        "stages:\n  - pass: qat\n    config: {epochs: 1, freeze_observers_at: 2}\n",
        3,
        "freeze_observers_at=2",
    ),
    "descending batches": ("stages:\n- pass: fuse\nmeasure:\n  batch_sizes: [8, 1]\n", 4, "must ascend from 1"),
    "batches without 1": ("stages:\n- pass: fuse\nmeasure:\n  batch_sizes: [2, 4]\n", 4, "must ascend from 1"),
    "a drop above 1": ("stages:\n- pass: fuse\nrecommend:\n  max_drop: 2\n", 4, "recommend.max_drop"),
    "an engine that is none": (
        "stages:\n- pass: fuse\nserving:\n  workers: 2\n  engines: [openvin]\n",
        5,
        "serving.engines: unknown engine 'openvin' .did you mean openvino",
    ),
    "an option that an engine has not": (
        "stages:\n- pass: fuse\nserving:\n  options:\n    openvino: {precison: f32}\n",
        4,
        "serving.options: openvino has no option 'precison' .did you mean precision",
    ),
    "no workers": ("stages:\n- pass: fuse\nserving: {workers: 0}\n", 3, "serving.workers.*(it is 0)"),
    "a budget of nothing": ("stages:\n- pass: fuse\nserving: {budget: {image_pixels: 0}}\n", 3, "image_pixels"),
    "bad baseline": ("baseline:\n  epochs: 0\nstages:\n- pass: fuse\n", 2, "baseline.epochs"),
    "no pass": ("stages:\n  - name: fuse\n", 2, "needs a pass"),
    "a word for a stage": ("stages:\n  - fuse\n", 2, "a stage must be a mapping"),
    "a list for a pass": ("stages:\n  - pass: [fuse]\n", 2, "pass must be a word"),
    "a number for a name": ("stages:\n  - pass: fuse\n    name: 3\n", 3, "name must be a word, not 3"),
    "no stages": ("measure: {}\n", 1, "at least one stage"),
    "an empty list": ("measure: {}\nstages: []\n", 2, "at least one stage"),
    "a list of all": ("- pass: fuse\n", 1, "must be a mapping"),
    "given twice": ("stages:\n  - pass: fuse\nstages:\n  - pass: ptq\n", 3, "'stages' is given twice"),
    "empty": ("", 1, "empty"),
    "a comment only": ("# nothing\n", 1, "empty"),
    "not YAML": ("stages:\n  - pass: [fuse\n", 3, "not valid YAML"),
    "a tab": ("stages:\n\t- pass: fuse\n", 2, "not valid YAML"),
    "control characters": ("\x00", 1, "not valid YAML"),
    "an impossible date": ("stages:\n  - pass: fuse\n    name: 2020-13-45\n", 3, "month must be in 1..12"),
    "a broken tag": ("stages: !!bool maybe\n", 1, "not valid YAML"),
    "python objects": ("stages: !!python/object/apply:os.system [ls]\n", 1, "must be a mapping"),
    "an anchor in itself": ("stages: &a [*a]\n", 1, "without end"),
    "two documents": ("stages:\n- pass: fuse\n---\nstages: []\n", 3, "not valid YAML"),
}


@pytest.mark.parametrize(("text", "line", "reason"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_an_illegal_recipe_is_refused_with_its_line_and_the_reason(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'recipe.yaml'}:{line}: ")
    assert all(each.startswith(f"{tmp_path / 'recipe.yaml'}:") for each in str(caught.value).splitlines())


def test_anchors_that_multiply_are_refused_and_not_unfolded(tmp_path: Path) -> None:
    lines = ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 20)]
    with pytest.raises(UserError, match="more than 10000 values"):
        load(tmp_path, "\n".join(lines))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.yaml cannot be read: No such file"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("# größer\nstages: []".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


ANY_EXAMPLES = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
WORDS = st.sampled_from(
    ["pass", "name", "from", "config", "stages", "baseline", "measure", "recommend", "fuse", "ptq", "qat", "onnx",
     "onnx-int8", "images", "epochs", "batch_sizes", "seconds", "rounds", "tolerance", "max_drop", "eager"]
)  # fmt: skip
SCALARS = WORDS | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates()
STRUCTURES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.integers(), inner, max_size=4),
    max_leaves=12,
)
STAGE = st.dictionaries(st.sampled_from(["pass", "name", "from", "config"]), STRUCTURES | WORDS, max_size=4)
RECIPES = st.fixed_dictionaries(
    {"stages": st.lists(STAGE | STRUCTURES, max_size=4)},
    optional={"baseline": STRUCTURES, "measure": STRUCTURES, "recommend": STRUCTURES},
)


def outcome_of(path: Path) -> Recipe | str:
    try:
        return load_recipe(path)
    except UserError as error:
        return str(error)


@ANY_EXAMPLES
@given(st.text() | st.text(alphabet="[]{}:,-&*!?|>'\"%@`#\n \tab01.~<="))
def test_any_text_is_a_recipe_or_the_users_mistake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome = outcome_of(path)
    if isinstance(outcome, str):
        assert all(line.startswith((f"{path}:", f"recipe {path} ")) for line in outcome.splitlines())
    else:
        made = ["baseline", *(stage.name for stage in outcome.stages)]
        assert all(stage.parent in made[:place] for place, stage in enumerate(outcome.stages, 1))


@ANY_EXAMPLES
@given(RECIPES | STRUCTURES)
def test_any_structure_is_a_recipe_or_the_users_mistake(tmp_path: Path, structure: object) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(structure, allow_unicode=True), encoding="utf-8")
    outcome = outcome_of(path)
    if isinstance(outcome, str):
        assert all(line.startswith(f"{path}:") for line in outcome.splitlines())
    else:
        assert outcome.stages


def test_all_that_is_wrong_with_a_recipe_is_said_at_once_in_the_order_of_its_lines(tmp_path: Path) -> None:
    text = """\
stagess: []
recommend: {max_drop: 7, confidance: 0.9}
measure:
  rounds: 0
  executions: [openvin]
baseline: {epochs: yes}
stages:
  - pass: fuse
  - {pass: ptq, name: "p q"}
  - pass: onnx-int8
  - {pass: qatt, name: later}
  - {pass: ptq, name: again, from: later}
  - {pass: ptq, name: nowhere, from: fusee}
  - pass: qat
    from: fuse
    config:
      epochs: -1
      observer: nonsense
  - {pass: onnx, from: qat}
"""
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    said = [line.partition("recipe.yaml:")[2] for line in str(caught.value).splitlines()]
    expected = [
        (1, "unknown field 'stagess'"),
        (2, "unknown field 'confidance'"),
        (2, "recommend.max_drop"),
        (4, "measure.rounds"),
        (5, "measure.executions: "),
        (6, "baseline.epochs: must not be true or false"),
        (9, "name 'p q' must have"),
        (11, "unknown pass 'qatt'"),
        (13, "nowhere starts from 'fusee'"),
        (17, "qat.epochs"),
        (18, "qat.observer"),
        (19, "onnx cannot follow qat"),
    ]
    assert [line.partition(":")[0] for line in said] == [str(line) for line, _ in expected]
    for line, words in expected:
        assert any(found.startswith(f"{line}: {words}") for found in said), (line, words)


def test_settings_within_settings_are_checked_with_their_lines(tmp_path: Path) -> None:
    text = """
stages:
  - pass: prune-channels
    config:
      macs: 0.6
      train:
        epochs: yes
        epoch: 3
        learning_rate: .inf
"""
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    first, second, third = str(caught.value).splitlines()
    assert ":7: prune-channels.train.epochs: must not be true or false" in first
    assert ":8: unknown field 'epoch' in the config of prune-channels.train (did you mean epochs?)" in second
    assert ":9: prune-channels.train.learning_rate: must be a finite number" in third
