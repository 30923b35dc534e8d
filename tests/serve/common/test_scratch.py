"""A private folder goes with its process, also where that was killed; nobody else's does."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

import pytest

from serve.archive.verification import Policy
from serve.asgi.process.model_loader import load
from serve.asgi.process.serving_plan import Wanted
from serve.common.scratch import scratch
from serve.torchserve.archive_builder import build_archive
from tests.programs import Programs
from tests.serve import artifacts

HOLDING = """
import sys, time
from serve.common.scratch import scratch
with scratch("held-") as folder:
    (folder / "large.bin").write_bytes(bytes(1 << 20))
    print(folder, file=sys.stderr, flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_goes_at_the_end_and_is_private() -> None:
    with scratch("held-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_what_a_killed_process_left_goes_and_a_living_ones_stays(torch_begun: Programs, temporary: Path) -> None:
    alive, killed = (torch_begun.start("-c", HOLDING, 60) for _ in range(2))
    folder, left = (Path(program.stderr.readline().strip()) for program in (alive, killed))
    killed.send_signal(signal.SIGKILL)
    killed.end()
    assert (left / "large.bin").is_file()
    with scratch("other-"):
        assert left.exists()
    with scratch("held-") as mine:
        assert {*temporary.glob("held-*")} == {folder, mine}
    assert (folder / "large.bin").is_file()
    alive.send_signal(signal.SIGKILL)
    alive.end()


def test_in_doubt_it_stays(temporary: Path) -> None:
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / ".alive").touch()
    (temporary / "held-link").symlink_to("elsewhere")
    (temporary / "held-half").mkdir()
    (temporary / "held-half" / ".alive.new").touch()
    (temporary / "held-trap").mkdir()
    (temporary / "held-trap" / ".alive").symlink_to(temporary / "elsewhere" / ".alive")
    (temporary / "held-file").touch()
    before = {*temporary.iterdir()}
    with scratch("held-"):
        pass
    assert {*temporary.iterdir()} == before
    assert (temporary / "elsewhere" / ".alive").is_file()


def test_a_server_that_is_killed_while_it_loads_leaves_no_archive_to_the_next(
    torch_begun: Programs, temporary: Path
) -> None:
    archive = build_archive(artifacts.torchscript(temporary / "script"), temporary / "tiny.mar", model_name="tiny")
    server = torch_begun.start("-m", "serve", "run", str(archive), "--socket", str(temporary / "socket"))
    until = time.monotonic() + 60
    while not (found := [*temporary.glob("serve-*/archive/card.json")]) and time.monotonic() < until:
        time.sleep(0.001)
    assert found, server.end().stderr
    server.send_signal(signal.SIGKILL)  # opening it takes a second
    server.end()
    assert found[0].is_file()
    load(Wanted("tiny", "1.0", archive), gpu=None, queue=None, policy=Policy()).service.close()
    assert not [*temporary.glob("serve-*")]
