"""What runs are called, and how the serving commands find them by it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve import layout
from serve.runs import Target, find_run, select
from tests.serve import artifacts

from .test_server import archived

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("model", "data", "name"),
    [
        ("resnet18", "digits", "resnet18"),
        ("resnet18", "cifar10", "resnet18-cifar10"),
        ("resnet18", "CIFAR-10", "resnet18-cifar10"),
        ("resnet18", "imagefolder:/data/flowers", "resnet18-flowers"),
        ("resnet18", "imagefolder:/data/flowers/", "resnet18-flowers"),
        ("timm:resnet18", "digits", "timm-resnet18"),
        ("timm_net.py:build", "digits", "timm_net-build"),
        ("my_timm2.py:build", "digits", "my_timm2-build"),
        ("path/to/net.py:build", "imagefolder:../photos", "net-build-photos"),
        ("my_models.net:build", "digits", "net-build"),
        ("größe.py:für", "digits", "gr-e-f-r"),
    ],
)
def test_a_run_is_called_by_model_file_and_data(model: str, data: str, name: str) -> None:
    assert layout.run_name(model, data) == name


@given(st.text(min_size=1), st.text(min_size=1))
@example("net.py:build", "imagefolder:~nobody-here")
def test_whatever_is_written_gives_a_legal_name(model: str, data: str) -> None:
    assert layout.is_run_name(layout.run_name(model, data.replace("\0", "")))


def test_a_reference_means_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert layout.model_anywhere("net.py:build") == f"{tmp_path}/net.py:build"
    assert layout.data_anywhere("imagefolder:photos") == f"imagefolder:{tmp_path}/photos"
    assert layout.model_anywhere("timm:resnet18") == "timm:resnet18"
    assert layout.data_anywhere("CIFAR-10") == layout.data_anywhere("cifar10") == "cifar10"


@pytest.mark.parametrize(
    ("wanted", "data", "name"),
    [
        ("resnet18", None, "resnet18"),
        ("mine", None, "mine"),
        ("../up", None, "../up"),
        ("resnet18", "cifar10", "resnet18-cifar10"),
        ("net.py:build", None, "net-build"),
        ("net.py:build", "imagefolder:/data/photos", "net-build-photos"),
    ],
)
def test_a_run_is_found_by_its_name_or_its_model(wanted: str, data: str | None, name: str) -> None:
    assert find_run(wanted, data) == name


def made(*words: str) -> str:
    """The commands that make would run."""
    run = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", *words]
    return subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60).stdout


def test_make_leaves_the_name_to_the_commands_unless_it_is_given() -> None:
    for target in ("optimize", "bench"):
        assert "--name" not in made(target, "MODEL=net.py:build")
        assert "--name 'mine'" in made(target, "RUN=mine")
        assert "--replace" in made(target, "RUN=mine", "REPLACE=1")
    for target in ("serve", "package"):
        assert "'net.py:build' --data 'cifar10' --store" in made(target, "MODEL=net.py:build", "DATA=cifar10")
        assert " 'mine' --store" in made(target, "RUN=mine", "MODEL=net.py:build")
    assert "serve stop  --store" in made("stop")
    assert "serve stop 'mine' --store" in made("stop", "RUN=mine")


def test_an_archive_that_the_report_no_longer_has_is_not_served(tmp_path: Path) -> None:
    store, _ = archived(artifacts.torchscript(tmp_path / "small" / "artifacts" / "script"))
    kept = layout.archive_path(store, "small", "old")
    kept.write_bytes(layout.archive_path(store, "small", "script").read_bytes())
    rows = [{"name": "script", "archive": {}}, {"name": "skipped", "archive": None}]
    layout.report_path(store, "small").write_text(json.dumps({"rows": rows, "recommended": "script"}))
    found = select(store, [Target("small")], ["all"], device="cpu")
    assert (set(found.archives), found.default_model) == ({"small-script"}, "small-script")
