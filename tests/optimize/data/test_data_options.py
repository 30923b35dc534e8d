"""What the user says about data besides its name: classes, size of the evaluation, augmentation, formats of others."""

from __future__ import annotations

import ast
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from optimize.cli import app
from optimize.data.classes import read_classes
from optimize.data.formats.base import formats, open_data, usages
from optimize.listener import Silent
from optimize.models.preprocessing_config import PreprocessingConfig, Wish
from optimize.run.job import Job
from optimize.run.opened_job import Opened, open_job
from optimize.training.config import TrainingConfig
from serve.runtime.errors import UserError
from tests.optimize.runs_fixtures import ONE_THREAD, UNCOMPILED, command
from tests.optimize.workbench import TINY_NET

ROOT = Path(__file__).parents[3]


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def opened(tmp_path):
    """``opened(data=…)``: a job for the tiny network, and what was said when it was opened."""

    def opening(**options: Any) -> tuple[Opened, str]:
        heard = Heard()
        job = Job(model=f"{TINY_NET}:tiny", store=tmp_path / "store", **options)
        return open_job(job, heard), "\n".join(heard.lines)

    return opening


@pytest.fixture
def pets(tmp_path):
    for label in ("n01", "n02"):
        for number in range(10):
            path = tmp_path / "pets" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 1, 2)).save(path)
    return tmp_path / "pets"


def test_names_of_classes_come_from_a_file_in_the_order_of_the_classes(pets, tmp_path, opened):
    file = tmp_path / "names.txt"
    file.write_text("Katze, süß\r\n  dog \n\n", encoding="utf-8")
    job, _ = opened(data=f"imagefolder:{pets}", classes=file)
    assert job.session.context.data.classes == ("Katze, süß", "dog")


def test_what_was_left_out_or_missing_is_said_and_on_every_card(pets, opened):
    (pets / "n02" / "readme.md").write_text("no image")
    (pets / "n03").mkdir()
    with pytest.raises(UserError, match=r"'n03' holds no images .*--accept-gaps"):
        opened(data=f"imagefolder:{pets}")
    grey = Wish(PreprocessingConfig(mean=0.5, std=0.5, resize=16, crop=16))
    job, said = opened(data=f"imagefolder:{pets}", accept_gaps=True, preprocessing=grey)
    assert "class folder 'n03' holds no images" in said
    assert "left out: 1 file that is not an image" in said
    card = job.session.baseline(TrainingConfig(epochs=1, batch_size=8)).artifact.card
    assert card.data["notes"] == list(job.session.context.data.notes)
    assert len(card.data["notes"]) == 2
    assert card.classes == ("n01", "n02", "n03")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"one\n", r"names\.txt: has 1 names, and pets has 2 classes \(n01 … n02\)"),
        (b"one\ntwo\nthree", "has 3 names"),
        (b"one\n\ntwo", r"names\.txt:2: is empty"),
        (b"", r"names\.txt:1: is empty"),
        (b"\xff\xfe", "cannot be read: it is not UTF-8 text"),
    ],
)
def test_a_file_of_names_that_does_not_fit_is_told_in_one_line(text, message, pets, tmp_path, opened):
    file = tmp_path / "names.txt"
    file.write_bytes(text)
    with pytest.raises(UserError, match=message) as caught:
        opened(data=f"imagefolder:{pets}", classes=file)
    assert "\n" not in str(caught.value)


def test_a_file_of_names_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no\.txt cannot be read: No such file"):
        read_classes(tmp_path / "no.txt")


def test_the_evaluation_can_be_limited_stratified_and_seeded_and_says_so(opened):
    whole = open_data("digits").val
    parts = [opened(val_images=50, seed=seed) for seed in (0, 0, 1)]
    splits = [job.session.context.data.val for job, _ in parts]
    assert [len(split) for split in splits] == [50, 50, 50]
    assert f"50 of {len(whole)} validation images" in parts[0][1]
    counts = torch.bincount(splits[0].labels)
    exact = torch.bincount(whole.labels) * 50 / len(whole)
    assert ((counts - exact).abs() < 1).all()
    assert splits[0].sources == splits[1].sources
    assert splits[0].fingerprint == splits[1].fingerprint
    assert len({whole.fingerprint, splits[0].fingerprint, splits[2].fingerprint}) == 3
    assert parts[0][0].session.context.data.train.fingerprint == open_data("digits").train.fingerprint


def test_a_limit_above_the_number_of_images_takes_all_of_them(opened):
    job, said = opened(val_images=10**6)
    assert f" {len(job.session.context.data.val)} validation images" in said


