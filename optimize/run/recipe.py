"""Reads and checks a recipe, a YAML file of stages.

A recipe is a graph: each stage names a pass, its settings, and the stage (or ``baseline``) that it starts from. All
mistakes are found here before anything runs, and reported together with their lines.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from optimize.measure.chosen_executions import check_wanted
from optimize.measure.references import REFERENCES
from optimize.measure.timing import Timing
from optimize.models.preprocessing_config import PreprocessingConfig
from optimize.passes.base import Pass, find_pass, passes
from optimize.run.recommendation.rule import Recommend
from optimize.run.session import BASELINE
from optimize.store.artifact import KIND_NAMES
from optimize.training.config import TrainingConfig, distillations
from optimize.training.distil import SELF, Distil
from serve.common.config import Config, faults, settings_within
from serve.common.options import ServingOptions
from serve.common.yaml_numbers import Loader
from serve.runtime.errors import UserError, did_you_mean, one_line

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "default.yaml"

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_MOST_VALUES = 10_000  # a few lines of nested anchors can expand to billions of values


@dataclass(frozen=True)
class Stage:
    """One node of the recipe: the pass ``operation`` with ``config`` makes ``name`` from the stage ``parent``.

    ``line`` is its line in the file.
    """

    name: str
    operation: Pass[Any]
    config: Config
    parent: str
    line: int = field(default=1, compare=False)

    @property
    def teachers(self) -> tuple[str, ...]:
        """Return the names of the artifacts that teach. Empty without a teacher, or if no teacher has its own name."""
        return tuple(name for each in distillations(self.config) if (name := _word(each)) not in (None, SELF))


@dataclass(frozen=True)
class Recipe:
    """A valid recipe. Each stage comes after its parent."""

    stages: tuple[Stage, ...]
    baseline: TrainingConfig
    measure: Timing
    recommend: Recommend
    preprocessing: PreprocessingConfig
    serving: ServingOptions


class _Node:
    """A YAML value with its line: ``value`` is a dict of nodes, a list of nodes, or a scalar.

    ``count`` numbers the values of the whole file.
    """

    def __init__(self, node: yaml.Node, scalars: Loader, count: Iterator[int]) -> None:
        self.line = node.start_mark.line + 1
        if next(count) > _MOST_VALUES:
            raise _Fault(self.line, f"the recipe has more than {_MOST_VALUES} values")
        self.value: Any
        if isinstance(node, yaml.MappingNode):
            self.value = {}
            for key, entry in node.value:
                name = str(scalars.construct_object(key, deep=True))
                if name in self.value:
                    raise _Fault(key.start_mark.line + 1, f"{name!r} is given twice")
                self.value[name] = _Node(entry, scalars, count)
                self.value[name].line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode):
            self.value = [_Node(entry, scalars, count) for entry in node.value]
        else:
            try:
                self.value = scalars.construct_object(node, deep=True)
            except yaml.YAMLError:
                raise
            except Exception as error:  # noqa: BLE001 - PyYAML 6 stumbles in many ways: a date that does not exist is
                # a ValueError, `!!bool x` a KeyError, `!!int ""` an IndexError
                raise _Fault(self.line, f"not valid YAML: {one_line(error)}") from None

    def plain(self) -> Any:
        """Return the value without its lines."""
        if isinstance(self.value, dict):
            return {name: entry.plain() for name, entry in self.value.items()}
        return [entry.plain() for entry in self.value] if isinstance(self.value, list) else self.value

    def mapping(self, what: str, known: tuple[str, ...], found: _Faults) -> dict[str, _Node]:
        """Return the fields of a mapping. Unknown fields are reported as faults and left out."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            found.add(self.line, f"{what} must be a mapping of {', '.join(known)}")
            return {}
        for name, entry in self.value.items():
            if name not in known:
                reason = f"unknown field {name!r} in {what}{did_you_mean(name, known)}; known: {', '.join(known)}"
                found.add(entry.line, reason)
        return {name: entry for name, entry in self.value.items() if name in known}


class _Fault(Exception):  # noqa: N818 - becomes a UserError with the file's name
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class _Faults:
    """The faults of a recipe that were found so far."""

    def __init__(self) -> None:
        self._found: list[tuple[int, str]] = []

    def add(self, line: int, reason: str) -> None:
        self._found.append((line, reason))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Record the fault that ends the block, and continue after the block."""
        try:
            yield
        except _Fault as fault:
            self.add(fault.line, str(fault))

    def check(self, path: Path) -> None:
        """Raise all faults together, a line each, in the order of the file."""
        if self._found:
            lines = sorted(dict.fromkeys(self._found), key=lambda fault: fault[0])
            raise UserError("\n".join(f"{path}:{line}: {reason}" for line, reason in lines))


def load_recipe(path: Path = DEFAULT_RECIPE) -> Recipe:
    """Read and check a recipe.

    Raises:
        UserError: it cannot be read or is not valid. The message has a line for each fault, with file, line and reason.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"recipe {path} cannot be read: {reason}") from None
    found = _Faults()
    recipe = None
    with found.kept():
        recipe = _parse(text, found)
    found.check(path)
    assert recipe is not None
    return recipe


