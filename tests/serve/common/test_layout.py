"""What runs are called, and how the serving commands find them by it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given
from hypothesis import strategies as st

from serve import cli
from serve.common import layout
from serve.runs.sealed_files import seal
from serve.runs.stored_runs import Target, find_run, select
from tests.serve import artifacts
from tests.serve.torchserve.test_server import archived

ROOT = Path(__file__).parents[3]


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
        ("resnet18", "imagefolder:/data/flowers.search", "resnet18-flowers-search"),
    ],
)
def test_a_run_is_called_by_model_file_and_data(model: str, data: str, name: str) -> None:
    assert layout.run_name(model, data) == name


@given(st.text(min_size=1), st.text(min_size=1))
@example("net.py:build", "imagefolder:~nobody-here")
def test_whatever_is_written_gives_a_legal_name(model: str, data: str) -> None:
    assert layout.is_run_name(layout.run_name(model, data.replace("\0", "")))


def test_no_run_is_called_as_the_folder_of_what_is_found_of_another() -> None:
    assert layout.is_run_name("net.v2")
    assert layout.is_run_name("research")
    assert not any(layout.is_run_name(f"net.{command}") for command in ("profile", "search", "sensitivity"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("a", ("a", None)), ("a/", ("a", None)), ("a/b", ("a", "b")), ("a/b/", ("a", "b")), ("a/b/c", ("a", "b/c"))],
)
def test_a_run_or_one_of_its_artifacts_is_named_with_or_without_the_slash_of_a_shell(
    name: str, meant: tuple[str, str | None]
) -> None:
    assert layout.run_and_artifact(name) == meant


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


def options_of(command: str) -> list[Any]:
    """A command's options as click has them."""
    found = typer.main.get_command(cli.app).commands[command]  # type: ignore[attr-defined]
    return [parameter for parameter in found.params if parameter.param_type_name == "option"]


def test_each_option_of_start_works_from_make_and_make_has_no_other() -> None:
    of_its_own = {"store", "data", "device", "artifact"}  # which other targets have too, or which has another name
    options = {entry.name: entry for entry in options_of("start") if entry.name not in of_its_own}
    flags = {name: entry.opts[0] for name, entry in options.items()}
    variables = {name: flag.removeprefix("--").replace("-", "_").upper() for name, flag in flags.items()}
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    lists = re.findall(r"^SERVE_(?:VALUES|LISTS|FLAGS) := (.*)$", text, re.MULTILINE)
    assert sorted(" ".join(lists).split()) == sorted(variables.values())
    for name, entry in options.items():
        said = made("serve", f"{variables[name]}={'x y' if entry.multiple else 1}")
        if entry.is_flag:
            assert said.rstrip().endswith(flags[name])
        elif entry.multiple:
            assert f"{flags[name]} 'x' {flags[name]} 'y'" in said
        else:
            assert f"{flags[name]} '1'" in said
    assert "--artifact" not in made("serve")
    assert "--artifact 'onnx-int8' --artifact 'ptq'" in made("serve", "ARTIFACTS=onnx-int8 ptq")
    assert "--artifact 'all'" in made("serve", "ARTIFACTS=all")
    assert "serve start 'one' 'mine=two/ptq' --store" in made("serve", "RUNS=one mine=two/ptq")


def test_a_variable_that_make_does_not_know_is_refused_unless_another_make_hands_it_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ["make", "-n", "-o", ".venv/.installed", "optimize", "CHEKPOINT=x y", "SEED=1"]
    monkeypatch.delenv("MAKELEVEL", raising=False)
    ended = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert ended.returncode == 2
    assert "there is no variable CHEKPOINT; `make help` lists" in ended.stderr
    monkeypatch.setenv("MAKELEVEL", "1")
    assert "--seed '1'" in made(*run[4:])


def test_make_hands_on_how_the_recommendation_is_made_and_that_a_checkpoint_is_trusted() -> None:
    said = made("optimize", "OBJECTIVE=size", "MAX_DROP=0.5pp", "CONFIDENCE=0.9", "TRUST_CHECKPOINT=1")
    words = " ".join(said.split())
    assert "--objective 'size' --max-drop '0.5pp' --confidence '0.9' --trust-checkpoint" in words


def test_make_adds_replaces_and_removes_models_of_the_running_server_with_the_options_of_start() -> None:
    assert "serve add 'resnet18' --store 'model_store' --device 'auto'" in made("add")
    assert "serve add 'resnet18' --data 'cifar10' --store 'model_store'" in made("add", "DATA=cifar10")
    said = made("add", "RUNS=one mine=two/ptq", "STORE=s", "WORKERS=2", "REQUIRE_SIGNED=a b", "FOREIGN_CODE=1")
    assert "serve add 'one' 'mine=two/ptq' --store 's'" in said
    assert "--workers '2' --require-signed 'a' --require-signed 'b' --foreign-code" in " ".join(said.split())
    assert "serve replace 'digits'  --store 'model_store'" in made("replace", "MODEL=digits")
    said = made("replace", "MODEL=digits", "RUN=two/qat", "BATCH_SIZE=4", "OPTION=openvino.x=1,2")
    assert "serve replace 'digits' 'two/qat' --store" in said
    assert "--batch-size '4' --option 'openvino.x=1,2'" in " ".join(said.split())
    assert "serve remove 'one' 'two' --store 'model_store'" in made("remove", "MODEL=one two")


@pytest.mark.parametrize("target", ["replace", "remove"])
def test_make_asks_which_model_is_meant_and_takes_no_network_for_it(target: str) -> None:
    ended = subprocess.run(["make", target], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: say which: make {target} MODEL=NAME, as make status names it\n")


def test_where_a_shell_says_that_it_is_is_not_where_the_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "workstation")
    assert "--host" not in made("serve")
    assert "--host '0.0.0.0'" in made("serve", "HOST=0.0.0.0")


def test_what_works_on_a_running_server_installs_nothing_in_a_fresh_clone(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for target, code in (("stop", 0), ("status", 2), ("add", 2), ("replace MODEL=x", 2), ("remove MODEL=x", 2)):
        ended = subprocess.run(
            ["make", *target.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        )
        assert ended.returncode == code
        assert ended.stdout.startswith("no server is running: there is no environment here")
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_an_archive_that_the_report_no_longer_has_is_not_served(tmp_path: Path) -> None:
    store, _ = archived(artifacts.torchscript(tmp_path / "small" / "artifacts" / "script"))
    kept = layout.archive_path(store, "small", "old")
    kept.write_bytes(layout.archive_path(store, "small", "script").read_bytes())
    rows = [{"name": "script", "archive": {}}, {"name": "skipped", "archive": None}]
    layout.report_path(store, "small").write_text(json.dumps({"rows": rows, "recommended": "script"}))
    seal(store / "small")
    found = select(store, [Target("small")], ["all"], device="cpu")
    assert (set(found.archives), found.default_model) == ({"small-script"}, "small-script")
