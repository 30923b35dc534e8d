"""Where there is no room for the private copies that servers load: one clear line, and what is served goes on."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from serve.archive.archive_file import check_archive, with_version
from serve.asgi.http.tokens import make_token_file
from serve.common import layout
from serve.common.options import ServingOptions
from serve.runtime.errors import UserError
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.state import read_state
from serve.tune.servers import free_ports
from tests.serve import artifacts
from tests.serve.full_disk import as_seen_by, fill, no_file_longer_than, on_small_disk
from tests.serve.own_process import IMAGE, running, write_models

FULL = "No space left on device"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one run with two archives of one artifact, which answer with 5 classes and with 4."""
    store = tmp_path_factory.mktemp("full")
    artifact = artifacts.torchscript(layout.artifact_folder(store, "small", "v1"))
    for name, k in (("v1", 5), ("v2", 4)):
        path = layout.archive_path(store, "small", name)
        build_archive(artifact, path, model_name=path.stem, options=ServingOptions(k=k))
    return path.parent


def ended(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


def the_line(found: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a command that the user has to do something about."""
    assert found.returncode == 2, found.stderr
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.slow
def test_a_full_disk_changes_nothing_of_what_the_own_server_serves(archives: Path, tmp_path: Path) -> None:
    size = (archives / "small-v1.mar").stat().st_size
    disk = tmp_path / "disk"
    disk.mkdir()
    before = [*on_small_disk(4 * size, disk), "env", f"TMPDIR={disk}"]
    write_models(archives, {"1.0": ("small-v1.mar", 1)})
    with running(archives, "--models", str(archives / "models.yaml"), "--no-token", before=before) as server:
        folder = as_seen_by(server.process.pid, disk)
        assert list(folder.iterdir()) == []

        def told(words: str) -> str:
            server.process.send_signal(signal.SIGHUP)
            return server.await_line(words)

        def answered() -> tuple[int, str]:
            with server.client() as client:
                answer = client.post("/predictions/m", content=IMAGE)
                assert client.get("/health/ready").status_code == 200
            return len(answer.json()), answer.headers["x-model-version"]

        write_models(archives, {"2.0": ("small-v2.mar", 1)})
        for left, fault in ((size // 2, "cannot be copied to"), (size * 3 // 2, "cannot be unpacked to")):
            fill(folder, left)
            line = told(fault)
            assert "nothing was changed: " in line
            assert f"small-v2.mar: {fault} {disk}/serve-" in line
            assert FULL in line
            assert answered() == (5, "1.0")
            assert [path.name for path in folder.iterdir()] == ["filler"]
        (folder / "filler").unlink()
        told("changed: serving m 2.0")
        assert answered() == (4, "2.0")
        assert not [line for line in server.lines if "Traceback" in line]


@pytest.mark.slow
def test_the_own_server_does_not_start_without_room_and_says_where_it_wanted_it(archives: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    archive = archives / "small-v1.mar"
    run = [sys.executable, "-m", "serve", "run", str(archive), "--no-token", "--port", "0", "--store", str(tmp_path)]
    small = on_small_disk(archive.stat().st_size * 3 // 2, disk)
    line = the_line(ended([*small, "env", f"TMPDIR={disk}", *run]))
    assert f"small-v1.mar: cannot be unpacked to {disk}/serve-" in line
    assert FULL in line


@pytest.mark.slow
def test_torchserve_is_not_started_without_room_for_its_archives_and_nothing_is_left(archives: Path) -> None:
    store = archives.parents[1]
    state = store / ".server"
    state.mkdir(mode=0o700)
    small = on_small_disk((archives / "small-v1.mar").stat().st_size // 2, state)
    names = ("", "management-", "metrics-", "grpc-inference-", "grpc-management-")
    ports = [word for name, port in zip(names, free_ports(5), strict=True) for word in (f"--{name}port", str(port))]
    start = [sys.executable, "-m", "serve", "start", "small/v1", "--store", str(store), *ports]
    script = f"{shlex.join(start)}; code=$?; find {shlex.quote(str(state))} -type f; exit $code"
    found = ended([*small, "sh", "-c", script])
    assert f"small-v1.mar: cannot be copied to {state}/archives ({FULL})" in the_line(found)
    assert found.stdout.splitlines()[1:] == [f"{state}/lock"]
    assert read_state(store) is None


def test_another_version_of_an_archive_that_cannot_be_written_is_not_called_a_broken_archive(
    archives: Path, tmp_path: Path
) -> None:
    archive = archives / "small-v1.mar"
    with zipfile.ZipFile(archive) as opened:  # each of its files may be written, and not all of them in one
        most = max(entry.file_size for entry in opened.infolist())
    assert most < archive.stat().st_size
    with no_file_longer_than(most), pytest.raises(UserError, match=r"new\.mar: cannot be written \(File too large\)"):
        with_version(archive, "2.0", tmp_path / "new.mar")
    assert list(tmp_path.iterdir()) == []
    check_archive(with_version(archive, "2.0", tmp_path / "new.mar"))


def test_tokens_that_could_not_be_written_leave_no_file_without_any(tmp_path: Path) -> None:
    path = tmp_path / ".run" / "tokens"
    with no_file_longer_than(1), pytest.raises(UserError, match=r"tokens: cannot be written \(File too large\)"):
        make_token_file(path)
    assert not path.exists()
    assert make_token_file(path)
