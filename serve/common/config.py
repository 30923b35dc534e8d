"""The base class of all settings: typed, validated, frozen, described by their fields, with errors of one line."""

from __future__ import annotations

import functools
import inspect
import reprlib
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic._internal._model_construction import ModelMetaclass  # pydantic 2 does not export it
from pydantic.fields import FieldInfo

from serve.runtime.display import fact_table
from serve.runtime.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Fault:
    """A fault in one setting. ``field`` is empty if it concerns several of them."""

    field: str
    message: str


@dataclass(frozen=True)
class Option:
    """How the command line writes a field of settings, if its name and type do not say so.

    It belongs in the field's annotation: ``Annotated[tuple[int, ...], Option(metavar="SIZE,SIZE…", read=sizes)]``.

    Attributes:
        flag: ``--name``. Default: the field's name.
        metavar: placeholder for the value in help texts.
        kind: typer's type of the words: ``str``, ``Path``, ``list[str]`` …. Default: the field's type.
        read: converts that to the field's value. It may raise `UserError`.
        usual: the default in words, if the field's default is None or empty.
        variable: the variable of ``make``. Default: the flag in capitals.
        negatable: whether the flag also exists as ``--no-name``.
    """

    flag: str = ""
    metavar: str | None = None
    kind: Any = None
    read: Callable[[Any], Any] | None = None
    usual: str = ""
    variable: str = ""
    negatable: bool = False


@dataclass(frozen=True)
class OptionsOf:
    """For a field's annotation: the command line has an option for each field of the settings ``kind``.

    Attributes:
        kind: a class of settings.
        read: returns the annotated field's value for the given options, at least one.
    """

    kind: type[Config]
    read: Callable[[dict[str, Any]], Any]


class _Settings(ModelMetaclass):
    """Creates settings with the project's own errors, and hides pydantic's 60 methods from ``help()``.

    A metaclass, because pydantic would also call an ``__init__`` from ``model_validate``.
    """

    def __call__(cls, *args: Any, **settings: Any) -> Any:  # noqa: N805 - the class is a metaclass's self
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            assert issubclass(cls, BaseModel)
            named = [f"{f.field}: {f.message}" if f.field else f.message for f in faults(cls, error)]
            title = cls.model_config.get("title", cls.__name__)
            raise UserError(f"{title}: {'; '.join(named)}" if title else "; ".join(named)) from None

    def __dir__(cls) -> list[str]:  # noqa: N805
        return ["__doc__"]


