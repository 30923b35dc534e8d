"""The house holds: rooms import only from their own floor and from those below, and some doors stay shut."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from optimize.tasks import base as scoring
from serve.runtime.tasks import base as answering
from tools.house import COMMON_NAMES, REGISTRIES, imported, modules

ROOT = Path(__file__).parents[1]

# From the ground up; a module belongs to the longest name that it begins with.
FLOORS = {
    "serve.runtime": 0,
    "optimize": 0,
    "optimize.errors": 0,
    "optimize.explained_error": 2,
    "optimize.listener": 0,
    "optimize.average_precision": 2,
    "optimize.jackknife": 1,
    "optimize.mean_iou": 1,
    "optimize.memory": 0,
    "optimize.noise": 0,
    "optimize.small_pictures": 0,
    "optimize.retrieval": 2,
    "optimize.statistics": 0,
    "serve": 1,
    "serve.common": 1,
    "serve.archive": 2,
    "serve.load": 2,
    "serve.torchserve": 2,
    "serve.runs": 3,
    "serve.tune": 3,
    "serve.asgi": 4,
    "serve.packing": 4,
    "serve.export": 5,
    "serve.cli": 9,
    "serve.__main__": 9,
    "optimize.data": 2,
    "optimize.tasks": 2,
    "optimize.models": 3,
    "optimize.store": 3,
    "optimize.context": 3,
    "optimize.training": 4,
    "optimize.measure": 4,
    "optimize.tracing": 4,
    "optimize.export": 4,
    "optimize.lint": 4,
    "optimize.report": 5,
    "optimize.quantization": 5,
    "optimize.pruning": 5,
    "optimize.certify": 5,
    "optimize.profiling": 6,
    "optimize.passes": 6,
    "optimize.run": 7,
    "optimize.precision": 8,
    "optimize.api": 9,
    "optimize.arguments": 9,
    "optimize.variant": 9,
    "optimize.cli": 9,
    "optimize.__main__": 9,
}

# Folders within a room, from the ground up: each imports only from those before it, and from the room's own files.
FOLDERS: dict[str, tuple[str, ...]] = {
    "optimize.tracing": (),
    "optimize.export": ("onnx_graph",),
    "optimize.quantization": ("graph", "placement", "rewrites", "lowering", "lowbit", "recovery"),
    "optimize.training": ("distributed",),
    "optimize.api": (),
    "optimize.certify": (),
    "optimize.cli": (),
    "optimize.data": ("formats",),
    "optimize.lint": ("rules",),
    "optimize.measure": (),
    "optimize.models": ("networks",),
    "optimize.passes": (),
    "optimize.precision": (),
    "optimize.profiling": ("readers",),
    "optimize.pruning": (),
    "optimize.report": (),
    "optimize.run": ("recommendation", "certification"),
    "optimize.store": (),
    "optimize.tasks": (),
    "serve.common": (),
    "serve.archive": (),
    "serve.load": (),
    "serve.torchserve": (),
    "serve.runs": (),
    "serve.tune": (),
    "serve.packing": (),
    "serve.export": (),
    "serve.asgi": ("http", "protocols", "process"),
    "serve.cli": (),
    "serve.runtime": ("device", "card", "images", "model_files", "decoders", "engines", "tasks", "service"),
}

#: The most Python files in one folder of these rooms, registries apart.
MOST_FILES = 20

PATHS = modules(ROOT)
MODULES = sorted(PATHS)


@functools.cache
def imports(module: str) -> frozenset[str]:
    """The project's modules that ``module`` imports when it is loaded or run, resolved to absolute names."""
    return frozenset(imported(module, PATHS[module], PATHS))


def floor(module: str) -> int:
    parts = module.split(".")
    return next(FLOORS[name] for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in FLOORS and name)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "optimize"])
def test_a_room_imports_only_from_its_floor_and_below(module: str) -> None:
    above = [name for name in imports(module) if floor(name) > floor(module)]
    assert not above, f"{module} (floor {floor(module)}) imports {above}"