def _parse(text: str, found: _Faults) -> Recipe:
    """Return the recipe. Its values are valid only as far as no fault was recorded."""
    try:
        loader = Loader(text)
        document = loader.get_single_node()
        root = _Node(document, loader, count()) if document is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise _Fault(mark.line + 1 if mark else 1, f"not valid YAML: {problem}") from None
    except RecursionError:  # for instance an anchor within itself
        raise _Fault(1, "not valid YAML: nested without end") from None
    if root is None:
        raise _Fault(1, "the recipe is empty; it needs a list of stages")
    known = ("stages", "baseline", "preprocessing", "measure", "recommend", "serving")
    fields = root.mapping("the recipe", known, found)
    baseline: TrainingConfig = _config(TrainingConfig, fields.get("baseline"), "baseline", found)
    if any(_word(each) for each in distillations(baseline)):
        reason = (
            "is made first, so no artifact can be its teacher; give a model with its weights: {model: …, checkpoint: …}"
        )
        found.add(_line_of_teacher(fields["baseline"]), f"baseline.distil.teacher: the baseline {reason}")
    return Recipe(
        stages=_stages(fields.get("stages"), root.line, found),
        baseline=baseline,
        measure=_measure(fields.get("measure"), found),
        recommend=_config(Recommend, fields.get("recommend"), "recommend", found),
        preprocessing=_config(PreprocessingConfig, fields.get("preprocessing"), "preprocessing", found),
        serving=_config(ServingOptions, fields.get("serving"), "serving", found),
    )


def _measure(node: _Node | None, found: _Faults) -> Timing:
    timing: Timing = _config(Timing, node, "measure", found)
    try:
        check_wanted(timing.executions or ())
    except UserError as error:
        assert node is not None
        found.add(node.value["executions"].line, f"measure.executions: {error}")
    return timing


def _stages(node: _Node | None, line: int, found: _Faults) -> tuple[Stage, ...]:
    """Read all stages and record the faults of each. A consequence of a fault is not another fault."""
    if node is None or not isinstance(node.value, list) or not node.value:
        found.add(node.line if node else line, "stages must be a list of at least one stage")
        return ()
    kinds: dict[str, str | None] = {BASELINE: "module"}  # None: the pass does not exist
    stages: list[Stage] = []
    previous: str | None = BASELINE  # None: unknown because of a fault
    for entry in node.value:
        fields = entry.mapping("a stage", ("pass", "name", "from", "config"), found)
        operation = None
        with found.kept():
            operation = _operation(fields, entry)
        name = operation.name if operation else None
        if "name" in fields:
            name = None
            with found.kept():
                name = _named(fields["name"], kinds)
        elif name in kinds:
            found.add(entry.line, f"two artifacts are called {name!r}; give this stage another name")
            name = None
        parent, parent_line = previous, entry.line
        if "from" in fields:
            parent, parent_line = None, fields["from"].line
            with found.kept():
                parent = _parent(fields["from"], name, kinds)
        if operation is not None:
            kind = kinds[parent] if parent is not None else None
            if kind is not None and (reason := operation.refuses(kind)) is not None:  # type: ignore[arg-type]
                found.add(parent_line, f"{name or operation.name} cannot follow {parent}: {reason}")
            config = _config(operation.config, fields.get("config"), operation.name, found, entry.line)
            stages.append(Stage(name or operation.name, operation, config, parent or BASELINE, entry.line))
            if (wrong := _unable_to_teach(stages[-1], kinds)) is not None:
                found.add(_line_of_teacher(fields.get("config", entry)), f"{operation.name}: distil.teacher: {wrong}")
        if name is not None:
            kinds[name] = operation.yields if operation else None
        previous = name
    return tuple(stages)


def _word(distil: Distil) -> str | None:
    """Return the teacher of settings that may lack faulty fields. None if it is not given as a word."""
    teacher = getattr(distil, "teacher", None)
    return teacher if isinstance(teacher, str) else None