class Config(BaseModel, metaclass=_Settings):
    """Settings: typed, validated, frozen. Unknown fields are refused. Threads may share them.

    Raises:
        UserError: a setting is unknown or has an illegal value. Each is named with its value, after the class's name or
            the ``title`` of its ``model_config``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Where a class's settings are documented, so that subclasses need not repeat it.
    described_by: ClassVar[str | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Add each field to the class's docstring, for ``help()`` and editors."""
        own = inspect.cleandoc(cls.__dict__.get("__doc__") or cls.__name__)
        usual = defaults(cls)
        general = cls._inherited_settings()
        fields = [_described(name, field, usual) for name, field in cls.model_fields.items() if name not in general]
        if general:
            named = [_head(name, cls.model_fields[name], usual) for name in general]
            fields.append(_paragraph(f"see {cls.described_by} for their descriptions: {'; '.join(named)}"))
        cls.__doc__ = "\n".join([own, "", "Settings:", *fields])

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: object, info: ValidationInfo) -> object:
        """Refuse YAML's ``yes``, ``on`` and ``true`` as numbers. Python and pydantic accept them."""
        if isinstance(value, bool) and _is_number(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("input should be a number")
        return value

    @classmethod
    def _inherited_settings(cls) -> list[str]:
        """Return the settings that are inherited unchanged from a class with its own documentation."""
        for number, kind in enumerate(cls.__mro__):
            if issubclass(kind, Config) and vars(kind).get("described_by") is not None:
                own = {name for nearer in cls.__mro__[:number] for name in vars(nearer).get("__annotations__", {})}
                return [name for name in kind.model_fields if name not in own] if number else []
        return []

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the given settings that differ from their defaults, for ``repr``."""
        usual = defaults(type(self))
        for name, value in super().__repr_args__():
            if name not in usual or (name in self.model_fields_set and value != usual[name]):
                yield name, value

    def _repr_html_(self) -> str:
        """Return every setting with its meaning, and the default of changed ones."""
        usual = defaults(type(self))
        rows = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            changed = name in usual and value != usual[name]
            given = reprlib.repr(value) + (f" (usually {usual[name]!r})" if changed else "")
            rows[name] = (given, field.description or "")
        return fact_table(rows)


def defaults(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the default of each setting. Some depend on earlier settings."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if not field.is_required():
            found[name] = field.get_default(call_default_factory=True, validated_data=found)
    return found


def faults(kind: type[BaseModel], error: ValidationError) -> list[Fault]:
    """Return pydantic's errors in the project's format: the value, and what would be right."""
    return _faults_of(kind, error.errors())


def _faults_of(kind: type[BaseModel], entries: Sequence[Mapping[str, Any]]) -> list[Fault]:
    found = []
    for entry in entries:
        name = str(entry["loc"][0]) if entry["loc"] else ""
        within = settings_within(kind, name)
        if len(entry["loc"]) > 1 and within is not None:
            deeper = {**entry, "loc": entry["loc"][1:]}
            found += [Fault(name, f"{fault.field}: {fault.message}") for fault in _faults_of(within, [deeper])]
            continue
        if entry["type"] == "extra_forbidden":
            inside, known = [str(part) for part in entry["loc"][1:]], _known(kind, name)
            where = f"{'.'.join(inside)}: " if inside else ""
            wrong = inside[-1] if inside else name
            found.append(Fault(name, f"{where}unknown{did_you_mean(wrong, known)}; known: {', '.join(known)}"))
            continue
        message = entry["msg"].removeprefix("Value error, ")
        given = f" (it is {reprlib.repr(entry['input'])})" if name else ""
        found.append(Fault(name, message[0].lower() + message[1:] + given))
    return found


def settings_within(kind: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the class of the settings inside a setting, which may also be None. None if it has another type."""
    annotation: Any = kind.model_fields[name].annotation if name in kind.model_fields else None
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = [part for part in (typing.get_args(annotation) if union else (annotation,)) if part is not types.NoneType]
    alone = parts[0] if len(parts) == 1 else None
    return alone if isinstance(alone, type) and issubclass(alone, BaseModel) else None


def _is_number(annotation: Any) -> bool:
    """Whether a setting of this type is a number, or None."""
    parts = typing.get_args(annotation) or (annotation,)
    return all(part in (int, float, types.NoneType) for part in parts)


def _known(kind: type[BaseModel], name: str) -> list[str]:
    """Return the settings of a class, or those inside one of its mappings."""
    if name not in kind.model_fields:
        return list(kind.model_fields)
    annotation: Any = kind.model_fields[name].annotation
    while parts := typing.get_args(annotation):
        annotation = parts[-1]
    return list(getattr(annotation, "__annotations__", {}))


def _described(name: str, field: FieldInfo, usual: Mapping[str, Any]) -> str:
    """Return a field as a paragraph: name, type, default and meaning."""
    return _paragraph(f"{_head(name, field, usual)}: {field.description or ''}")


def _head(name: str, field: FieldInfo, usual: Mapping[str, Any]) -> str:
    default = f" = {usual[name]!r}" if name in usual else ""
    return f"{name}: {spelled(field.annotation)}{default}"


def _paragraph(text: str) -> str:
    lines = textwrap.wrap(text, 116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    return "\n".join(lines)


def spelled(annotation: Any) -> str:
    """Return a type as written in code, without module names."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(map(repr, parts))
    if origin is typing.Annotated:  # its validators are of no interest to users
        return spelled(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(spelled, parts))
    if origin in (dict, tuple, type, functools.partial):
        return f"{origin.__name__}[{', '.join(map(spelled, parts))}]"
    if annotation is Ellipsis or (isinstance(annotation, type) and not parts):
        return "..." if annotation is Ellipsis else annotation.__name__.replace("NoneType", "None")
    return str(annotation).replace("typing.", "").replace("NoneType", "None")
