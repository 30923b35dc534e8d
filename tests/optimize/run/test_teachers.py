"""Who teaches: found by a word, a model or a variant, refused before anything trains, and part of what a key knows."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model
from optimize.models.teacher import Served
from optimize.passes.dynamic import Dynamic
from optimize.passes.fuse import Fuse
from optimize.passes.half import Half
from optimize.passes.prune_magnitude import PruneMagnitude
from optimize.passes.qat import Qat
from optimize.pruning.settings import FineTuning
from optimize.run.recipe import load_recipe
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.store.objects import Store
from optimize.training.config import TrainingConfig, inputs
from optimize.training.distil import Distil
from serve.runtime.card.card import Card, Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from serve.runtime.outputs import Outputs
from tests.optimize.runs_fixtures import run_recipe, with_stages
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import TINY_NET, noise_context
from tests.processor import NEEDS_BF16

STEP: dict[str, Any] = {"epochs": 1, "max_steps": 1, "augment": False}
TINY = f"{TINY_NET}:tiny"


def weights(seed: int, classes: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Tiny(classes).eval().state_dict()


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    return Session(Store(tmp_path_factory.mktemp("teachers")), resolve_model(TINY), noise_context())


@pytest.fixture(scope="module")
def base(session) -> Artifact:
    return session.baseline(checkpoint=Checkpoint(weights(0), "c" * 64)).artifact


def saved(folder: Path, seed: int, classes: int = 4, name: str = "master.safetensors") -> dict[str, Any]:
    """A teacher of weights in a file."""
    save_file(weights(seed, classes), folder / name)
    return {"model": TINY, "checkpoint": folder / name}


def taught(teacher: Any, **settings: Any) -> PruneMagnitude:
    return PruneMagnitude(sparsity=0.3, train=FineTuning(**STEP, distil={"teacher": teacher, **settings}))


# --- keys --------------------------------------------------------------------------------------------------------


def test_what_is_taught_depends_on_the_teacher_and_not_on_its_name_or_place(session, base, tmp_path):
    first = session.apply(base, taught("self"))
    for named in ("parent", "baseline", base, "the same"):
        assert session.apply(base, taught(named), others={"the same": base}).cached
    other = session.apply(base, taught(saved(tmp_path, 5)))
    assert not other.cached
    assert session.apply(base, taught(saved(tmp_path, 5, name="copied.safetensors")), "renamed").cached
    assert first.artifact.key != other.artifact.key
    assert any(note.startswith("taught by baseline: 0.5 of the loss at tem") for note in first.artifact.card.notes)
    assert any(note.startswith("taught by tiny: ") for note in other.artifact.card.notes)


def test_all_settings_but_the_teachers_name_are_inputs():
    usual: dict[str, Any] = {"teacher": "a", "temperature": 3.0, "weight": 0.25, "features": {"a": "b"}}
    usual["feature_weight"] = 2.0
    changes: list[dict[str, Any]] = [
        {"temperature": 4.0},
        {"weight": 0.5},
        {"features": {"a": "c"}},
        {"feature_weight": 1.0},
    ]
    for make in (lambda distil: TrainingConfig(distil=distil), lambda distil: PruneMagnitude(train={"distil": distil})):
        plain = inputs(make(usual))
        assert inputs(make({**usual, "teacher": "b"})) == plain
        assert all(inputs(make({**usual, **change})) != plain for change in changes)
        assert inputs(make(None)) != plain


def test_another_teacher_is_another_digest(session, base, tmp_path):
    def digest(teacher: Any, **settings: Any) -> str:
        teaching = session.teaching(taught(teacher, **settings), base)
        assert teaching is not None
        return teaching.digest

    spread = dataclasses.replace(base.card.preprocessing, std=(0.5,))
    elsewhere = dataclasses.replace(base, card=dataclasses.replace(base.card, preprocessing=spread))
    net = Tiny(4).eval()
    net.load_state_dict(weights(6))
    found = [
        digest(each) for each in (base, elsewhere, saved(tmp_path, 5), saved(tmp_path, 6, name="6.safetensors"), net)
    ]
    assert len(set(found)) == len(found)
    assert digest("self", temperature=5.0) == digest(base) == found[0]


def test_the_baseline_is_taught_by_a_model_with_its_weights(session, tmp_path):
    config = TrainingConfig(**STEP, distil={"teacher": saved(tmp_path, 5), "weight": 1.0})
    taught = session.baseline(config)
    assert not taught.cached
    assert session.baseline(config).cached
    assert taught.artifact.card.lineage[-1].config["distil"]["teacher"]["model"] == TINY
    torch.manual_seed(0)
    assert not torch.equal(taught.artifact.module().get_parameter("head.weight"), Tiny(4).head.weight)


def test_oneself_is_the_float_network_that_a_pass_starts_from(session, base):
    fused = session.apply(base, Fuse(), "folded").artifact
    lowbit = dataclasses.replace(fused, name="w4", kind="lowbit", parent=fused)
    for parent in (fused, lowbit):
        teaching = session.teaching(Qat(distil="self"), parent)
        assert teaching is not None
        assert teaching.open().name == "folded"


def test_a_graph_that_takes_pixels_is_given_those_that_the_images_were():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    seen: list[torch.Tensor] = []

    class Noting:
        device = torch.device("cpu")
        provider = "noting"

        def run(self, batch: torch.Tensor) -> Outputs:
            seen.append(batch)
            return (torch.zeros(len(batch), 4, dtype=torch.float64),)

    card = Card(
        name="onnx",
        model="test",
        task="classification",
        format="onnx",
        file="model.onnx",
        precision="float32",
        input_dtype="uint8",
        device="any",
        preprocessing=Preprocessing(16, (16, 16), mean=(0.4,), std=(0.3,)),
        classes=tuple("abcd"),
        files={"model.onnx": "0" * 64},
    )
    served = Served(Path(), card, Execution("onnxruntime"))
    served._engine = Noting()
    assert served(normalise(pixels, card.preprocessing, torch.device("cpu"), torch.float32)).dtype == torch.float32
    assert torch.equal(seen[0], pixels)
    assert seen[0].dtype == torch.uint8


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param(Half(dtype="bfloat16"), "half is a reduced-precision program", marks=NEEDS_BF16),
        (Dynamic(), "dynamic is a dynamically quantized program"),
    ],
)
def test_an_artifact_of_any_engine_teaches_by_its_answers_and_not_by_features(config, said, session, base):
    narrow = session.apply(base, config).artifact
    teaching = session.teaching(taught("narrow"), base, {"narrow": narrow})
    assert teaching is not None
    module = copy.deepcopy(teaching.open().module)
    images = session.context.example(8)
    with torch.no_grad():
        expected = base.module()(images)
        answers = module(images)
        assert torch.equal(pickle.loads(pickle.dumps(module))(images), answers)
    assert (answers.dtype, answers.shape) == (torch.float32, (8, 4))
    assert 0 < (answers - expected).abs().max() < 0.05 * expected.abs().max()
    with pytest.raises(UserError, match=rf"distil\.features: {said}; use a float module"):
        session.teaching(taught("narrow", features=["relu"]), base, {"narrow": narrow})


# --- what is no teacher ------------------------------------------------------------------------------------------


def test_what_cannot_teach_is_refused_in_one_line_before_anything_is_made(session, base, tmp_path):
    coloured = dataclasses.replace(base.card, preprocessing=dataclasses.replace(base.card.preprocessing, crop=(8, 8)))
    others = {
        "small": dataclasses.replace(base, name="small", card=coloured),
        "more": dataclasses.replace(base, name="more", card=dataclasses.replace(base.card, classes=("a", "b"))),
        "moved": dataclasses.replace(base, name="moved", card=dataclasses.replace(base.card, classes=tuple("dcba"))),
    }
    refusals = {
        "basline": r"there is no artifact 'basline' \(did you mean baseline\?\); the artifacts are baseline, small",
        "small": "inputs of small .*differ: 1x8x8 and 1x16x16",
        "more": "more .*has 2 classes, the data has 4",
        "moved": "moved .*has other classes",
    }
    before = sorted(session.store.objects.iterdir())
    for name, said in refusals.items():
        with pytest.raises(UserError, match=f"distil.teacher: {said}") as refusal:
            session.apply(base, taught(name), others=others)
        assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="the checkpoint's head has 7 outputs, the data has 4 classes"):
        session.apply(base, taught(saved(tmp_path, 5, 7)))
    save_file(weights(5), tmp_path / "other.safetensors", {"classes": '["b", "a", "c", "d"]'})
    with pytest.raises(
        UserError, match=r"has the same classes as the student in another order \('classes' of its checkpoint: b, a"
    ):
        session.apply(base, taught({"model": TINY, "checkpoint": tmp_path / "other.safetensors"}))
    spoilt = torch.nn.Linear(2, 2)
    spoilt.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match=r"^distil\.teacher: Linear: does not fit the model: .* hold NaN"):
        session.apply(base, taught(spoilt))
    with pytest.raises(
        UserError, match=r"distil.teacher: 'self' is the float network that a pass starts from, but the"
    ):
        session.baseline(TrainingConfig(**STEP, distil="self"))
    assert sorted(session.store.objects.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "stages:\n- {pass: fuse}\n- pass: qat\n  from: baseline\n  config:\n    distil:\n      teacher: fuze\n",
            r"7: qat: distil\.teacher: 'fuze' is no earlier stage \(did you mean fuse\?\); the earlier ones are "
            "baseline, fuse",
        ),
        (
            "stages:\n- pass: onnx\n- pass: qat\n  from: baseline\n"
            "  config: {distil: {teacher: onnx, features: [a]}}\n",
            r"5: qat: distil\.teacher: onnx is a float ONNX graph, which has no features; use a float module",
        ),
        (
            "stages:\n- pass: prune-nm\n  config:\n    train:\n      distil: qat\n",
            r"5: prune-nm: distil\.teacher: 'qat' is no earlier stage; the earlier ones are baseline",
        ),
        (
            "baseline:\n  distil: self\nstages: [pass: fuse]\n",
            r"2: baseline\.distil\.teacher: the baseline is made first",
        ),
        (
            "baseline:\n  distil: {teacher: {model: resnet18}}\nstages: [pass: fuse]\n",
            r"2: baseline\.distil: teacher: resnet18 needs weights to be a teacher: set checkpoint or weights",
        ),
        (
            "stages:\n- pass: qat\n  config:\n    distil:\n      teacher: self\n      temperatur: 2\n",
            r"6: unknown field 'temperatur' in the config of qat\.distil \(did you mean temperature",
        ),
        ("stages:\n- pass: qat\n  config: {distil: {weight: 0.5}}\n", r"3: qat\.distil\.teacher: field required"),
        ("stages:\n- pass: qat\n  config: {distil: {teacher: self, weight: 0}}\n", "3: qat.distil: weight is 0 and"),
    ],
)
def test_a_recipe_with_no_such_teacher_is_refused_with_its_line(text, said, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"recipe.yaml:{said}") as refusal:
        load_recipe(path)
    assert "\n" not in str(refusal.value)


def test_a_recipes_features_and_models_are_tried_before_its_baseline_is_trained(tmp_path):
    master = {"model": TINY, "checkpoint": str(saved(tmp_path, 5, 7)["checkpoint"])}
    stages: list[dict[str, Any]] = [
        {"pass": "fuse"},
        {"pass": "qat", "from": "fuse", "config": {"distil": {"teacher": "baseline", "features": {"_2": "x_2"}}}},
        {"pass": "prune-nm", "from": "baseline", "config": {"train": {"distil": {"teacher": master}}}},
    ]
    with pytest.raises(UserError) as refusal:
        run_recipe(tmp_path / "store", with_stages(*stages))
    one, two = str(refusal.value).splitlines()
    assert "distil.features: the teacher has no node 'x_2' (did you mean _2" in one
    assert "the checkpoint's head has 7 outputs, the data has 10 classes" in two
    assert not list((tmp_path / "store" / ".store" / "objects").iterdir())


def test_a_feature_that_training_for_integers_has_not_is_refused_before_the_baseline_is_trained(tmp_path):
    """A convolution that becomes one with its norm and its activation has no value of its own any more."""
    stages = with_stages({"pass": "qat", "config": {"distil": {"teacher": "self", "features": ["_0"]}}})
    with pytest.raises(UserError, match=r"fuses '_0' with the node after it; .* is '_2'$") as refusal:
        run_recipe(tmp_path / "store", stages)
    assert "\n" not in str(refusal.value)
    assert not list((tmp_path / "store" / ".store" / "objects").iterdir())


def test_settings_of_a_teacher_are_plain_values_and_come_back():
    for given in ("self", {"model": "resnet18", "checkpoint": "x.pt"}):
        config = Qat(distil={"teacher": given, "features": ["a", "b"]})
        assert Qat.model_validate(config.model_dump(mode="json")) == config
    assert Distil(teacher="parent") == Distil(teacher="self")


def test_activation_checkpointing_goes_with_answers_and_not_with_features():
    config = TrainingConfig(activation_checkpointing=True, distil="self")
    assert config.distil is not None
    with pytest.raises(UserError, match=r"Training: activation_checkpointing discards the activations that dis"):
        TrainingConfig(activation_checkpointing=True, distil={"teacher": "self", "features": ["relu"]})
