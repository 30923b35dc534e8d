"""Steps through the store: what is in an artifact, when the cache is used, and when it must not be."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pytest
import torch

from optimize.context import Context
from optimize.errors import NotApplicableError, PassError
from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model
from optimize.passes import fuse as fuse_file
from optimize.passes.base import Pass, find_pass, pass_of, passes
from optimize.passes.dynamic import Dynamic
from optimize.passes.expand import Expand
from optimize.passes.fuse import Fuse
from optimize.passes.half import Half
from optimize.passes.onnx import Onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.prune_channels import PruneChannels
from optimize.passes.ptq import Ptq
from optimize.passes.qat import Qat
from optimize.run import session as session_file
from optimize.run.session import Session
from optimize.store import hashes
from optimize.store.artifact import REFERENCE_FILE
from optimize.store.objects import Store
from optimize.training.config import TrainingConfig, trains
from serve.common.config import Config
from serve.runtime.card.card import Preprocessing, load_card, sha256_file
from serve.runtime.card.json_documents import sealed, unsealed
from serve.runtime.errors import UserError
from serve.runtime.model_files.program_file import load_program
from tests.optimize.conftest import SHORT
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import CPU, GREY16, TINY_NET, noise, noise_context, run


@pytest.fixture
def checkpoint() -> Checkpoint:
    torch.manual_seed(0)
    return Checkpoint(Tiny(4).eval().state_dict(), "c" * 64)


@pytest.fixture
def quick(tmp_path):
    """``quick(context)``: a session on the store of this test, which trains nothing."""

    def build(context: Context | None = None, model: str = "tiny") -> Session:
        return Session(Store(tmp_path / "store"), resolve_model(f"{TINY_NET}:{model}"), context or noise_context())

    return build


def test_a_checkpoints_weights_are_the_baselines(quick, checkpoint):
    artifact = quick().baseline(checkpoint=checkpoint).artifact
    state = artifact.module().state_dict()
    assert state.keys() == checkpoint.state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in checkpoint.state.items())
    expected = Tiny(4).eval()
    expected.load_state_dict(dict(checkpoint.state))
    batch = torch.randn(3, 1, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(run(artifact, batch), expected(batch), rtol=1e-4, atol=1e-5)
    assert checkpoint.sha256 in artifact.card.notes[0]


def test_a_second_run_takes_everything_from_the_cache(quick, checkpoint):
    first = quick()
    base = first.baseline(checkpoint=checkpoint)
    fused = first.apply(base.artifact, Fuse())
    assert not base.cached
    assert not fused.cached
    second = quick()  # another session, as in another process
    again = second.baseline(checkpoint=checkpoint)
    assert again.cached
    assert again.artifact.key == base.artifact.key
    assert second.apply(again.artifact, Fuse()).cached
    assert second.apply(again.artifact, Fuse()).artifact.folder == fused.artifact.folder


@pytest.mark.parametrize(
    "configs",
    [
        (Fuse(), Half(dtype="bfloat16")),
        (Fuse(), Ptq()),
        (Fuse(), Dynamic()),
        (Fuse(), Ptq(), OnnxInt8()),
        (Qat(epochs=1, images=32, augment=False),),
    ],
    ids=["half", "ptq", "dynamic", "onnx-int8", "qat"],
)
def test_equal_inputs_give_equal_bytes_whatever_the_process_made_before(tmp_path, checkpoint, configs):
    files = []
    for number in range(2):
        session = Session(Store(tmp_path / str(number)), resolve_model(f"{TINY_NET}:tiny"), noise_context())
        artifact = session.baseline(checkpoint=checkpoint).artifact
        for config in configs:
            artifact = session.apply(artifact, config).artifact
        files.append(artifact.card.files)
        # Names of types count up in a process, and those of this module's are taken now.
        torch.jit.trace(Tiny(4).eval(), torch.zeros(1, 1, 16, 16), check_trace=False)
    assert files[0] == files[1]


CHANGES = {
    "the seed": lambda context: dataclasses.replace(context, seed=1),
    "an image": lambda context: noise_context(train=noise(64, 77)),
    "how images may be augmented": lambda context: dataclasses.replace(
        context, data=dataclasses.replace(context.data, augment="none")
    ),
    "the mean": lambda context: dataclasses.replace(context, preprocessing=dataclasses.replace(GREY16, mean=(0.4,))),
    "the interpolation": lambda context: dataclasses.replace(
        context, preprocessing=dataclasses.replace(GREY16, interpolation="bicubic")
    ),
    "the resizing": lambda context: dataclasses.replace(
        context, preprocessing=Preprocessing(20, (16, 16), (0.5,), (0.25,))
    ),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.replace(" ", "-"))
def test_other_surroundings_are_another_key(quick, checkpoint, change):
    context = noise_context()
    base = quick(context).baseline(checkpoint=checkpoint)
    other = quick(CHANGES[change](context)).baseline(checkpoint=checkpoint)
    assert not other.cached
    assert other.artifact.key != base.artifact.key


def test_other_validation_images_make_no_other_weights(quick):
    config = TrainingConfig(epochs=1, augment=False)
    first = quick().baseline(config)
    again = quick(noise_context(val=noise(12, 78))).baseline(config)
    assert again.cached
    assert again.artifact.key == first.artifact.key
    assert load_card(again.artifact.folder).data["val"] == 12


def test_another_checkpoint_is_another_key_and_reaches_the_children(quick, checkpoint):
    state = {name: tensor.clone() for name, tensor in checkpoint.state.items()}
    state["head.bias"] += 1
    session = quick()
    base, other = (session.baseline(checkpoint=c).artifact for c in (checkpoint, Checkpoint(state, "d" * 64)))
    assert base.key != other.key
    fused, refused = session.apply(base, Fuse()), session.apply(other, Fuse())
    assert not refused.cached
    assert fused.artifact.key != refused.artifact.key
    assert not torch.equal(fused.artifact.module().state_dict()["head.bias"], state["head.bias"])
    assert torch.equal(refused.artifact.module().state_dict()["head.bias"], state["head.bias"])


def test_two_factories_of_one_file_are_two_baselines(tmp_path):
    (tmp_path / "pair.py").write_text(
        "from torch import nn\n"
        "def one(): return nn.Sequential(nn.Flatten(), nn.Linear(256, 4))\n"
        "def two(): return nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(256, 4))\n"
    )
    store, config = Store(tmp_path / "store"), TrainingConfig(epochs=1, augment=False)
    one, two = (
        Session(store, resolve_model(f"{tmp_path}/pair.py:{name}"), noise_context()).baseline(config)
        for name in ("one", "two")
    )
    assert one.artifact.key != two.artifact.key
    assert not two.cached
    assert {name.partition(".")[0] for name in two.artifact.module().state_dict()} == {"2"}


def test_a_module_that_refuses_a_state_dict_without_versions_is_rebuilt(tmp_path):
    session = Session(
        Store(tmp_path / "store"),
        resolve_model("mnasnet0_5"),
        dataclasses.replace(noise_context(), preprocessing=Preprocessing(32, (32, 32))),
    )
    artifact = session.baseline(checkpoint=Checkpoint(session.source.build(4).state_dict(), "b" * 64)).artifact
    assert artifact.module()(torch.zeros(1, 3, 32, 32)).shape == (1, 4)


def test_no_image_of_the_data_travels_in_a_program(quick, checkpoint):
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    quantized = session.apply(base, Ptq(images=8)).artifact
    for path in (base.path, session.apply(base, Fuse()).artifact.path, quantized.folder / REFERENCE_FILE):
        assert load_program(path).example_inputs is None


def test_a_changed_config_reruns_its_stage_and_the_descendants_only(quick, checkpoint):
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    one = session.apply(base, Ptq(images=8, observer="minmax"))
    int8 = session.apply(one.artifact, OnnxInt8())
    session.apply(base, Onnx())
    two = session.apply(base, Ptq(images=40, observer="minmax"))  # other ranges, and so other bytes
    assert not two.cached
    assert two.artifact.key != one.artifact.key
    assert not session.apply(two.artifact, OnnxInt8()).cached
    assert session.apply(one.artifact, OnnxInt8()).artifact.key == int8.artifact.key
    assert session.apply(base, Onnx()).cached


def test_a_changed_training_config_is_another_baseline(quick):
    session = quick()
    config = TrainingConfig(epochs=1, augment=False)
    first = session.baseline(config)
    assert session.baseline(config).cached
    assert not session.baseline(TrainingConfig(epochs=1, augment=False, learning_rate=0.01)).cached
    assert "trained here: best of 1 epochs" in first.artifact.card.notes[0]


def test_changed_source_of_a_pass_takes_no_old_result(quick, checkpoint, monkeypatch):
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    session.apply(base, Fuse())
    monkeypatch.setattr(Pass, "source_digest", lambda self: "e" * 64)
    assert not session.apply(base, Fuse()).cached


def test_a_corrupted_file_is_noticed_and_made_again(quick, checkpoint):
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    fused = session.apply(base, Fuse()).artifact
    whole = fused.path.read_bytes()
    fused.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = session.apply(base, Fuse())
    assert not again.cached
    assert again.artifact.path.stat().st_size == pytest.approx(len(whole), abs=64)
    assert run(again.artifact, torch.zeros(2, 1, 16, 16)).shape == (2, 4)


def test_the_card_names_every_ancestor_with_its_config(made):
    card = load_card(made("fuse", "ptq", "onnx-int8").folder)
    assert [entry.name for entry in card.lineage] == ["baseline", "fuse", "ptq", "onnx-int8"]
    assert [entry.operation for entry in card.lineage] == ["baseline", "fuse", "ptq", "onnx-int8"]
    assert card.lineage[0].config["epochs"] == SHORT.epochs
    assert card.lineage[2].config["observer"] == "histogram"
    assert len({entry.key for entry in card.lineage}) == 4
    assert card.classes == tuple("0123456789")
    assert card.preprocessing == GREY16
    assert card.versions["torch"] == torch.__version__.partition("+")[0]
    assert set(card.files) == {path.name for path in made("fuse", "ptq", "onnx-int8").folder.iterdir()} - {
        "card.json",
        "object.json",
    }


@pytest.fixture
def runs(monkeypatch):
    """The parents that ``fuse`` has run on, by name, one entry a run."""
    real, counted = find_pass("fuse"), []

    def counting(parent, *rest):
        counted.append(parent.name)
        return real.apply(parent, *rest)

    monkeypatch.setattr(Pass, "source_digest", lambda self: "e" * 64)  # that of `counting` is this file's
    registered = dataclasses.replace(real, apply=counting)
    monkeypatch.setattr(session_file, "pass_of", lambda config: registered if type(config) is Fuse else pass_of(config))
    return counted


def test_the_same_pass_under_two_names_runs_once_and_gives_two_artifacts_of_the_same_files(quick, checkpoint, runs):
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    steps = [session.apply(base, Fuse(), name) for name in ("one", "two")]
    one, two = (step.artifact for step in steps)
    assert runs == ["baseline"]
    assert [step.cached for step in steps] == [False, True]
    assert (load_card(one.folder).name, load_card(two.folder).name) == ("one", "two")
    assert [entry.name for entry in two.card.lineage] == ["baseline", "two"]
    assert one.folder != two.folder
    assert one.key == two.key == one.card.lineage[-1].key
    assert all((one.folder / name).samefile(two.folder / name) for name in one.card.files)


def test_a_pass_after_a_renamed_stage_does_not_run_again(quick, checkpoint):
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    one, two = (session.apply(base, Fuse(), name).artifact for name in ("one", "two"))
    first = session.apply(one, Ptq(images=8), "int8")
    again = session.apply(two, Ptq(images=8), "quantized")
    assert (first.cached, again.cached) == (False, True)
    assert [entry.name for entry in again.artifact.card.lineage] == ["baseline", "two", "quantized"]
    int8 = session.apply(first.artifact, OnnxInt8())
    assert session.apply(again.artifact, OnnxInt8()).artifact.key == int8.artifact.key


def test_a_model_of_another_file_name_in_another_folder_is_the_same_baseline(checkpoint, tmp_path):
    steps = []
    for place in ("here/net.py", "there/my_net.py"):
        file = tmp_path / place
        file.parent.mkdir()
        file.write_bytes(TINY_NET.read_bytes())
        session = Session(Store(tmp_path / "store"), resolve_model(f"{file}:tiny"), noise_context())
        steps.append(session.baseline(checkpoint=checkpoint, origin=tmp_path / place / "weights.pt"))
    assert [step.cached for step in steps] == [False, True]
    assert steps[0].artifact.key == steps[1].artifact.key


def test_the_device_that_trained_and_the_classes_labels_make_no_other_weights(quick, checkpoint, monkeypatch):
    base = quick().baseline(checkpoint=checkpoint)
    context = noise_context()
    elsewhere = quick(dataclasses.replace(context, device=torch.device("meta")))  # only its name is asked for
    assert elsewhere.baseline(checkpoint=checkpoint).cached
    labelled = quick(dataclasses.replace(context, data=dataclasses.replace(context.data, classes=("w", "x", "y", "z"))))
    again = labelled.baseline(checkpoint=checkpoint)
    assert again.cached
    assert load_card(again.artifact.folder).classes == ("w", "x", "y", "z")
    assert load_card(base.artifact.folder).classes == ("a", "b", "c", "d")


def test_how_many_processes_train_is_part_of_what_is_trained_and_of_nothing_else(quick, checkpoint):
    short = TrainingConfig(epochs=1, batch_size=16)
    alone = quick()
    alone.baseline(short)
    alone.apply(alone.baseline(checkpoint=checkpoint).artifact, Fuse())
    many = quick(dataclasses.replace(noise_context(), processes=9))
    base = many.baseline(checkpoint=checkpoint)
    assert base.cached
    assert many.apply(base.artifact, Fuse()).cached
    for trained in (lambda: many.baseline(short), lambda: many.apply(base.artifact, Qat(epochs=1, batch_size=16))):
        with pytest.raises(UserError, match="processes: 9 cannot share steps of 16"):  # not taken from the store
            trained()


def test_the_passes_that_train_are_known_by_their_settings():
    training = {name for name, step in passes().items() if trains(step.config())}
    assert training == {"fine-tune", "qat", "qat-lowbit", "prune-channels", "prune-magnitude", "prune-nm"}
    assert trains(Expand(train=TrainingConfig()))
    assert not trains(PruneChannels(train={"epochs": 0}))


def test_a_pass_that_reads_the_device_is_made_for_each(quick, checkpoint, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    assert not session.apply(base, Half(dtype="bfloat16")).cached
    elsewhere = quick(dataclasses.replace(session.context, device=torch.device("cuda")))
    monkeypatch.setattr(session_file, "machine", lambda device: {"gpu": str(device)})
    monkeypatch.setattr(Context, "example", lambda self, images=4: torch.zeros(images, 1, 16, 16))
    assert not elsewhere.apply(base, Half(dtype="bfloat16")).cached


def test_files_under_two_names_are_hashed_once(quick, checkpoint, monkeypatch):
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    hashed: list[str] = []

    def counting(path):
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(hashes, "sha256_file", counting)
    session.apply(base, Fuse(), "one")
    artifact = session.apply(base, Fuse(), "two").artifact
    session.apply(base, Fuse(), "two")
    for name in artifact.card.files:
        assert hashed.count(name) == 1


def test_a_step_knows_when_it_was_made_and_not_when_it_was_looked_up(quick, checkpoint):
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    session = quick()
    made = session.baseline(checkpoint=checkpoint)
    assert before <= datetime.datetime.fromisoformat(made.created) <= datetime.datetime.now(datetime.UTC)
    manifest = session.store.objects / made.artifact.key / "object.json"
    body = unsealed(manifest.read_text())
    manifest.write_text(json.dumps(sealed({**body, "created": "2025-01-31T12:00:00+00:00"})))
    again = quick().baseline(checkpoint=checkpoint)
    assert again.cached
    assert again.created == "2025-01-31T12:00:00+00:00"


def test_a_pass_after_one_that_it_cannot_follow_is_refused(made, session):
    with pytest.raises(UserError, match=r"ptq takes a float module, not a float ONNX graph"):
        session.apply(made("onnx"), Ptq())
    integers = r"onnx-int8 takes a module trained with fewer bits or a quantized \(int8\) module, not a float module"
    with pytest.raises(UserError, match=integers):
        session.apply(made(), OnnxInt8())


def test_only_float_modules_have_an_eager_module(made):
    assert isinstance(made("fuse").module(), torch.nn.Module)
    for names in (("ptq",), ("onnx",), ("half",)):
        with pytest.raises(PassError, match="has no eager module"):
            made(*names).module()


def test_what_fails_leaves_nothing_behind(quick, checkpoint, monkeypatch):
    session = quick()
    base = session.baseline(checkpoint=checkpoint).artifact
    objects = session.store.root / ".store" / "objects"
    before = set(objects.iterdir())
    monkeypatch.setattr(fuse_file, "write_program", lambda *a: (_ for _ in ()).throw(RuntimeError("half way")))
    with pytest.raises(RuntimeError, match="half way"):
        session.apply(base, Fuse())
    without = quick(model="tiny_without_linear")
    bare = without.baseline(checkpoint=Checkpoint(without.source.build(4).state_dict(), "f" * 64)).artifact
    with pytest.raises(NotApplicableError):
        without.apply(bare, Dynamic())
    assert len(set(objects.iterdir()) - before) == 2  # the other model's baseline, and its name
    assert not list((session.store.root / ".store" / "tmp").iterdir())
    monkeypatch.undo()
    assert not session.apply(base, Fuse()).cached


def test_a_model_with_the_wrong_number_of_outputs_is_the_users_mistake(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "from torch import nn\ndef fixed(): return nn.Sequential(nn.Flatten(), nn.Linear(256, 7))\n"
    )
    session = Session(Store(tmp_path / "store"), resolve_model(f"{tmp_path}/wrong.py:fixed"), noise_context())
    state = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 7)).state_dict()
    with pytest.raises(UserError, match=r"gives \(4, 7\) for a batch of 4 images of 4 classes"):
        session.baseline(checkpoint=Checkpoint(state, "a" * 64))


def test_a_model_that_fails_on_its_input_is_the_users_mistake(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "from torch import nn\ndef wrong(): return nn.Sequential(nn.Flatten(), nn.Linear(9, 4))\n"
    )
    session = Session(Store(tmp_path / "store"), resolve_model(f"{tmp_path}/wrong.py:wrong"), noise_context())
    state = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 4)).state_dict()
    with pytest.raises(UserError, match=r"fails on an input of shape \(4, 1, 16, 16\): RuntimeError"):
        session.baseline(checkpoint=Checkpoint(state, "a" * 64))


def test_every_pass_of_the_issue_is_registered_once_with_its_config():
    assert set(passes()) >= {"fuse", "half", "dynamic", "ptq", "qat", "onnx", "onnx-half", "onnx-int8"}
    for name, entry in passes().items():
        assert entry.name == name
        assert pass_of(entry.config()) is entry
        assert all(field.description for field in entry.config.model_fields.values()), name
        assert entry.config.model_config["frozen"]
        with pytest.raises(UserError, match="no_such_field: unknown"):
            entry.config(no_such_field=1)


def test_an_unknown_pass_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown pass 'onx' \(did you mean onnx or"):
        find_pass("onx")
    with pytest.raises(UserError, match="Config is not the config of a pass"):
        pass_of(Config())


def test_calibration_images_are_training_images_stratified_and_seeded():
    context = noise_context()
    labels = torch.cat([labels for _, labels in context.calibration(20)])
    assert torch.bincount(labels).tolist() == [5, 5, 5, 5]
    example = context.example(8)
    assert example.shape == (8, 1, 16, 16)
    assert example.dtype == torch.float32
    assert torch.equal(example, noise_context().example(8))
    assert not torch.equal(example, dataclasses.replace(context, seed=1).example(8))
    assert context.device == CPU
