"""What the user asks for: a YAML file of stages, checked as a whole before anything runs.

A recipe is a graph: each stage names a pass, its settings, and the stage (or ``baseline``) that it
starts from. Everything that can be wrong with it is found here, and said with the line it stands on.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from optimize.measure.references import REFERENCES
from optimize.measure.timing import Timing
from optimize.measure.wanted import check_wanted
from optimize.models.preprocessing import PreprocessingConfig
from optimize.passes.base import Pass, find_pass, passes
from optimize.run.recommendation import Recommend
from optimize.run.session import BASELINE
from optimize.training.loop import TrainingConfig
from serve.config import Config, faults
from serve.options import ServingOptions
from serve.runtime.errors import UserError, did_you_mean, one_line

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "default.yaml"

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_MOST_VALUES = 10_000  # a few lines of anchors within anchors can mean billions


@dataclass(frozen=True)
class Stage:
    """One node of the recipe: ``name`` is made by the pass ``operation`` with ``config`` from the stage ``parent``."""

    name: str
    operation: Pass[Any]
    config: Config
    parent: str


@dataclass(frozen=True)
class Recipe:
    """A legal recipe; each stage stands after its parent."""

    stages: tuple[Stage, ...]
    baseline: TrainingConfig
    measure: Timing
    recommend: Recommend
    preprocessing: PreprocessingConfig
    serving: ServingOptions


class _Node:
    """A YAML value that knows its line: ``value`` is a dict of nodes, a list of nodes, or a scalar.

    ``count`` numbers the values of the whole file.
    """

    def __init__(self, node: yaml.Node, scalars: yaml.SafeLoader, count: Iterator[int]) -> None:
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
        """The value without its lines."""
        if isinstance(self.value, dict):
            return {name: entry.plain() for name, entry in self.value.items()}
        return [entry.plain() for entry in self.value] if isinstance(self.value, list) else self.value

    def mapping(self, what: str, known: tuple[str, ...]) -> dict[str, _Node]:
        """The fields of a mapping, none of them unknown."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise _Fault(self.line, f"{what} must be a mapping of {', '.join(known)}")
        for name, entry in self.value.items():
            if name not in known:
                raise _Fault(
                    entry.line,
                    f"unknown field {name!r} in {what}{did_you_mean(name, known)}; known are {', '.join(known)}",
                )
        return self.value


class _Fault(Exception):  # noqa: N818 - becomes a UserError with the file's name
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def load_recipe(path: Path = DEFAULT_RECIPE) -> Recipe:
    """Read and check a recipe.

    Raises:
        UserError: it cannot be read or is illegal; the message has the file, the line and the reason.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"recipe {path} cannot be read: {reason}") from None
    try:
        return _parse(text)
    except _Fault as fault:
        raise UserError(f"{path}:{fault.line}: {fault}") from None


def _parse(text: str) -> Recipe:
    try:
        loader = yaml.SafeLoader(text)
        document = loader.get_single_node()
        root = _Node(document, loader, count()) if document is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise _Fault(mark.line + 1 if mark else 1, f"not valid YAML: {problem}") from None
    except RecursionError:  # such as an anchor in itself
        raise _Fault(1, "not valid YAML: nested without end") from None
    if root is None:
        raise _Fault(1, "the recipe is empty; it needs a list of stages")
    fields = root.mapping("the recipe", ("stages", "baseline", "preprocessing", "measure", "recommend", "serving"))
    return Recipe(
        stages=_stages(fields.get("stages"), root.line),
        baseline=_config(TrainingConfig, fields.get("baseline"), "baseline"),
        measure=_measure(fields.get("measure")),
        recommend=_config(Recommend, fields.get("recommend"), "recommend"),
        preprocessing=_config(PreprocessingConfig, fields.get("preprocessing"), "preprocessing"),
        serving=_config(ServingOptions, fields.get("serving"), "serving"),
    )


def _measure(node: _Node | None) -> Timing:
    timing: Timing = _config(Timing, node, "measure")
    try:
        check_wanted(timing.executions or ())
    except UserError as error:
        assert node is not None
        raise _Fault(node.value["executions"].line, f"measure.executions: {error}") from None
    return timing


def _stages(node: _Node | None, line: int) -> tuple[Stage, ...]:
    if node is None or not isinstance(node.value, list) or not node.value:
        raise _Fault(node.line if node else line, "stages must be a list of at least one stage")
    kinds = {BASELINE: "module"}
    stages: list[Stage] = []
    previous = BASELINE
    for entry in node.value:
        fields = entry.mapping("a stage", ("pass", "name", "from", "config"))
        if "pass" not in fields:
            raise _Fault(entry.line, f"a stage needs a pass: one of {', '.join(passes())}")
        try:
            operation = find_pass(_text(fields["pass"], "pass"))
        except UserError as error:
            raise _Fault(fields["pass"].line, str(error)) from None
        name = _text(fields["name"], "name") if "name" in fields else operation.name
        name_line = fields["name"].line if "name" in fields else entry.line
        if not _NAME.fullmatch(name):
            raise _Fault(
                name_line, f"name {name!r} must be of a-z, 0-9, '-', '_' and '.', beginning with a-z or 0-9, at most 64"
            )
        if name in REFERENCES:
            raise _Fault(name_line, f"{name!r} is what a reference measurement is called; give this stage another name")
        if name in kinds:
            raise _Fault(name_line, f"two artifacts are called {name!r}; give this stage another name")
        parent = _text(fields["from"], "from") if "from" in fields else previous
        parent_line = fields["from"].line if "from" in fields else entry.line
        if parent not in kinds:
            raise _Fault(
                parent_line,
                f"{name} starts from {parent!r}, which is no earlier stage{did_you_mean(parent, kinds)}; "
                f"earlier are {', '.join(kinds)}",
            )
        if (reason := operation.refuses(kinds[parent])) is not None:  # type: ignore[arg-type]
            raise _Fault(parent_line, f"{name} cannot follow {parent}: {reason}")
        stages.append(
            Stage(name, operation, _config(operation.config, fields.get("config"), operation.name, entry.line), parent)
        )
        kinds[name] = operation.yields
        previous = name
    return tuple(stages)


def _config(kind: type[Any], node: _Node | None, what: str, line: int = 1) -> Any:
    """Validate a mapping against a config type, with the line of the field that is wrong."""
    assert issubclass(kind, BaseModel)
    fields = node.mapping(f"the config of {what}", tuple(kind.model_fields)) if node is not None else {}
    values = {name: entry.plain() for name, entry in fields.items()}
    for name, value in values.items():
        # YAML 1.1 reads yes and on as true, which pydantic would take for 1.
        if isinstance(value, bool) and not _takes_truth(kind.model_fields[name].annotation):
            raise _Fault(fields[name].line, f"{what}.{name}: must not be a truth value (it is {value})")
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        first = faults(kind, error)[0]
        name = first.field
        where = fields[name].line if name in fields else (node.line if node is not None else line)
        raise _Fault(where, f"{what}{'.' + name if name else ''}: {first.message}") from None
    except UserError as error:  # of a record within the settings
        raise _Fault(node.line if node is not None else line, f"{what}: {error}") from None
    for name, value in config.model_dump().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise _Fault(fields[name].line, f"{what}.{name}: must be a finite number (it is {value})")
    return config


def _takes_truth(annotation: Any) -> bool:
    return bool in (annotation, *get_args(annotation))


def _text(node: _Node, what: str) -> str:
    if not isinstance(node.value, str):
        raise _Fault(node.line, f"{what} must be a word, not {reprlib.repr(node.plain())}")
    return node.value
