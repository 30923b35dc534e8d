"""`ServingOptions` as options of a command line, made from its fields: what they mean and may be is said there."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from serve.common.command_line import reported
from serve.common.options import ServingOptions
from serve.runtime.errors import UserError


@dataclass(frozen=True)
class _Words:
    """A setting that is no single number or truth value: its option, what is written after it, and how it is read."""

    flag: str
    metavar: str
    kind: Any
    read: Callable[[Any], Any]
    usual: str = ""


def _sizes(word: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in word.split(","))
    except ValueError:
        raise UserError(
            f"--buckets must be whole numbers with commas between them, such as 1,8,32; got {word!r}"
        ) from None


def _pair(flag: str, word: str) -> tuple[str, Any]:
    """``NAME=VALUE``; a value is a number, true or false where it can be, else text."""
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise UserError(f"{flag} must be NAME=VALUE, got {word!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _limits(words: Iterable[str]) -> dict[str, Any]:
    return dict(_pair("--budget", word) for word in words)


def _engine_options(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        name, value = _pair("--option", word)
        engine, dot, option = name.partition(".")
        if not dot:
            raise UserError(f"--option must be ENGINE.NAME=VALUE, such as openvino.precision=f32; got {word!r}")
        found.setdefault(engine, {})[option] = value
    return found


_REST = re.compile(r"; None: [^.]*|(?<=\.)\s.*", re.DOTALL)

_PANEL = "How models are served, where that is not as their archives say"

_SPECIAL = {
    "buckets": _Words("--buckets", "SIZE,SIZE…", str, _sizes, "any size"),
    "engines": _Words("--engine", "ENGINE", list[str], tuple, "as measured"),
    "options": _Words("--option", "ENGINE.NAME=VALUE", list[str], _engine_options),
    "budget": _Words("--budget", "LIMIT=VALUE", list[str], _limits),
}
# What a thread count is where nobody says.
_UNCOUNTED = {"threads": "one per core", "decode_threads": "one per core, at most 8"}


def with_serving_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each setting; it is called with those that were given, as ``options``.

    Args:
        command: takes ``options``, a `ServingOptions`, in which only what was given is set.
    """
    own = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, field))
        for name, field in ServingOptions.model_fields.items()
    ]

    @functools.wraps(command)
    def with_options(*args: Any, **words: Any) -> None:
        given = {entry.name: words.pop(entry.name) for entry in added}
        with reported():
            read = {
                name: _SPECIAL[name].read(value) if name in _SPECIAL else value
                for name, value in given.items()
                if value is not None
            }
            options = ServingOptions(**read)
        command(*args, **words, options=options)

    kept = [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in own.parameters.values()]
    with_options.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*(entry for entry in kept if entry.name != "options"), *added]
    )
    return with_options


def _option(name: str, field: FieldInfo) -> Any:
    """The type of a setting's option, which is None where it is not given."""
    # The first sentence, without the default, which is told apart: the others are in `help(ServingOptions)`.
    meaning = _REST.sub("", field.description or "")
    words: dict[str, Any] = {"help": meaning, "rich_help_panel": _PANEL}
    if name in _SPECIAL:
        own = _SPECIAL[name]
        words["help"] += "" if own.kind is str else " Repeatable."
        return Annotated[
            own.kind | None, typer.Option(own.flag, metavar=own.metavar, show_default=own.usual or False, **words)
        ]
    flag = f"--{name.replace('_', '-')}"
    words["show_default"] = _UNCOUNTED[name] if field.default is None else str(field.default).lower()
    if isinstance(field.default, bool):
        return Annotated[bool | None, typer.Option(f"{flag}/--no{flag[1:]}", **words)]
    if isinstance(field.default, str):
        return Annotated[str | None, typer.Option(flag, metavar="NAME", **words)]
    words["min"] = next((entry.ge for entry in field.metadata if isinstance(entry, Ge)), None)
    words["max"] = next((entry.le for entry in field.metadata if isinstance(entry, Le)), None)
    return Annotated[int | None, typer.Option(flag, metavar="N", **words)]
