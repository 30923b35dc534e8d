"""Mistakes that can be known at once: each is one line before anything is trained, measured or written."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import optimize
from optimize import cli
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.store.atomic_files import check_writable
from serve.runtime.errors import UserError
from tests.optimize.runs_fixtures import TINY
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import TINY_NET

_NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, channels, outputs, wrap=lambda logits: logits):
        super().__init__()
        self.conv, self.head, self.wrap = nn.Conv2d(channels, 4, 3), nn.Linear(4, outputs), wrap

    def forward(self, images):
        if self.training:
            raise AssertionError("it is trained")
        return self.wrap(self.head(self.conv(images).mean((2, 3))))


def seven():
    return Net(3, 7)


def grey(num_classes):
    return Net(1, num_classes)


def named(num_classes):
    return Net(3, num_classes, lambda logits: {"a": logits, "b": logits * 2})


def squeezed(num_classes):
    return Net(3, num_classes, lambda logits: logits.squeeze())


def indexed(num_classes):
    return Net(3, num_classes, lambda logits: logits.squeeze()[:, :])


def compared(num_classes):
    return Net(3, num_classes, lambda logits: logits - logits.mean(0))
"""
_LOST = "it must accept any number of images: replace squeeze() by flatten(1) if it removes the batch axis"


def refused(*words: object) -> str:
    """The last line of a user's mistake; those before it say what was opened."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["run", "search"])
@pytest.mark.parametrize(
    ("factory", "fault"),
    [
        (
            "seven",
            r"the model gives (4, 7) for a batch of 4 images of 10 classes; it must give logits of shape (4, 10)",
        ),
        (
            "named",
            "gives a dict of 2 tensors (a (2, 10), b (2, 10)); it must return only its logits, or name them",
        ),
        ("grey", "the first convolution takes 1: give --mean and --std 1 each, such as 0.5"),
        ("squeezed", f"the model gives (10,) for one image, and (4, 10) for 4; {_LOST}"),
        (
            "indexed",
            f"takes 4 images and fails on one: IndexError: too many indices for tensor of dimension 1; {_LOST}",
        ),
        ("compared", "the model gives an image other logits alone than in a batch of 4 (by up to 0."),
    ],
)
def test_a_network_that_gives_no_logits_of_the_classes_is_refused_before_it_is_trained(
    command: str, factory: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(_NETS)
    said = refused(command, f"{tmp_path / 'nets.py'}:{factory}", "--store", tmp_path / "store")
    assert said.startswith("error: ")
    assert fault in said


def test_a_network_that_loses_the_batch_is_refused_with_its_weights_too(tmp_path: Path) -> None:
    class Squeezed(nn.Sequential):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images).squeeze()

    net = Squeezed(nn.Conv2d(1, 10, 3), nn.AdaptiveAvgPool2d(1))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\nclass Squeezed(nn.Sequential):\n    def forward(self, images):\n"
        "        return super().forward(images).squeeze()\n\n\ndef net():\n"
        "    return Squeezed(nn.Conv2d(1, 10, 3), nn.AdaptiveAvgPool2d(1))\n"
    )
    grey = optimize.PreprocessingConfig(mean=0.5, std=0.5)
    for model, checkpoint in ((net, None), (f"{tmp_path / 'nets.py'}:net", tmp_path / "net.pt")):
        with pytest.raises(UserError, match=r"^the model gives \(10,\) for one image, and \(4, 10\) for 4; .*flatten"):
            optimize.load(model, checkpoint=checkpoint, preprocessing=grey, store=tmp_path / "store")


def test_what_a_search_cannot_train_is_one_line_with_its_traceback_in_a_file(tmp_path: Path) -> None:
    # It answers before the training, and fails in it.
    (tmp_path / "nets.py").write_text(
        _NETS.replace("def seven():\n    return Net(3, 7)", "def ten():\n    return Net(3, 10)")
    )
    store = tmp_path / "store"
    result = CliRunner().invoke(cli.app, ["search", f"{tmp_path / 'nets.py'}:ten", "--store", str(store)])
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: the baseline cannot be made: AssertionError: it is trained (traceback in ")
    assert "AssertionError: it is trained" in (store / "nets-ten" / "baseline-error.txt").read_text()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("run", "best.pth"), "best.pth: is a file of weights; name their network.* --checkpoint best.pth"),
        (("run", "net.onnx"), "net.onnx: passes work on PyTorch networks"),
        (("run", TINY, "--trust-checkpoint"), "--trust-checkpoint needs a checkpoint, and none is given"),
        (("run", TINY, "--name", 200 * "a"), "the name of a run must have at most 128 characters, this one has 200"),
        (
            ("run", TINY, "--name", "x.search"),
            "must not end in .search: the folder x.search is for the results of `search`",
        ),
        (("search", TINY, "--name", "x.profile"), "the name of a run must not end in .profile"),
        (("run", TINY, "--seed", 1 << 63), "seed: input should be less than 4294967296"),
        (("run", TINY, "--confidence", 0.9999999999999999), "^error: confidence: input should be less than or equal"),
        (("run", TINY, "--tensorboard", TINY_NET), "tiny_net.py cannot be written: .*tiny_net.py is not a folder"),
    ],
)
def test_words_that_mean_nothing_are_refused_at_once(words: tuple[object, ...], fault: str, tmp_path: Path) -> None:
    if "--tensorboard" in words:
        pytest.importorskip("tensorboard")
    said = refused(*words, "--store", tmp_path / "store")
    assert re.search(fault, said), said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("words", [("--processes", "2"), ("--tensorboard", "curves"), ("--augment", "none")])
def test_what_is_said_of_trainings_is_refused_where_nothing_is_trained(words: tuple[str, str], tmp_path: Path) -> None:
    torch.save(Tiny(10).state_dict(), tmp_path / "net.pt")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages: [{pass: fuse}, {pass: ptq, from: baseline}]\n")
    given = ("run", f"{TINY_NET}:tiny", "--checkpoint", tmp_path / "net.pt", "--recipe", recipe, *words)
    said = refused(*given, "--store", tmp_path / "store")
    assert said == (
        f"error: {' '.join(words)}: nothing would be trained, because the model has weights "
        f"and no pass of {recipe} trains"
    )
    assert not (tmp_path / "store").exists()


def test_a_setting_of_serving_that_the_task_does_not_have_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages: [{pass: fuse}]\nserving: {accept: image/png}\n")
    said = refused("run", f"{TINY_NET}:tiny", "--recipe", recipe, "--store", tmp_path / "store")
    assert said == f"error: {recipe}: serving.accept: an answer of classification does not depend on it; it has k"


def test_a_class_whose_name_no_card_can_hold_is_refused_when_the_data_is_opened(tmp_path: Path) -> None:
    for label in (b"gr\xfcn", b"rot"):  # as an archive of another encoding unpacks
        folder = tmp_path / "lights" / os.fsdecode(label)
        folder.mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (8, 8), (number, 1, 2)).save(folder / f"{number}.png")
    job = Job(model=f"{TINY_NET}:tiny", store=tmp_path / "store", data=f"imagefolder:{tmp_path}/lights")
    with pytest.raises(UserError, match=r"lights: a class has characters that are not valid text: .*--classes FILE"):
        open_job(job, optimize.listener.SILENT)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=f"no permission to write in {tmp_path}"):
        check_writable(tmp_path / "a" / "b")
    tmp_path.chmod(0o700)


def test_a_state_dict_in_the_place_of_its_file_is_refused(tmp_path: Path) -> None:
    weights: object = Tiny(10).state_dict()
    with pytest.raises(UserError, match=r"^checkpoint: must be a path, not OrderedDict"):
        optimize.load(TINY, checkpoint=weights, store=tmp_path)  # type: ignore[arg-type]


def test_what_could_not_be_saved_whole_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(Tiny(10).state_dict(), tmp_path / "net.pt")
    variant = optimize.load(
        f"{TINY_NET}:tiny",
        checkpoint=tmp_path / "net.pt",
        preprocessing=optimize.PreprocessingConfig(mean=0.5, std=0.5),
        store=tmp_path / "store",
    )
    copy = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        copy(source, target)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match="saved cannot be written: No space left on device"):
        optimize.save(variant, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    monkeypatch.setattr(shutil, "copyfile", copy)
    assert optimize.save(variant, tmp_path / "saved").is_dir()
