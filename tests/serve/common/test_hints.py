"""Commands in messages run where they are read: they are run here, as they were printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve.common.hints import command, target

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def without_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAKELEVEL", raising=False)


def test_a_hint_runs_in_the_shell_of_whoever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = subprocess.run(
        ["bash", "-c", f"{command('serve')} --help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "TorchServe" in result.stdout


def test_the_interpreter_is_spelled_as_shortly_as_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tmp_path / "my env" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert command("serve stop") == "'my env/bin/python' -m serve stop"
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert command("serve stop") == f"'{environment}/python' -m serve stop"
    monkeypatch.setenv("PATH", f"{environment}:/usr/bin")
    assert command("serve stop") == "python -m serve stop"  # an activated environment
    assert command("serve stop", Path("a b")) == "python -m serve stop --store 'a b'"


def test_whoever_came_by_make_is_told_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")
    assert target("serve", "serve start net", RUN="net") == "make serve RUN=net"
    assert target("serve", "serve start net", Path("a b"), RUN="net") == "make serve RUN=net STORE='a b'"
    monkeypatch.delenv("MAKELEVEL")
    assert target("serve", "serve start net", RUN="net") == command("serve start net")
    assert "MAKELEVEL" not in os.environ


@pytest.mark.parametrize(
    "words", ["--help", "status", "stop", "remove m", "predict /nowhere.jpg", "renew-keys", "verify m.mar --key k.pub"]
)
def test_words_that_run_no_network_do_not_wait_for_torch(words: str, tmp_path: Path) -> None:
    code = (
        "import sys; from serve import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torchvision', 'onnxruntime', 'openvino', 'numpy'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert result.stderr.splitlines()[-1] == "heavy: []"
