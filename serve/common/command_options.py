"""Command-line options and their reference, built from the fields of settings. Nothing is declared twice."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from serve.common.command_line import reported
from serve.common.config import Config, Option, OptionsOf

#: Everything after a description's first sentence, and its default, which the help shows elsewhere.
_REST = re.compile(r"; None: [^.]*|(?<=\.)\s.*", re.DOTALL)

Command = Callable[..., None]


@dataclass(frozen=True)
class Entry:
    """One option: a field of settings, or a field of the settings ``within`` another field."""

    name: str
    field: FieldInfo
    within: str = ""

    @property
    def option(self) -> Option:
        """The field's own facts about its option."""
        return next((each for each in self.field.metadata if isinstance(each, Option)), Option())

    @property
    def flag(self) -> str:
        """The option's name, for example ``--port``. Empty for an argument: a field without a default."""
        return "" if self.field.is_required() else self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The variable of ``make``."""
        return self.option.variable or (self.flag or self.name).removeprefix("--").replace("-", "_").upper()

    @property
    def metavar(self) -> str | None:
        """The placeholder for the value in help texts. None: typer's own."""
        if self.option.metavar is not None or self.kind is bool:
            return self.option.metavar
        return "|".join(_choices(self.field)) or ("N" if self.kind is int else None)

    @property
    def kind(self) -> Any:
        """The type for typer.

        Raises:
            TypeError: neither the field's type nor an `Option` gives it.
        """
        if self.option.kind is not None:
            return self.option.kind
        if _choices(self.field):
            return str
        parts = _parts(self.field.annotation)
        for kind in (str, Path) if len(parts) > 1 else (bool, int, float, str, Path):
            if kind in parts:
                return kind
        raise TypeError(f"{self.name} is {self.field.annotation}: say in an Option how it is read from a command line")

    @property
    def default(self) -> str:
        """The default in words. Empty if there is none to show."""
        value = None if self.within or self.field.is_required() else self.field.get_default(call_default_factory=True)
        return self.option.usual or ("" if value is None or self.option.read is not None else str(value))


def entries(kind: type[Config], only: Collection[str] | None = None) -> Iterator[Entry]:
    """Yield the options of settings, in the order of their fields.

    Args:
        kind: the class of the settings.
        only: names of the fields that are options. None: all.
    """
    for name, field in kind.model_fields.items():
        group = _group(field)
        found = [Entry(*each, name) for each in group.kind.model_fields.items()] if group else [Entry(name, field)]
        yield from (entry for entry in found if only is None or entry.name in only)


def _group(field: FieldInfo) -> OptionsOf | None:
    """Return the settings whose fields are options in place of a field. None: there are none."""
    return next((each for each in field.metadata if isinstance(each, OptionsOf)), None)


def with_options(
    kind: type[Config], parameter: str, *, only: Collection[str] | None = None, panel: str | None = None
) -> Callable[[Command], Command]:
    """Give a command an option for each field of settings.

    Args:
        kind: the class of the settings.
        parameter: the command's parameter for such settings. It receives the given ones, and the options take its place
            in the help.
        only: names of the fields that are options. None: all.
        panel: title of the options in the help.
    """
    added = [*entries(kind, only)]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def with_settings(context: typer.Context, **words: Any) -> None:
            with reported():
                values = {entry.name: words.pop(entry.name) for entry in added}
                settings = _settings(
                    kind, [(entry, values[entry.name]) for entry in added if _is_given(entry, context)]
                )
            command(**words, **{parameter: settings})

        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for each in own.parameters.values():
            if each.name == parameter:
                parameters += [_parameter(entry, panel) for entry in added]
            else:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        with_settings.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_settings

    return decorate


def options_table(kind: type[Config], only: Collection[str] | None = None) -> str:
    """Return a Markdown table of the options: name, variable of ``make``, meaning and default."""
    rows = [("option", "with `make`", "meaning", "default"), ("---",) * 4]
    for entry in entries(kind, only):
        value = "" if entry.kind is bool else entry.metavar or (entry.flag or entry.name).rpartition("-")[2].upper()
        meaning = (entry.field.description or "").replace("; None: ", "; by default ")
        default = entry.default if entry.option.usual or not entry.default else f"`{entry.default}`"
        rows.append((f"`{f'{entry.flag} {value}'.strip()}`", f"`{entry.variable}`", meaning, default))
    return "".join(f"| {' | '.join(_cell(word) for word in row)} |\n" for row in rows)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _is_given(entry: Entry, context: typer.Context) -> bool:
    source = context.get_parameter_source(entry.name)
    return source is None or source.name != "DEFAULT"  # typer has its own copy of click, and does not export this class


def _settings(kind: type[Config], given: Iterable[tuple[Entry, Any]]) -> Config:
    """Return the settings given on the command line.

    Raises:
        UserError: a value is illegal.
    """
    settings: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for entry, word in given:
        place = inner.setdefault(entry.within, {}) if entry.within else settings
        place[entry.name] = word if entry.option.read is None else entry.option.read(word)
    for name, values in inner.items():
        group = _group(kind.model_fields[name])
        assert group is not None
        settings[name] = group.read(values)
    return kind(**settings)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field may have, if its type names them."""
    parts = [part for part in _parts(field.annotation) if typing.get_origin(part) is typing.Literal]
    return tuple(word for part in parts for word in typing.get_args(part))


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a value may have, without None."""
    if typing.get_origin(annotation) is Annotated:
        return _parts(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(
            part for each in typing.get_args(annotation) if each is not types.NoneType for part in _parts(each)
        )
    return (annotation,)


def _parameter(entry: Entry, panel: str | None) -> inspect.Parameter:
    """Return the command parameter from which typer makes the option."""
    own, kind, field = entry.option, entry.kind, entry.field
    words: dict[str, Any] = {"help": _REST.sub("", field.description or ""), "metavar": entry.metavar}
    if typing.get_origin(kind) is list:
        words["help"] += " Repeatable."
    if kind is int:
        words["min"] = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
        words["max"] = next((each.le for each in field.metadata if isinstance(each, Le)), None)
    name, keyword = entry.name, inspect.Parameter.KEYWORD_ONLY
    if field.is_required():
        return inspect.Parameter(name, keyword, annotation=Annotated[kind, typer.Argument(**words)])
    shown: dict[str, Any] = {"rich_help_panel": panel}
    default = None if entry.within or own.read is not None else field.get_default(call_default_factory=True)
    if default is None or own.negatable:
        shown["show_default"] = own.usual or (str(default).lower() if own.negatable else False)
    flag = f"{entry.flag}/--no{entry.flag[1:]}" if own.negatable else entry.flag
    read = kind if default is not None else kind | None
    option = typer.Option(flag, **words, **shown)
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[read, option])
