"""Writes the reference pages from the code: command line, variables of make, passes, recipe, statuses, API and so on.

``python -m tools.reference`` writes them into ``docs/reference``; a test compares them with what the code gives now.
The page on metrics is written by hand, and another test compares it with the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

import optimize
from optimize import cli as optimize_cli
from optimize.measure.figures import Record
from optimize.measure.rows import Report
from optimize.passes.base import Pass, passes
from optimize.run.job import Job
from optimize.run.recipe import Recipe
from optimize.store.artifact import KIND_NAMES
from serve import cli as serve_cli
from serve.asgi.protocols.oip_grpc import STATUSES
from serve.common.command_options import options_table
from serve.common.config import Config, defaults, spelled
from tools.engine_faults import engine_faults_page

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"

#: Calls that refuse a request: where their status and their kind stand among the arguments, or what they are otherwise.
_REFUSALS: Mapping[str, tuple[int | str, int | str]] = {
    "RefusedError": (0, 2),
    "try_again": ("503", 1),
    "RequestError": (1, "bad-request"),
    "ImageError": (1, "item"),
    "Refusal": (0, "item"),
}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars and line breaks in cells are escaped."""
    cells = [" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {row} |" for row in cells)])


def code(text: object) -> str:
    """Return a text as inline code, or nothing for an empty one."""
    return f"`{text}`" if str(text) else ""