def rooms() -> dict[str, set[str]]:
    """Which rooms each room imports from; a room is a folder or a file at the top of a package."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        found.setdefault(room(module), set()).update(room(name) for name in imports(module))
    return {name: others - {name} for name, others in found.items()}


def room(module: str) -> str:
    return max((name for name in FLOORS if f"{module}.".startswith(f"{name}.")), key=len)


def test_no_rooms_import_each_other_in_a_circle() -> None:
    others = rooms()
    others["optimize"] = set()  # names the API's homes, for type checkers only
    while leaves := [name for name, imported in others.items() if not imported & others.keys()]:
        for leaf in leaves:
            del others[leaf]
    assert not others, f"these import each other: {others}"


@pytest.mark.parametrize(("room", "folders"), FOLDERS.items())
def test_the_folders_of_a_room_lean_on_those_before_them(room: str, folders: tuple[str, ...]) -> None:
    above = [
        (module, name)
        for number, folder in enumerate(folders)
        for module in MODULES
        if f"{module}.".startswith(f"{room}.{folder}.")
        for name in imports(module)
        if any(f"{name}.".startswith(f"{room}.{other}.") for other in folders[number + 1 :])
    ]
    assert not above


@pytest.mark.parametrize("room", FOLDERS)
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    others = {name: {*imports(name)} - {name} for name in MODULES if f"{name}.".startswith(f"{room}.")}
    while leaves := [name for name, imported in others.items() if not imported & others.keys()]:
        for leaf in leaves:
            del others[leaf]
    assert not others, f"these import each other: {others}"


@pytest.mark.parametrize("room", FOLDERS)
def test_a_room_and_each_of_its_folders_has_few_files(room: str) -> None:
    folder = ROOT / Path(*room.split("."))
    inside = [each for each in (folder, *folder.rglob("*")) if each.is_dir() and any(each.glob("*.py"))]
    assert {each.name for each in inside if each.parent == folder} == {*FOLDERS[room]}
    bound = [each for each in inside if each.relative_to(ROOT).as_posix() not in REGISTRIES]
    assert not {each: count for each in bound if (count := len([*each.glob("*.py")])) > MOST_FILES}


def test_at_most_two_modules_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for package in ("optimize", "serve"):
        for path in (ROOT / package).rglob("*.py"):
            if path.stem not in COMMON_NAMES:
                found.setdefault(path.stem, []).append(path.relative_to(ROOT).as_posix())
    for name, places in found.items():
        found[name] = [place for place in places if str(Path(place).parent) not in REGISTRIES]
    assert not {name: places for name, places in found.items() if len(places) > 2}


def test_every_room_of_serve_is_bounded_and_has_its_folders_in_order() -> None:
    assert {f"serve.{path.parent.name}" for path in (ROOT / "serve").glob("*/__init__.py")} <= FOLDERS.keys()


def test_every_room_has_a_floor_of_its_own() -> None:
    assert not [name for name in MODULES if "." in name and ".".join(name.split(".")[:2]) not in FLOORS]


def test_the_rooms_that_are_listed_are_those_that_there_are() -> None:
    listed = set(re.findall(r"`(\w+(?:/\w+)+)/`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    folders = {
        f"{package}/{path.parent.name}"
        for package in ("optimize", "serve")
        for path in (ROOT / package).glob("*/__init__.py")
    }
    assert {name for name in listed if name.count("/") == 1} >= folders
    assert all((ROOT / name).is_dir() for name in listed)


def test_benchmarks_and_packages_run_without_the_tests() -> None:
    files = [path for folder in ("optimize", "serve", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    borrowed = [
        str(path.relative_to(ROOT))
        for path in files
        if re.search(r"^\s*(from|import) tests\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert borrowed == []


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("serve")])
def test_serving_never_imports_optimizing(module: str) -> None:
    assert not [name for name in imports(module) if name.startswith("optimize")]


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("serve.runtime")])
def test_the_runtime_imports_nothing_of_the_project_but_itself_nor_torchserve(module: str) -> None:
    assert all(name.startswith("serve.runtime") for name in imports(module))
    source = ROOT / Path(*module.split("."))
    text = (source / "__init__.py" if source.is_dir() else source.with_suffix(".py")).read_text(encoding="utf-8")
    roots = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    assert "ts" not in roots


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("optimize.passes.")])
def test_a_pass_knows_no_other_pass(module: str) -> None:
    assert not [
        name
        for name in imports(module)
        if name.startswith("optimize.passes.") and name not in ("optimize.passes.base", module)
    ]


@pytest.mark.parametrize("package", ["optimize", "serve"])
def test_tests_lie_in_folders_that_are_called_like_those_of_their_subjects(package: str) -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests" / package).rglob("test_*.py")}
    assert folders
    assert not [folder for folder in folders if not (ROOT / folder).is_dir() or folder == Path(package)]


#: Who may name a task: its own files, data formats, which say whose data they read, and libraries of networks.
NAMING_TASKS = (
    *("optimize/tasks/", "serve/runtime/tasks/", "optimize/data/formats/", "optimize/data/from_python.py"),
    "optimize/models/",
)


def test_nothing_names_a_task_but_the_tasks_and_the_data() -> None:
    names = set(answering.tasks()) | set(scoring.tasks())
    assert "classification" in names
    # An extension of the Open Inference Protocol, which is refused, has that name too.
    found = {("serve/asgi/protocols/oip_rest.py", "classification")}
    for module in MODULES:
        place = PATHS[module].relative_to(ROOT).as_posix()
        if place.startswith(NAMING_TASKS):
            continue
        words = ast.walk(ast.parse(PATHS[module].read_text(encoding="utf-8")))
        found |= {(place, str(node.value)) for node in words if isinstance(node, ast.Constant) and node.value in names}
        found |= {
            (place, name)
            for name in imports(module)
            if name.startswith(("optimize.tasks.", "serve.runtime.tasks.")) and not name.endswith(".base")
        }
    assert found == {("serve/asgi/protocols/oip_rest.py", "classification")}
