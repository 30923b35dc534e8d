"""Whose a run is: names by default, and what is never replaced unasked."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from optimize.data.formats.base import open_data
from optimize.models.model_names import resolve_model
from optimize.run.identity import Identity, refuse_replacing, write_identity
from serve.runtime.errors import UserError
from tests.optimize.cli.test_mistakes_are_one_line import invoke
from tests.optimize.runs_fixtures import TINY, run_recipe, with_stages
from tests.optimize.workbench import TINY_NET

EXAMPLE = Path(TINY.rpartition(":")[0])


def identity_of(model: str, data: str = "digits") -> Identity:
    return Identity.of(model, data, resolve_model(model), open_data(data))


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """The tiny network in a file of the user's own."""
    path = tmp_path / "net.py"
    shutil.copyfile(TINY_NET, path)
    return path


def test_a_run_of_another_model_is_not_replaced_and_both_are_named(tmp_path: Path, net: Path) -> None:
    folder = tmp_path / "store" / "mine"
    write_identity(identity_of(f"{net}:tiny"), folder)
    other = identity_of(f"{EXAMPLE}:tiny")
    with pytest.raises(UserError) as caught:
        refuse_replacing(folder, other)
    message = str(caught.value)
    for part in ("'mine'", f"{net}:tiny on digits", f"{EXAMPLE}:tiny on digits", "--name", "--replace"):
        assert part in message
    assert "\n" not in message


def test_a_run_on_other_data_is_not_replaced(tmp_path: Path, net: Path) -> None:
    own = identity_of(f"{net}:tiny")
    write_identity(own, tmp_path / "mine")
    with pytest.raises(UserError, match="on imagefolder:/data/photos"):
        refuse_replacing(
            tmp_path / "mine", dataclasses.replace(own, data="imagefolder:/data/photos", data_content="e" * 64)
        )


def test_an_edited_file_a_moved_one_and_added_images_are_the_same_run(tmp_path: Path, net: Path) -> None:
    own = identity_of(f"{net}:tiny")
    write_identity(own, tmp_path / "mine")
    refuse_replacing(tmp_path / "mine", own)
    moved = tmp_path / "elsewhere" / "net.py"
    moved.parent.mkdir()
    shutil.copyfile(net, moved)
    refuse_replacing(tmp_path / "mine", identity_of(f"{moved}:tiny"))
    net.write_text(net.read_text() + "\nEDITED = True\n")
    refuse_replacing(tmp_path / "mine", dataclasses.replace(identity_of(f"{net}:tiny"), data_content="e" * 64))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model": "x"}'])
def test_what_nobody_can_tell_the_owner_of_may_be_replaced(tmp_path: Path, net: Path, content: str | None) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    if content is not None:
        (folder / "run.json").write_text(content)
    refuse_replacing(folder, identity_of(f"{net}:tiny"))


@pytest.mark.slow
def test_two_models_of_one_factory_name_do_not_replace_each_other(tmp_path: Path) -> None:
    for name in ("timm_net", "my_timm2"):
        (tmp_path / f"{name}.py").write_text(EXAMPLE.read_text() + f"\n# {name}\nNAME = {name!r}\n")
    store = tmp_path / "store"
    first, second = (
        run_recipe(store, with_stages({"pass": "fuse"}), run=None, model=f"{tmp_path}/{name}.py:tiny")[0].folder
        for name in ("timm_net", "my_timm2")
    )
    assert (first.name, second.name) == ("timm_net-tiny", "my_timm2-tiny")
    models = [json.loads((folder / "run.json").read_text())["model"] for folder in (first, second)]
    assert models == [f"{tmp_path}/timm_net.py:tiny", f"{tmp_path}/my_timm2.py:tiny"]
    before = (first / "report.json").read_bytes()
    with pytest.raises(UserError, match="the run 'timm_net-tiny'"):
        run_recipe(store, with_stages({"pass": "fuse"}), run="timm_net-tiny", model=f"{tmp_path}/my_timm2.py:tiny")
    assert (first / "report.json").read_bytes() == before
    replaced, _ = run_recipe(
        store, with_stages({"pass": "fuse"}), run="timm_net-tiny", model=f"{tmp_path}/my_timm2.py:tiny", replace=True
    )
    assert json.loads((replaced.folder / "run.json").read_text())["model"] == f"{tmp_path}/my_timm2.py:tiny"
    listed = invoke("list", "--store", store).stdout
    assert "timm_net-tiny" in listed
    assert "p50" not in listed  # times of two days do not compare