def plain(text: str) -> str:
    """Return a text in which Markdown and HTML find no mark-up of their own outside of inline code."""
    parts = re.split(r"(`+[^`]*`+)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts)


def first_sentence(text: str | None) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def explained(kind: type[BaseModel]) -> str:
    """Return what the docstrings of a kind of record, and of the records that it extends, say."""
    kinds = [each for each in kind.__mro__ if issubclass(each, Record) and each is not Record]
    texts = [inspect.cleandoc(each.__doc__ or "").partition("\n\nArgs:")[0] for each in kinds]
    return "\n\n".join(plain(re.sub(r"\n(?!\n)(?<!\n\n)", " ", text)) for text in texts if text)


def settings(kind: type[BaseModel]) -> str:
    """Return the table of a kind of settings: name, type, default, meaning."""
    usual = defaults(kind)
    rows = [
        (
            code(name),
            code(spelled(field.annotation)),
            code(repr(usual[name])) if name in usual else "required",
            plain(field.description or ""),
        )
        for name, field in kind.model_fields.items()
    ]
    return table(("setting", "type", "default", "meaning"), rows)


def command_line() -> str:
    """Return the page of all commands, with their arguments and options."""
    parts = [
        "# Command line",
        "There are two programs. `python -m optimize` builds and measures, `python -m serve` packs and serves. You "
        "can add `--help` to each command. A command that fails prints one line. It ends with exit code 2, if its text "
        "names no other.",
    ]
    for module, app in (("optimize", optimize_cli.app), ("serve", serve_cli.app)):
        group: Any = get_command(app)
        for name, command in group.commands.items():
            parts += [f"## {module} {name}", plain(" ".join(inspect.cleandoc(command.help or "").split()))]
            arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
            usage = [_argument(each) for each in arguments]
            parts.append(f"```text\npython -m {module} {' '.join([name, *usage, '[OPTIONS]'])}\n```")
            rows = [
                (code(_argument(each)), "", "required" if each.required else "", plain(each.help)) for each in arguments
            ]
            rows += [_option(each) for each in command.params if each not in arguments and not each.hidden]
            if rows:
                parts.append(table(("option", "value", "default", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return f"{name}…" if parameter.nargs == -1 and not name.endswith("…") else name


def _option(parameter: Any) -> tuple[str, str, str, str]:
    names = ", ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))
    kind = parameter.type_descriptor.annotation
    value = "" if parameter.is_flag else code(parameter.metavar) if parameter.metavar else code(spelled(kind))
    shown, default = parameter.show_default, parameter.default
    usual = "required" if parameter.required else "" if default in (None, (), [], False) else code(default)
    return names, value, shown if isinstance(shown, str) else usual, plain(parameter.help or "")


def variables_page() -> str:
    """Return the page of the options of a run, with the variables of ``make`` for them."""
    return "\n\n".join(
        (
            "# Variables of make",
            "You give these to `make optimize`, such as `make optimize MODEL=resnet18 IMAGE_SIZE=160`. A flag takes "
            "`1`. Each is also an option of `python -m optimize run MODEL`, and those of model and data are arguments "
            "of `opt.load`. Without `MODEL` make takes `resnet18`.",
            '`ARGS="…"` hands further options to the command as they are, such as `ARGS="--json"`.',
            "`make help` shows the variables of `make serve`. They are the options of `serve start` in capitals. "
            "[Training](../explanations/training.md#under-torchrun) is about several processes and hosts.",
            options_table(Job),
        )
    )


def passes_page() -> str:
    """Return the page of all passes and their settings."""
    parts = [
        "# Passes",
        "In a recipe you give these settings under `config:`. In Python they are arguments of the class.",
    ]
    for step in passes().values():
        parts += [f"## {step.name}", _pass_line(step), settings(step.config)]
    return "\n\n".join(parts) + "\n"


def _pass_line(step: Pass[Any]) -> str:
    accepts = " or ".join(KIND_NAMES[kind] for kind in sorted(step.accepts))
    said = f"{step.summary[0].upper()}{step.summary[1:]}. It takes {accepts}, and gives {KIND_NAMES[step.yields]}."
    return f"{plain(said)} In Python: `opt.{step.config.__name__}`."


def recipe_page() -> str:
    """Return the page of a recipe's sections and their settings."""
    parts = [
        "# Recipe",
        "A recipe is a YAML file with these sections. Only `stages` is required.",
        "## stages",
        table(
            ("key", "meaning"),
            (
                ("`pass`", "the name of a [pass](passes.md); required"),
                ("`name`", "the artifact's name; the pass's by default"),
                ("`from`", "the parent's name, or `baseline`; the stage before by default"),
                ("`config`", "the [settings](passes.md) of the pass"),
            ),
        ),
    ]
    for name, kind in typing.get_type_hints(Recipe).items():
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            parts += [f"## {name}", plain(first_sentence(kind.__doc__)), settings(kind)]
    return "\n\n".join(parts) + "\n"


def report_page() -> str:
    """Return the page of the fields of ``report.json``."""
    version = typing.get_args(Report.model_fields["schema_version"].annotation)[0]
    parts = [
        "# report.json",
        f"This is schema {version}. Accuracies and their differences are fractions. Latencies are milliseconds at "
        "batch 1, sizes bytes, durations seconds.",
    ]
    for kind in records(Report):
        rows = [
            (code(field.alias or name), code(spelled(field.annotation))) for name, field in kind.model_fields.items()
        ]
        parts += [f"## {kind.__name__}", explained(kind), table(("field", "type"), rows)]
    return "\n\n".join(parts) + "\n"


def records(kind: type[BaseModel]) -> list[type[BaseModel]]:
    """Return a kind of record and all that its fields hold, each once, in the order in which a reader meets them."""
    found: dict[type[BaseModel], None] = {}
    queue = [kind]
    while queue:
        if (record := queue.pop(0)) not in found:
            found[record] = None
            queue += [held for field in record.model_fields.values() for held in _models(field.annotation)]
    return list(found)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def statuses_page() -> str:
    """Return the page of the HTTP statuses that our own server answers, with the kinds and messages of the code."""
    found: dict[tuple[int, str], set[str]] = {}
    for path in sorted((ROOT / "serve").rglob("*.py")):
        for status, kind, message in refusals(path.read_text(encoding="utf-8")):
            found.setdefault((status, kind), set()).add(message)
    rows = [
        (str(status), code(STATUSES.get(status, "")), code(f"item-{status}" if kind == "item" else kind), message)
        for (status, kind), messages in sorted(found.items())
        for message in [" · ".join(plain(each) for each in sorted(messages))]
    ]
    return (
        "\n\n".join(
            (
                "# HTTP statuses",
                "Our own server answers 200, or one of these. The kind is what the metric `serve_refusals_total` "
                "counts. `…` stands for what differs from request to request. A kind `item-…` is the status of one "
                "image in a request. Over gRPC the same refusal has the code in the second column. "
                "[Our own server](../explanations/own-server.md#requests-that-get-no-answer) says when each is given.",
                table(("HTTP", "gRPC", "kind", "message"), rows),
            )
        )
        + "\n"
    )


def refusals(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield status, kind and message of each refusal that a module makes with constants."""
    nodes = list(ast.walk(ast.parse(source)))
    assigned = [(each.lineno, each) for each in nodes if isinstance(each, ast.Assign) and _text(each.value)]
    assigned.sort(key=lambda entry: entry[0])
    for call in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        if not (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _REFUSALS and call.args
        ):
            continue
        where_status, where_kind = _REFUSALS[call.func.id]
        arguments = []
        for argument in call.args:  # of a variable: what was assigned to it last, above the call
            above = [
                each.value
                for line, each in assigned
                if isinstance(argument, ast.Name) and line < call.lineno and _assigns(each, argument.id)
            ]
            arguments.append(_text(above[-1] if above else argument))
        said = arguments[1 if where_status == 0 and len(arguments) > 1 else 0]
        status, kind = _argument_at(arguments, where_status, "400"), _argument_at(arguments, where_kind, "")
        if said and status and status.isdigit() and kind:
            yield int(status), kind, said


def _assigns(assignment: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in assignment.targets)


def _argument_at(arguments: Sequence[str | None], where: int | str, otherwise: str) -> str | None:
    if isinstance(where, str):
        return where
    return arguments[where] if where < len(arguments) else otherwise


def _text(node: ast.expr) -> str | None:
    """A constant as text; of an f-string what varies is an ellipsis."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def api_page() -> str:
    """Return the page of the Python API: each public name, then its documentation, which mkdocstrings fills in."""
    rows = [(code(name), plain(first_sentence(getattr(optimize, name).__doc__))) for name in optimize.__all__]
    parts = [
        "# Python API",
        "You import it with `import optimize as opt`. The site has each name's whole documentation below; elsewhere "
        "`help(opt.NAME)` prints it.",
        table(("name", "what it is"), rows),
        "What you set in a class of settings is in [passes](passes.md) and in [recipe](recipe.md).",
        *(_directive(name) for name in optimize.__all__),
    ]
    return "\n\n".join(parts) + "\n"


def _directive(name: str) -> str:
    """What mkdocstrings replaces by a name's documentation; a class that is not all settings shows its members."""
    member = getattr(optimize, name)
    shows_members = isinstance(member, type) and not issubclass(member, (Config, Exception))
    return f"::: optimize.{name}" + ("\n    options:\n      members: true" if shows_members else "")


PAGES: Mapping[str, Callable[[], str]] = {
    "command-line.md": command_line,
    "variables.md": variables_page,
    "passes.md": passes_page,
    "recipe.md": recipe_page,
    "report.md": report_page,
    "statuses.md": statuses_page,
    "api.md": api_page,
    "engine-faults.md": engine_faults_page,
}
GENERATED = "<!-- Written by `python -m tools.reference`: change the code and run it again. -->\n\n"


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(GENERATED + page(), encoding="utf-8")


if __name__ == "__main__":
    main()