def test_a_folder_is_not_mirrored_unless_asked_to_and_the_first_lines_say_so(pets, opened):
    job, said = opened(data=f"imagefolder:{pets}")
    assert job.session.context.data.augment == "shift"
    assert "training images are shifted at random, not mirrored" in said
    job, said = opened(data=f"imagefolder:{pets}", augment="shift+flip")
    assert job.session.context.data.augment == "shift+flip"
    assert "training images are shifted and mirrored at random" in said
    with pytest.raises(
        UserError, match=r"no augmentation 'flip' \(did you mean.*shift\+flip.*; there are none, shift,"
    ):
        opened(data=f"imagefolder:{pets}", augment="flip")


def test_the_command_lines_options_reach_the_job(monkeypatch, tmp_path):
    from optimize.run import pipeline

    seen = []

    def stop(job, listener):
        seen.append(job)
        raise UserError("enough")

    monkeypatch.setattr(pipeline, "run", stop)
    names = tmp_path / "names.txt"
    options = ["--classes", str(names), "--val-images", "7", "--augment", "none", "--skip-unreadable", "--accept-gaps"]
    assert CliRunner().invoke(app, ["run", "resnet18", *options]).exit_code == 2
    assert CliRunner().invoke(app, ["run", "resnet18"]).exit_code == 2
    given, plain = seen
    assert (given.classes, given.val_images, given.augment, given.skip_unreadable) == (names, 7, "none", True)
    assert (given.accept_gaps, plain.accept_gaps) == (True, False)
    assert (plain.classes, plain.val_images, plain.augment, plain.skip_unreadable) == (None, None, None, False)


# --- formats -----------------------------------------------------------------------------------------------------


def test_help_and_errors_list_every_format_as_it_is_written():
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "400"}).output
    with pytest.raises(UserError) as caught:
        open_data("nothing like it")
    assert "imagefolder:DIR" in usages()
    for usage in usages():
        assert usage in shown
        assert usage in str(caught.value)


def test_nothing_outside_the_formats_asks_for_a_data_set_by_name():
    names = set(formats())
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in sorted((ROOT / "optimize").rglob("*.py"))
        if "formats" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]
    assert not found


STRIPES = """
    '''A data format from outside: images that it draws.'''
    import numpy as np
    import torch
    from optimize.data.formats.base import DataFormat, register
    from optimize.data.records import ImageData, Split
    from optimize.data.sources import Records, png
    from optimize.data.targets import Labels


    def _open(place, seed, listener):
        count, side = map(int, place.split("x"))

        def split(first):
            labels = torch.arange(count) % 2
            rng = np.random.default_rng(first)
            pictures = rng.integers(0, 40, (count, side, side), dtype=np.uint8)
            for picture, label in zip(pictures, labels.tolist()):
                (picture if label else picture.T)[::2] += 200
            return Split(Records.of(map(png, pictures)), Labels(labels))

        classes = ("down", "across")
        return ImageData(
            "stripes", "classification", classes, split(1), split(2), "none", (side, side), preferred_side=16
        )


    register(DataFormat(name="stripes", open=_open, place="COUNTxSIDE", summary="stripes, drawn"))
"""


@pytest.fixture
def foreign(tmp_path):
    """The environment of a process that has a distribution installed which brings a data format in one file."""
    site = tmp_path / "site"
    info = site / "stripes_data-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "stripes_data.py").write_text(textwrap.dedent(STRIPES))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stripes-data\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[optimize.data_formats]\nstripes = stripes_data\n")
    path = os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **UNCOMPILED, **ONE_THREAD, "PYTHONPATH": path, "COLUMNS": "400"}
    return environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.slow
def test_a_format_from_outside_in_one_file_is_listed_opened_and_run(foreign, tmp_path, programs):
    def optimize(*arguments: str, graphs: bool = True) -> subprocess.CompletedProcess[str]:
        return programs.run(*command(*arguments, graphs=graphs), environment=foreign, cwd=tmp_path)

    assert "stripes:COUNTxSIDE" in optimize("run", "--help").stdout
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "baseline: {epochs: 2, batch_size: 16}\nstages: [{pass: fuse}]\n"
        "measure: {rounds: 2, batch_sizes: [1], seconds: 0.05}\n"
    )
    model = [f"{TINY_NET}:tiny", "--mean", "0.5", "--std", "0.25", "--device", "cpu"]
    done = optimize("run", *model, "--data", "stripes:64x16", "--recipe", str(recipe), graphs=False)
    assert done.returncode == 0, done.stderr
    assert "on stripes: 2 classes, 64 training and 64 validation images" in done.stderr
    assert list((tmp_path / "model_store").glob("*/report.json"))
    wrong = optimize("run", f"{TINY_NET}:tiny", "--data", "stripes")
    assert (wrong.returncode, wrong.stderr.strip()) == (2, "error: data 'stripes': write stripes:COUNTxSIDE")
