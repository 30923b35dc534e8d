"""Training by the processes that torchrun has started: real ones, and what they say to each other."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from optimize.context import Context
from optimize.data.sources import Files, Pixels, out_of_reach, select
from optimize.errors import PassError
from optimize.listener import Silent
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.training.config import TrainingConfig
from optimize.training.distributed import api, first_process, launch_torchrun, mailbox
from optimize.training.distributed.environment import Launch, launch, processes
from optimize.training.distributed.first_process import only_first
from optimize.training.distributed.launch_local import Ended
from optimize.training.loop import train
from serve.runtime.errors import PipelineError, UserError
from tests.optimize.runs_fixtures import ONE_THREAD, RECIPE, TINY, UNCOMPILED, Heard, with_stages, write_recipe
from tests.optimize.training.test_training_loop import brightness
from tests.programs import ROOT, Program, Programs

WORDS = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def started(rank: int = 0, world: int = 2) -> dict[str, str]:
    """What torchrun sets for one of its processes."""
    return dict(zip(WORDS, ["a", *map(str, (rank, world, rank, world))], strict=True))


@pytest.fixture(autouse=True)
def by_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WORDS:
        monkeypatch.delenv(name, raising=False)


# --- real ones -----------------------------------------------------------------------------------------------------


ENVIRONMENT = {**UNCOMPILED, **ONE_THREAD, "COLUMNS": "200"}


def run_shared(programs: Programs, store: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node 2 -m optimize run`` of the tiny network, as it ends."""
    logs = ("--log-dir", store.parent / "logs")  # which would stay in /tmp
    begin = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *logs, "-m", "tests.optimize.lean", "run", TINY)
    options = ("--store", store, "--device", "cpu", "--name", "tiny")
    return programs.run(*begin, *options, *words, environment={**os.environ, **ENVIRONMENT})


BASELINE = {**RECIPE["baseline"], "epochs": 1, "max_steps": 8}
INT8 = {"epochs": 1, "max_steps": 4, "freeze_observers_at": 1, "images": 32}

#: A script, which prints key and files of two artifacts that two processes of its own have trained.
OWN = """
import json, sys
import optimize as opt

model, store, training, qat = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
base = opt.load(model, store=store, device="cpu", training=opt.Training(**training), processes=2)
made = [variant.artifact.card for variant in (base, opt.apply(base, opt.Qat(**qat), "qat"))]
print(json.dumps({card.name: [card.lineage[-1].key, dict(card.files)] for card in made}))
"""


@pytest.mark.slow
def test_a_run_under_torchrun_makes_what_as_many_processes_of_its_own_make(programs: Programs, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, with_stages({"pass": "qat", "config": INT8}, baseline=BASELINE))
    shared = run_shared(programs, tmp_path / "shared", "--recipe", recipe)
    assert shared.returncode == 0, shared.stderr
    settings = map(json.dumps, (BASELINE, INT8))
    own = programs.run("-c", OWN, TINY, tmp_path / "own", *settings, environment={**os.environ, **ENVIRONMENT})
    assert own.returncode == 0, own.stderr
    folder = tmp_path / "shared" / "tiny"
    cards = [json.loads(path.read_text()) for path in folder.glob("artifacts/*/card.json")]
    made = {card["name"]: [card["lineage"][-1]["key"], card["files"]] for card in cards}
    others = json.loads(own.stdout)
    for name, weights in (("baseline", "weights.safetensors"), ("qat", "reference.pt2")):
        (key, files), (other_key, other_files) = made[name], others[name]
        assert (key, files[weights]) == (other_key, other_files[weights])
    assert shared.stdout.count(" is recommended") == 1
    assert shared.stderr.count("  + qat ") == 1
    rows = json.loads((folder / "report.json").read_text())["rows"]
    assert [[each["processes"] for each in row["training"]] for row in rows] == [[2], [2]]


