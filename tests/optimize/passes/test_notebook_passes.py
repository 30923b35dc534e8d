"""A pass that is defined in a notebook or a script is kept by its code: equal code in another session is equal."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from optimize.models.module_source import module_source
from optimize.passes.base import _REGISTRY, Pass, passes
from optimize.run.session import Session
from optimize.store.objects import Store
from serve.common.config import Config
from serve.runtime.errors import UserError
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import noise_context
from tests.test_extension import code_of

#: Cells of a notebook: helpers, and a pass that refers to them.
HELPERS = """
import enum, functools, re
from pathlib import Path
SHIFT = 0.5
KEPT = {"weight", "bias", "running_mean", "running_var", "alpha", "beta"}
PATTERN = re.compile("conv")
FOLDER = Path("here")
class Way(enum.Enum):
    UP = 1
    def of(self, x): return x * 2
class Grid:
    def __init__(self, steps): self.steps = steps
    def near(self, x): return x // self.steps
GRID = Grid([4, 8])
@functools.cache
def level(): return 3
def rounded(x, step=0.25, *, low=0): return level() + (x / step) + SHIFT + GRID.near(x)
"""
PASS = """
from serve.common.config import Config
from optimize.passes.base import Pass
def factory(power):
    def apply(parent, config, context, folder):
        from optimize.export.program import write_weights
        module = parent.module()
        for name, parameter in module.named_parameters():
            if name in KEPT and PATTERN.match(name) and FOLDER.exists():
                parameter.data = rounded(parameter.data) ** power + Way.UP.of(config.doubled())
        write_weights(module, folder)
    return apply
class Snap(Config):
    step: float = 0.01
    def doubled(self): return 2 * self.step
SNAP = Pass(name="snap", summary="", config=Snap, accepts=frozenset(), yields="module", apply=factory(2),
            rebuild=lambda module, example: module)
"""


def ran(*cells: str) -> dict[str, Any]:
    """What a kernel has defined after its cells were run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"<cell {number}>", "exec", dont_inherit=True), names)
    return names


def digest(*cells: str) -> str:
    found: str = ran(*cells)["SNAP"].source_digest()
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x / step", "x * step"),
        ("step=0.25", "step=0.125"),
        ("low=0", "low=1"),
        ("SHIFT = 0.5", "SHIFT = 0.25"),
        ('"alpha", ', ""),
        ('compile("conv")', 'compile("fc")'),
        ('Path("here")', 'Path("there")'),
        ("return x * 2", "return x * 3"),
        ("[4, 8]", "[4, 9]"),
        ("x // self.steps", "x % self.steps"),
        ("return 3", "return 4"),
        ("factory(2)", "factory(3)"),
        ("2 * self.step", "3 * self.step"),
        ("example: module", "example: None"),
        ("write_weights(module, folder)", "write_weights(module, folder, 1)"),
    ],
)
def test_whatever_a_pass_refers_to_is_in_its_key(old: str, new: str) -> None:
    assert (HELPERS + PASS).count(old) == 1
    assert digest(HELPERS.replace(old, new), PASS.replace(old, new)) != digest(HELPERS, PASS)


@pytest.mark.parametrize(
    "cells",
    [
        (HELPERS + PASS,),
        (HELPERS.replace("return 3", "return 3  # a remark\n\n"), PASS),
        (HELPERS, PASS, "data = rounded; step = [object()]; module = object()"),  # as its attributes are called
        ("UNUSED = 1", *HELPERS.split("\n@", 1)[:1], "@" + HELPERS.split("\n@", 1)[1], PASS),
        (HELPERS, "SNAP = 3", "level = None", HELPERS, PASS),
    ],
    ids=["one cell", "a remark", "other names of the notebook", "more cells", "run again"],
)
def test_what_a_pass_does_not_refer_to_is_not(cells: tuple[str, ...]) -> None:
    assert digest(*cells) == digest(HELPERS, PASS)


def test_it_is_the_same_in_a_script_and_in_another_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{HELPERS}{PASS}print(SNAP.source_digest())\n")
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == digest(HELPERS, PASS)


def test_a_file_that_a_pass_imports_when_it_runs_is_in_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = PASS.replace("module = parent", "import late_helper\n        module = parent")
    found = []
    for text in ("A = 1\n", "A = 1  # a remark\n", "A = 2\n"):
        (tmp_path / "late_helper.py").write_text(text)
        found.append(digest(HELPERS, code))
    assert found[0] == found[1] != found[2]
    monkeypatch.setitem(sys.modules, "late_helper", importlib.import_module("late_helper"))
    assert digest(HELPERS, code) == found[2], "imported or not"


def test_an_installed_pass_counts_by_its_code_and_not_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages" / "snap_home"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder.parent)
    found = []
    for step in (2, 2, 3):
        (folder / "helpers.py").write_text(HELPERS.replace("x * 2", f"x * {step}"))
        (folder / "snap.py").write_text(f"from snap_home.helpers import *\n{PASS}")
        for name in [name for name in sys.modules if name.startswith("snap_home")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        found.append(importlib.import_module("snap_home.snap").SNAP.source_digest())
    assert found[0] == found[1] != found[2]


def test_a_pass_of_this_project_changes_with_its_sources_alone() -> None:
    digests = [entry.source_digest() for entry in passes().values()]
    assert len(set(digests)) == len(digests)
    assert digests == [entry.source_digest() for entry in passes().values()]


@pytest.fixture
def registered() -> Any:
    """The registry of passes, as it was before the test once that has ended."""
    passes()
    entries, homes = dict(_REGISTRY._entries), dict(_REGISTRY._homes)
    yield
    _REGISTRY._entries, _REGISTRY._homes = entries, homes


def test_a_pass_of_a_cell_is_made_once_and_anew_where_the_cell_is_run_with_a_change(
    tmp_path: Path, registered: None
) -> None:
    torch.manual_seed(0)
    source, checkpoint = module_source(Tiny(4))
    session = Session(Store(tmp_path / "store"), source, noise_context())
    parent = session.baseline(checkpoint=checkpoint).artifact
    code = code_of("How to add a pass")
    first = ran(code)["Snap"](step=0.125)
    made = session.apply(parent, first)
    for name, tensor in made.artifact.module().state_dict().items():
        assert torch.equal((tensor * 8).round(), tensor * 8) or name.split(".")[-1].startswith(("running", "num"))
    again = ran(code.replace("multiples of a step", "multiples of one"))["Snap"](step=0.125)
    assert (made.cached, session.apply(parent, again).cached) == (False, True)
    with pytest.raises(UserError, match="Snap was redefined after these settings were made; make them again"):
        session.apply(parent, first)
    changed = ran(code.replace(".round()", ".floor()"))["Snap"](step=0.125)
    assert not session.apply(parent, changed).cached


def test_a_name_that_another_pass_has_is_refused(registered: None) -> None:
    class Other(Config):
        """Settings of another."""

    with pytest.raises(ValueError, match="a pass named 'ptq' is registered already"):
        _REGISTRY.register(Pass("ptq", "", Other, frozenset(), "onnx", lambda *_: None), "elsewhere")  # type: ignore
