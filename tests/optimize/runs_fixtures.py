"""One run of the whole pipeline on the smallest user's model, made once, and copies of it to change."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from optimize.measure.figures import Measured
from optimize.measure.references import REFERENCES
from optimize.measure.rows import ModelFile, Report, Row
from optimize.run import float_references
from optimize.run.job import Job
from optimize.run.pipeline import Outcome, run
from tests.programs import Program, Programs

ROOT = Path(__file__).parents[2]
#: Environment of commands whose measurement leaves `torch.compile` out.
UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1"}
#: And of those that compute with one thread: two tests at a time fill two cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: Python that makes no float graph to measure beside what a command is asked for; see `references`.
NO_GRAPHS = "from optimize.run import float_references; float_references.FLOAT_GRAPHS = {}"
#: ``python -m optimize`` so.
LEAN = f"{NO_GRAPHS}; from optimize.cli import main; main()"
TINY = f"{ROOT / 'examples' / 'tiny_cnn.py'}:tiny"

RECIPE: dict[str, Any] = {
    "baseline": {"epochs": 3, "batch_size": 32, "learning_rate": 0.1, "augment": False},
    "stages": [
        {"pass": "fuse"},
        {"pass": "half", "from": "fuse"},
        {"pass": "half", "name": "half-bf16", "from": "fuse", "config": {"dtype": "bfloat16"}},
        {"pass": "dynamic", "from": "fuse"},
        {"pass": "ptq", "from": "fuse", "config": {"images": 64}},
        {"pass": "qat", "from": "baseline", "config": {"epochs": 1, "freeze_observers_at": 1, "images": 32}},
        {"pass": "onnx", "from": "fuse"},
        {"pass": "onnx-half", "from": "fuse"},
        {"pass": "onnx-int8", "from": "ptq"},
        {"pass": "onnx-int8", "name": "onnx-int8-qat", "from": "qat"},
    ],
    "measure": {"rounds": 2, "batch_sizes": [1, 4], "seconds": 0.02},
}


@dataclass
class Heard:
    """A listener that remembers: ``steps`` has (name, cached, skipped) of every step that ended."""

    steps: list[tuple[str, bool, str | None]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)

    def started(self, name: str) -> None:
        pass

    def progressed(self, fraction: float, message: str) -> None:
        self.fractions.append(fraction)

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        self.steps.append((name, cached, skipped))

    def said(self, message: str) -> None:
        self.lines.append(message)

    def made(self) -> set[str]:
        """Steps that were neither in the cache nor skipped."""
        return {name for name, cached, skipped in self.steps if not cached and skipped is None}


def with_stages(*stages: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The recipe with other stages, and the fastest measurement."""
    measure = {"rounds": 1, "batch_sizes": [1], "seconds": 0.005}
    return {**RECIPE, "measure": measure, **sections, "stages": list(stages)}


def write_recipe(folder: Path, recipe: dict[str, Any], name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@contextlib.contextmanager
def references(*, graphs: bool = True) -> Iterator[None]:
    """Leave out the reference of `torch.compile`, which takes 10 s to compile: `test_worker` has it.

    Args:
        graphs: measure those of a float graph that no stage makes, which take 6 s to export and to open.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(REFERENCES, "torch.compile", raising=False)
        if not graphs:
            patch.setattr(float_references, "FLOAT_GRAPHS", {})
        yield


def run_recipe(
    store: Path, recipe: dict[str, Any], *, graphs: bool | None = None, **options: Any
) -> tuple[Outcome, Heard]:
    """Run in this process, under the name ``tiny`` unless another is given.

    ``graphs`` as in `references`; by default where all is measured as in the run that all tests share, which has them,
    so that it is found in the store.
    """
    options.setdefault("run", "tiny")
    options.setdefault("model", TINY)
    heard = Heard()
    graphs = recipe["measure"] == RECIPE["measure"] if graphs is None else graphs
    with tempfile.TemporaryDirectory() as folder, references(graphs=graphs):
        job = Job(recipe=write_recipe(Path(folder), recipe), store=store, device="cpu", **options)
        return run(job, heard), heard


def command(*words: object, graphs: bool = True) -> list[str]:
    """A user's command, without the interpreter; ``graphs`` as in `references`."""
    begin = ["-m", "optimize"] if graphs else ["-c", LEAN]
    return [*begin, *map(str, words)]


def run_command(store: Path, recipe: Path, *words: object, graphs: bool) -> list[str]:
    """That of a run on the CPU, under the name ``tiny``."""
    options = ("--name", "tiny", "--recipe", recipe, "--store", store, "--device", "cpu", *words)
    return command("run", TINY, *options, graphs=graphs)


def start_run(programs: Programs, store: Path, recipe: Path, *words: object) -> Program:
    """Run in another process, without `torch.compile` and other references that take their time."""
    environment = {**os.environ, **UNCOMPILED, **ONE_THREAD, "COLUMNS": "200"}
    return programs.start(*run_command(store, recipe, *words, graphs=False), environment=environment)


def run_afresh(store: Path, recipe: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run in a process that begins cold, as a user does, without `torch.compile`.

    With every float graph and all threads, as the run that all tests share, so that it is found in the store.
    """
    return subprocess.run(
        [sys.executable, *run_command(store, recipe, *words, graphs=True)],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
        env={**os.environ, **UNCOMPILED, "COLUMNS": "200"},
    )  # fmt: skip


@dataclass(frozen=True)
class TinyRun:
    """The finished run: where it is, what was reported, what was heard."""

    store: Path
    folder: Path
    report: Report
    heard: Heard

    def row(self, name: str) -> Row:
        return next(row for row in self.report.rows if row.name == name)

    def file(self, name: str) -> ModelFile:
        """The model file of an artifact that was made."""
        found = self.row(name).file
        assert found is not None
        return found

    def measured(self, name: str) -> Measured:
        """The figures of an artifact that was measured."""
        found = self.row(name).measured
        assert found is not None
        return found


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder of this session of pytest, the same for all of its processes."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@functools.cache
def made_run(folder: Path) -> TinyRun:
    store, told = folder / "tiny-run" / "model_store", folder / "tiny-run.pickle"
    with FileLock(folder / "tiny-run.lock"):
        if not told.exists():
            outcome, heard = run_recipe(store, RECIPE)
            assert outcome.failed == ()
            report = Report.from_json(json.loads((outcome.folder / "report.json").read_text()))
            assert report == outcome.report
            told.write_bytes(pickle.dumps(TinyRun(store, outcome.folder, report, heard)))
    made: TinyRun = pickle.loads(told.read_bytes())
    return made


@pytest.fixture
def tiny_run(tmp_path_factory) -> TinyRun:
    """Made once, whichever process and module asks first; to be looked at, not changed."""
    return made_run(shared_folder(tmp_path_factory))


@pytest.fixture
def copied_store(tiny_run, tmp_path) -> Path:
    """A copy of the run's store, to change."""
    store = tmp_path / "model_store"
    shutil.copytree(tiny_run.store, store)
    return store