def _unable_to_teach(stage: Stage, kinds: Mapping[str, str | None]) -> str | None:
    """Say why an artifact that a stage names as its teacher cannot teach. None if there is no problem."""
    for distil in distillations(stage.config):
        teacher = _word(distil)
        if teacher is None or teacher == SELF:
            continue
        if teacher not in kinds:
            return (
                f"{teacher!r} is no earlier stage{did_you_mean(teacher, kinds)}; the earlier ones are "
                f"{', '.join(kinds)}"
            )
        kind = kinds[teacher]
        if kind not in (None, "module") and getattr(distil, "features", None):
            return f"{teacher} is {KIND_NAMES[kind]}, which has no features; use a float module"  # type: ignore[index]
    return None


def _line_of_teacher(node: _Node) -> int:
    """Return the line where settings name a teacher, at any depth."""
    if isinstance(node.value, dict):
        for name, entry in node.value.items():
            if name == "distil":
                named: _Node = entry.value["teacher"] if isinstance(entry.value, dict) else entry
                return named.line
            if isinstance(entry.value, dict) and (line := _line_of_teacher(entry)) != entry.line:
                return line
    return node.line


def _operation(fields: Mapping[str, _Node], entry: _Node) -> Pass[Any]:
    if "pass" not in fields:
        raise _Fault(entry.line, f"a stage needs a pass: one of {', '.join(passes())}")
    try:
        return find_pass(_text(fields["pass"], "pass"))
    except UserError as error:
        raise _Fault(fields["pass"].line, str(error)) from None


def _named(node: _Node, kinds: Mapping[str, object]) -> str:
    name = _text(node, "name")
    if not _NAME.fullmatch(name):
        raise _Fault(
            node.line,
            f"name {name!r} must have at most 64 of the characters a-z, 0-9, '-', '_' and '.', and begin with "
            "a-z or 0-9",
        )
    if name in REFERENCES:
        raise _Fault(node.line, f"{name!r} is the name of a reference measurement; give this stage another name")
    if name in kinds:
        raise _Fault(node.line, f"two artifacts are called {name!r}; give this stage another name")
    return name


def _parent(node: _Node, name: str | None, kinds: Mapping[str, object]) -> str:
    parent = _text(node, "from")
    if parent not in kinds:
        raise _Fault(
            node.line,
            f"{name or 'this stage'} starts from {parent!r}, which is no earlier "
            f"stage{did_you_mean(parent, kinds)}; the earlier ones are {', '.join(kinds)}",
        )
    return parent


def _config(kind: type[Any], node: _Node | None, what: str, found: _Faults, line: int = 1) -> Any:
    """Convert a mapping to a config. Faulty settings are recorded with their lines and keep their defaults."""
    assert issubclass(kind, BaseModel)
    fields = node.mapping(f"the config of {what}", tuple(kind.model_fields), found) if node is not None else {}
    values = {name: entry.plain() for name, entry in fields.items()}
    for name, entry in fields.items():
        within = settings_within(kind, name)
        if within is not None and isinstance(entry.value, dict):
            values[name] = _config(within, entry, f"{what}.{name}", found, entry.line)
    for name in list(values):
        # YAML 1.1 reads yes and on as true, which pydantic would accept as 1.
        value = values[name]
        if isinstance(value, bool) and not _takes_truth(kind.model_fields[name].annotation):
            found.add(fields[name].line, f"{what}.{name}: must not be true or false (it is {value})")
            del values[name]
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        wrong = faults(kind, error)
        # A default that is derived from a faulty setting is not a fault of its own.
        wrong = [fault for fault in wrong if fault.field in fields] or wrong
        for fault in wrong:
            where = fields[fault.field].line if fault.field in fields else (node.line if node is not None else line)
            found.add(where, f"{what}{'.' + fault.field if fault.field else ''}: {fault.message}")
        right = {name: value for name, value in values.items() if name not in {fault.field for fault in wrong}}
        try:
            return kind.model_validate(right)
        except (ValidationError, UserError):  # the fault has been recorded
            return kind.model_construct()
    except UserError as error:  # from a record within the settings
        found.add(node.line if node is not None else line, f"{what}: {error}")
        return kind.model_construct()
    for name, value in config.model_dump().items():
        if isinstance(value, float) and not math.isfinite(value):
            found.add(fields[name].line, f"{what}.{name}: must be a finite number (it is {value})")
    return config


def _takes_truth(annotation: Any) -> bool:
    return bool in (annotation, *get_args(annotation))


def _text(node: _Node, what: str) -> str:
    if not isinstance(node.value, str):
        raise _Fault(node.line, f"{what} must be a word, not {reprlib.repr(node.plain())}")
    return node.value
