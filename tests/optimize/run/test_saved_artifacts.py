"""What outlives its session: saved artifacts that are taken back, and steps that are pickled."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import optimize as opt
from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model
from optimize.passes.dynamic import Dynamic
from optimize.passes.fuse import Fuse
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.run.saved_artifacts import take
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.store.objects import Store
from serve.runtime.card.card import load_card
from serve.runtime.errors import UserError
from tests.optimize.runs_fixtures import ROOT, TINY
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import TINY_NET, noise_context, run
from tests.programs import Programs

BATCH = torch.linspace(-1, 1, 2 * 256).reshape(2, 1, 16, 16)


def session_in(root: Path) -> Session:
    return Session(Store(root), resolve_model(f"{TINY_NET}:tiny"), noise_context())


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return session_in(tmp_path / "store")


@pytest.fixture
def fused(session: Session) -> Artifact:
    torch.manual_seed(0)
    base = session.baseline(checkpoint=Checkpoint(Tiny(4).eval().state_dict(), "c" * 64)).artifact
    return session.apply(base, Fuse(), "folded").artifact


def saved(artifact: Artifact, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in (*artifact.card.files, "card.json"):
        shutil.copyfile(artifact.folder / name, folder / name)
    return folder


def objects(session: Session) -> set[str]:
    return {path.name for path in session.store.objects.iterdir()}


def test_what_the_store_still_has_is_taken_back_with_its_ancestors(
    session: Session, fused: Artifact, tmp_path: Path
) -> None:
    folder = saved(fused, tmp_path / "out")
    before = objects(session)
    step = take(session_in(session.store.root), folder)
    assert objects(session) == before
    assert (step.cached, step.artifact) == (True, dataclasses.replace(fused, build_module=None))
    assert [artifact.name for artifact in step.artifact.line()] == ["baseline", "folded"]
    expected = fused.module().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in step.artifact.module().state_dict().items())


def test_passes_go_on_from_it_and_what_they_made_before_is_found(
    session: Session, fused: Artifact, tmp_path: Path
) -> None:
    int8 = session.apply(fused, Ptq(images=8)).artifact
    folder = saved(int8, tmp_path / "out")
    graph = session.apply(int8, OnnxInt8())
    step = take(session, folder)
    again = session.apply(step.artifact, OnnxInt8())
    assert again.cached
    assert again.artifact.key == graph.artifact.key


def test_into_another_store_its_files_are_copied(fused: Artifact, tmp_path: Path) -> None:
    elsewhere = session_in(tmp_path / "other")
    folder = saved(fused, tmp_path / "out")
    step = take(elsewhere, folder)
    artifact = step.artifact
    assert dict(artifact.card.files) == dict(fused.card.files)
    assert [entry.name for entry in artifact.card.lineage] == ["baseline", "folded"]
    assert artifact.parent is None
    torch.testing.assert_close(run(artifact, BATCH), run(fused, BATCH))
    with torch.no_grad():
        torch.testing.assert_close(artifact.module()(BATCH), fused.module()(BATCH))
    assert elsewhere.apply(artifact, Dynamic()).artifact.card.lineage[-2].name == "folded"
    assert take(elsewhere, folder).artifact.key == artifact.key


def test_a_pass_that_needs_the_ancestors_says_that_they_are_not_there(
    session: Session, fused: Artifact, tmp_path: Path
) -> None:
    folder = saved(session.apply(fused, Ptq(images=8)).artifact, tmp_path / "out")
    elsewhere = session_in(tmp_path / "other")
    with pytest.raises(
        UserError, match="onnx-int8 needs the artifact that ptq was made from, which is not in the store"
    ):
        elsewhere.apply(take(elsewhere, folder).artifact, OnnxInt8())


def test_other_weights_under_a_known_key_are_not_mistaken_for_the_stored_ones(
    session: Session, fused: Artifact, tmp_path: Path
) -> None:
    """As after a training on another machine: the same inputs, other files."""
    other = session_in(tmp_path / "other")
    state = {name: tensor + 1 for name, tensor in Tiny(4).eval().state_dict().items()}
    base = other.baseline(checkpoint=Checkpoint(state, "c" * 64)).artifact
    folder = saved(other.apply(base, Fuse(), "folded").artifact, tmp_path / "out")
    step = take(session, folder)
    assert dict(step.artifact.card.files) == dict(load_card(folder).files) != dict(fused.card.files)
    assert step.artifact.key != fused.key


def test_what_does_not_belong_to_the_session_is_refused(session: Session, fused: Artifact, tmp_path: Path) -> None:
    folder = saved(fused, tmp_path / "out")
    context = noise_context()
    labelled = dataclasses.replace(context, data=dataclasses.replace(context.data, classes=("w", "x", "y", "z")))
    for other, what in (
        (dataclasses.replace(session, context=labelled), "list of classes"),
        (dataclasses.replace(session, source=resolve_model(f"{TINY_NET}:tiny_without_linear")), "model"),
    ):
        with pytest.raises(UserError, match=f"has another {what} than this session"):
            take(other, folder)
    (folder / fused.card.file).write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"cannot be loaded: .*corrupted"):
        take(session, folder)
    with pytest.raises(UserError, match="is not an artifact folder, it has no card"):
        take(session, tmp_path)


# --- pickling

READ = """
import pathlib, pickle, sys
step = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
artifact = step.artifact
again = artifact.build_module.args[0].apply(artifact, __import__("optimize").Dynamic())
print(artifact.name, artifact.key, len(artifact.module().state_dict()), again.cached)
"""


@pytest.mark.slow
def test_a_step_is_read_in_another_process_in_another_folder_and_gone_on_from(
    tmp_path: Path, programs: Programs
) -> None:
    base = opt.load(TINY, training=opt.Training(epochs=1, augment=False), store=tmp_path / "store", device="cpu")
    fused = opt.apply(base, opt.Fuse())
    made = opt.apply(fused, opt.Dynamic(), name="before")
    assert made.artifact.name == "before"
    pickled = pickle.dumps(fused.step)
    assert len(pickled) < 20_000  # words and keys, no images and no weights
    (tmp_path / "step").write_bytes(pickled)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    read = programs.run("-c", READ, tmp_path / "step", cwd=tmp_path, environment=environment)
    assert read.returncode == 0, read.stderr
    words = read.stdout.split()
    assert words == ["fuse", fused.artifact.key, str(len(fused.artifact.module().state_dict())), "True"]


def test_a_variant_pickles_with_its_session(tmp_path: Path) -> None:
    base = opt.load(TINY, training=opt.Training(epochs=1, augment=False), store=tmp_path / "store", device="cpu")
    one, two = pickle.loads(pickle.dumps((base, opt.apply(base, opt.Fuse()))))
    assert one.session is two.session
    assert two.step.artifact.parent == one.step.artifact
    assert one.session is not base.session


def test_what_was_pruned_since_is_told_in_a_line(tmp_path: Path) -> None:
    base = opt.load(TINY, training=opt.Training(epochs=1, augment=False), store=tmp_path / "store", device="cpu")
    pickled = pickle.dumps(base.step)
    shutil.rmtree(base.artifact.folder)
    with pytest.raises(UserError, match="baseline cannot be opened, make it again"):
        pickle.loads(pickled)


def test_a_session_that_words_cannot_open_says_so(session: Session) -> None:
    with pytest.raises(UserError, match="cannot be pickled"):
        pickle.dumps(session)
