"""How many cores a process may use: control groups of both versions, as files and as the kernel's own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.asgi.process import process_group
from serve.runtime.device import cores as module
from serve.runtime.device.cores import cores, quota_of


def process(folder: Path, memberships: str, mounts: str) -> Path:
    """A process's folder in /proc, whose mounts are below the folder."""
    proc = folder / "proc"
    proc.mkdir(exist_ok=True)
    (proc / "cgroup").write_text(memberships)
    (proc / "mountinfo").write_text(mounts.replace("MOUNT", str(folder).replace(" ", "\\040")))
    return proc


def group_files(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


V2 = "25 30 0:23 ROOT MOUNT/cg rw,nosuid - cgroup2 cgroup rw\n"
V1 = (
    "31 25 0:27 ROOT MOUNT/cpu rw - cgroup cgroup rw,cpu,cpuacct\n32 25 0:28 / MOUNT/mem rw - cgroup cgroup rw,memory\n"
)


def test_the_quota_of_version_2_is_read(tmp_path: Path) -> None:
    group_files(tmp_path / "cg" / "a" / "b", cpu__max="50000 100000")
    assert quota_of(process(tmp_path, "0::/a/b\n", V2.replace("ROOT", "/"))) == 0.5


def test_a_group_around_it_with_less_counts(tmp_path: Path) -> None:
    group_files(tmp_path / "cg" / "a" / "b", cpu__max="400000 100000")
    group_files(tmp_path / "cg" / "a", cpu__max="150000 100000")
    assert quota_of(process(tmp_path, "0::/a/b\n", V2.replace("ROOT", "/"))) == 1.5


@pytest.mark.parametrize("path", ["/docker/0123", "/"])
def test_a_container_sees_its_own_group_as_the_whole_tree(tmp_path: Path, path: str) -> None:
    group_files(tmp_path / "cg", cpu__max="200000 100000")
    assert quota_of(process(tmp_path, f"0::{path}\n", V2.replace("ROOT", "/docker/0123"))) == 2.0


def test_the_quota_of_version_1_is_read_beside_an_empty_version_2(tmp_path: Path) -> None:
    group_files(tmp_path / "cpu" / "pod", cpu__cfs_quota_us="25000", cpu__cfs_period_us="10000")
    group_files(tmp_path / "cg")
    memberships = "4:memory:/other\n3:cpu,cpuacct:/pod\n1:name=systemd:/\n0::/\n"
    assert quota_of(process(tmp_path, memberships, (V1 + V2).replace("ROOT", "/"))) == 2.5


def test_a_path_with_a_space_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    group_files(folder / "cg", cpu__max="100000 100000")
    assert quota_of(process(folder, "0::/\n", V2.replace("ROOT", "/"))) == 1.0


@pytest.mark.parametrize("text", ["max 100000", "", "0 100000", "-1 100000", "x y", "100000 0", "1", "ÿ 1"])
def test_without_a_quota_there_is_none(tmp_path: Path, text: str) -> None:
    group_files(tmp_path / "cg", cpu__max=text)
    assert quota_of(process(tmp_path, "0::/\n", V2.replace("ROOT", "/"))) is None


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert quota_of(tmp_path) is None


@given(st.text(max_size=60), st.text(max_size=120))
def test_whatever_the_kernel_writes_is_read(tmp_path_factory: pytest.TempPathFactory, cgroup: str, mounts: str) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "cgroup").write_text(cgroup, errors="surrogateescape" if cgroup.isascii() else "replace")
    (folder / "mountinfo").write_text(mounts, errors="replace")
    assert quota_of(folder) is None


@pytest.mark.parametrize("paid", [0.01, 0.5, 1.0, 1.5, 1e6, None])
def test_the_cores_are_those_that_the_quota_pays_for_and_at_least_one(
    paid: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "quota", lambda: paid)
    there = len(os.sched_getaffinity(0))
    assert cores() == (there if paid is None else max(1, min(there, math.ceil(paid))))


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_processes_divide_the_cores_that_the_quota_pays_for(there: int, paid: int, data: st.DataObject) -> None:
    paid = min(there, paid)
    count = data.draw(st.integers(1, paid))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(there)))
        patch.setattr(process_group, "cores", lambda: paid)
        shares = process_group._divided_cores(count)
    assert len(shares) == count
    assert all(shares)
    assert sum(map(len, shares)) == len({core for share in shares for core in share}) == paid


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group of the kernel's with half a core."""
    base, files = (
        (Path("/sys/fs/cgroup"), {"cpu.max": "50000 100000"})
        if Path("/sys/fs/cgroup/cgroup.controllers").exists()
        else (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"})
    )
    folder = base / f"test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        for name, text in files.items():
            try:
                (folder / name).write_text(text)
            except OSError as error:
                pytest.skip(f"no quota can be set: {error}")
        yield folder
    finally:
        folder.rmdir()


_SAYS = """
import torch
from serve.runtime.device.cores import cores, quota
from serve.runtime.card.execution import Execution, settle
from optimize.measure.machine import machine
settle(Execution("torchscript"), computes_with_torch=True)
found = machine(torch.device("cpu"))
print(quota(), cores(), Execution("any").cores, torch.get_num_threads(), found["quota"], found["threads"])
"""


def test_half_a_core_of_the_kernels_is_one_thread_and_in_the_record_of_the_machine(half_a_core: Path) -> None:
    enter = f'echo $$ > {half_a_core}/cgroup.procs && exec "$@"'
    said = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-c", _SAYS], check=True, capture_output=True, text=True, timeout=300
    ).stdout
    assert said.split() == ["0.5", "1", "1", "1", "0.5", "1"]