def test_a_mistake_under_torchrun_is_told_once(programs: Programs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ended = run_shared(programs, store, "--processes", "3")
    assert (ended.returncode, ended.stdout) == (1, ""), "torchrun's own exit code"
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert errors[0].startswith("error: processes: 3 requested, but torchrun has started 2; ")
    assert "exitcode  : 2 " in ended.stderr, "that of the first, in torchrun's words"
    assert not store.exists()


# --- what torchrun says ----------------------------------------------------------------------------------------------


def test_as_many_train_as_torchrun_has_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (launch(), processes(None), processes(3)) == (None, 1, 3)
    for name, value in started(0, 1).items():
        monkeypatch.setenv(name, value)
    assert (launch(), processes(None), processes(3)) == (None, 1, 3)
    for name, value in {**started(1, 6), "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert launch() == Launch(1, 6, 1, 2)
    assert Launch(1, 6, 1, 2).several_hosts
    assert not Launch(1, 2, 1, 2).several_hosts
    assert (processes(None), processes(6)) == (6, 6)
    for wrong in (1, 2):
        with pytest.raises(UserError, match=rf"^processes: {wrong} requested, but torchrun has started 6; "):
            processes(wrong)


@pytest.mark.parametrize(
    ("said", "left"), [({}, None), ({"OMP_NUM_THREADS": "1"}, "1"), ({"XOMP_NUM_THREADS": ""}, None)]
)
def test_the_one_thread_that_torchrun_gives_is_taken_back_and_that_of_the_user_is_not(
    said: dict[str, str], left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with subprocess.Popen(["cat"], env=said, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin
        assert parent.stdout
        parent.stdin.write(b"running\n")  # Popen is back before Linux shows the new environment (environ is empty)
        parent.stdin.flush()
        assert parent.stdout.readline() == b"running\n"
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        first_process._take_back_one_thread(Launch(0, 2, 0, 2))
    assert os.environ.get("OMP_NUM_THREADS") == left
    assert threads == ([len(os.sched_getaffinity(0))] if left is None else [])


def test_threads_that_torchrun_does_not_set_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, local in (("1", 1), ("3", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        first_process._take_back_one_thread(Launch(0, 4, 0, local))
        assert os.environ["OMP_NUM_THREADS"] == value


# --- what they say to each other -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Two:
    """This process as the first of two, and what starts the other."""

    programs: Programs
    environment: dict[str, str]
    store: Any = None

    def other(self, cwd: Path = ROOT) -> Program:
        words = "from optimize.training.distributed.first_process import only_first; only_first(); print('went on')"
        return self.programs.start("-c", words, cwd=cwd, environment={**self.environment, **started(1)})

    def over(self) -> None:
        """The end of the first."""
        launch_torchrun._say_over()


@pytest.fixture
def two(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Two:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ours = {
        **started(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        **ONE_THREAD,
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getppid", os.getpid)  # whose environment says nothing of this
    monkeypatch.setattr(sys, "executable", str(programs.executable))
    monkeypatch.setattr(launch_torchrun, "_first", launch_torchrun._First())
    monkeypatch.setattr(atexit, "register", lambda function: None)
    return Two(programs, {**os.environ, "PYTHONPATH": str(ROOT)}, store)


class Counting(nn.Module):
    """Its second process is killed in the middle of training, unless that has happened already."""

    def __init__(self, marker: Path | None) -> None:
        super().__init__()
        self.head = nn.Linear(256, 4)
        self.marker, self.calls = marker, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 6 and distributed.get_rank() == 1 and self.marker is not None and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.head(torch.flatten(x, 1))


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, message: str) -> None:
        self.lines.append(message)


def trained(context: Context, marker: Path | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = Counting(marker)
    train(module, context, TrainingConfig(epochs=2, batch_size=16, learning_rate=0.02))
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_process_that_is_ended_ends_its_training_alone_which_goes_on_when_it_is_wanted_again(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights that it would have had, those of processes that torchrun has not started."""
    context = dataclasses.replace(brightness(), processes=2)
    with monkeypatch.context() as patch:
        patch.delenv("TORCHELASTIC_RUN_ID")
        expected = trained(context)
    said = Said()
    keeping = dataclasses.replace(context, unfinished=tmp_path / "unfinished", checkpoint_seconds=0.0, listener=said)
    other = two.other()
    with pytest.raises(PassError, match=r"^process 1 of the 2 training processes was ended by SIGKILL$"):
        trained(keeping, tmp_path / "marker")
    found = trained(keeping, tmp_path / "marker")
    two.over()
    ended = other.end()
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert said.lines[0] == "training continues in epoch 1, after 5 of its steps"
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_images_that_another_host_does_not_have_are_told_with_the_host(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a process that looks for the same words elsewhere."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    context = brightness()
    train_split = context.data.train
    for number, image in enumerate(train_split.sources):
        Path(f"{number}.png").write_bytes(image)  # type: ignore[arg-type]
    files = Files.of(Path(), [Path(f"{number}.png") for number in range(len(train_split))])
    data = dataclasses.replace(context.data, train=dataclasses.replace(train_split, sources=files))
    other = two.other(tmp_path / "there")
    with pytest.raises(UserError, match=r"^noise: \d+\.png cannot be read on .*, where process 1 trains; the images m"):
        trained(dataclasses.replace(context, data=data, processes=2))
    two.over()
    assert other.end().returncode == 0


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (
            {0: Ended(1, "other", "reset"), 2: Ended(-9, host="node7")},
            "2 of the 4 training processes on node7 was ended by SIGKILL",
        ),
        (
            {0: Ended(0), 1: Ended(1, "other", "OSError: no", "node3")},
            "1 of the 4 training processes on node3 failed: OSError: no",
        ),
        ({3: Ended(3)}, "3 of the 4 training processes failed: no message"),
    ],
)
def test_what_fails_on_another_host_is_told_with_the_host(ended: dict[int, Ended], told: str) -> None:
    assert str(api._reason(ended, 4)) == f"process {told}"


def test_files_are_out_of_reach_where_none_of_a_few_can_be_read(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:02}.png" for number in range(40)]
    files = Files.of(tmp_path, paths)
    some = select(files, np.arange(10, 40))
    assert (out_of_reach(files), out_of_reach(some)) == (paths[0], paths[10])
    paths[20].touch()
    assert (out_of_reach(files), out_of_reach(some)) == (None, paths[10])
    assert out_of_reach(select(files, np.arange(20, 22))) is None
    assert out_of_reach(Pixels(np.zeros((3, 1, 2, 2), np.uint8))) is None
    assert out_of_reach([]) is None


def test_another_ends_with_a_line_where_the_first_is_lost(two: Two) -> None:
    other = two.other()
    mailbox.Mailbox(Launch(0, 2, 0, 2)).call({})  # it listens
    two.store = None
    ended = other.end()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1].startswith("process 1 on ")
    assert ended.stderr.splitlines()[-1].endswith(" has lost process 0 and stops")


def test_one_that_torchrun_started_anew_hears_what_the_one_before_it_did_not(two: Two) -> None:
    first, gone, other = (mailbox.Mailbox(Launch(rank, 2, rank, 2)) for rank in (0, 1, 1))
    assert [gone.called, other.called] == [False, False]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailbox, "_PATIENCE", 0.0)
        with pytest.raises(PipelineError, match=r"^process 1 of the 2 that torchrun has started has not answered"):
            first.call({"training": "a"})
    assert [gone.called, other.called] == [False, True]
    assert other.next_call() == {"training": "a"}
    assert first.reported("a", {}) == {}
    other.report("a", {"code": 0})
    assert first.reported("a", {}) == {1: {"code": 0}}
    assert first.reported("a", {1}) == {}
    first.say_over()
    assert [mailbox.Mailbox(Launch(1, 2, 1, 2)).next_call(), other.next_call()] == [None, None]


def test_a_program_that_has_joined_the_processes_itself_is_refused(two: Two, tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"^torch\.distributed is already initialized in this process"):
            only_first()
    finally:
        distributed.destroy_process_group()


def test_the_first_opens_what_it_is_asked_for(two: Two, tmp_path: Path) -> None:
    opened = open_job(Job(model=TINY, store=tmp_path / "store"), Heard())
    assert opened.session.context.processes == 2
    opened.session.close()
