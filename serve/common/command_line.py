"""Common parts of both command lines. A mistake gives one line on stderr and an exit code, never a traceback."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from serve.runtime.errors import PipelineError

# Typer has its own copy of click since 0.20, and exports only this exception from it.
_USAGE_ERROR: type[Exception]
_CLICK_ERROR: type[Exception]
_, _USAGE_ERROR, _CLICK_ERROR = typer.BadParameter.__mro__[:3]


class OneLineGroup(TyperGroup):
    """Commands whose usage errors are one line, not Typer's box of several."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; see `TyperGroup.main`."""
        args = sys.argv[1:] if args is None else args
        _use_plain_characters()
        try:
            _refuse_empty(args)
            outcome = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except _CLICK_ERROR as error:
            if not standalone_mode:
                raise
            sys.exit(_report_usage_error(error))
        if standalone_mode:
            sys.exit(outcome if isinstance(outcome, int) else 0)
        return outcome


class PlainCommand(TyperCommand):
    """A command whose help is plain lines, with options under the titles of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options."""
        found = [(param, param.get_help_record(ctx)) for param in self.get_params(ctx)]
        kinds = {"argument": "Arguments", "option": "Options"}
        _write_sections(
            formatter,
            [
                (getattr(param, "rich_help_panel", None) or kinds[param.param_type_name], record)
                for param, record in found
                if record is not None
            ],
        )


class PlainGroup(OneLineGroup):
    """A group whose help is plain lines, with commands under the titles of their panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        room = formatter.width - 6 - max(len(name) for name, _ in found)
        _write_sections(
            formatter,
            [
                (getattr(entry, "rich_help_panel", None) or "Commands", (name, entry.get_short_help_str(2 * room)))
                for name, entry in found
                if entry is not None
            ],
        )


def _write_sections(formatter: Any, entries: Sequence[tuple[str, tuple[str, str]]]) -> None:
    """Write entries under their titles, in the order of each title's first entry."""
    for title in dict.fromkeys(title for title, _ in entries):
        with formatter.section(title):
            formatter.write_dl([entry for other, entry in entries if other == title])


#: Replacements for characters that an output's encoding lacks.
_REPLACEMENTS = {
    "Δ": "d",
    "Σ": "S",
    "“": "'",
    "”": "'",
    "²": "2",
    "×": "x",
    "−": "-",
    "–": "-",
    "…": "...",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "·": ".",
    "µ": "u",
    "→": "->",
    "★": "*",
}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that cannot be encoded by plain ones: an error handler for `codecs`."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_REPLACEMENTS.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error("plain", _plain)


def _use_plain_characters() -> None:
    """Let output in another encoding than UTF-8 use plain characters. Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            with contextlib.suppress(OSError):  # earlier output cannot be flushed
                stream.reconfigure(errors="plain")


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse options with an empty value, for example ``--store ''``, which would mean the current folder.

    Raises:
        click's UsageError: it names the option.
    """
    for word, following in itertools.zip_longest(words, words[1:]):
        option, equals, value = word.partition("=")
        if option.startswith("--") and (value if equals else following) == "":
            raise _USAGE_ERROR(f"{option} has no value: leave it out, or give it a value")


def _report_usage_error(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context is not None else ""
        typer.echo(f"error: {error.format_message().rstrip('.')}{hint}", err=True)
    return int(error.exit_code)


@contextlib.contextmanager
def reported(interrupted: str = "interrupted") -> Iterator[None]:
    """Report errors in the block as one line on stderr and an exit code.

    Exit codes: the error's own (2 for the user's mistakes, 1 for others). 2 if the system refuses something (a full
    disk, no permission), with the file's name. 130 for Ctrl-C, with the line ``interrupted``. 1 without a message if
    the reader of the output has gone.
    """
    try:
        yield
    except PipelineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "; free some space, or choose another --store" if error.errno == errno.ENOSPC else ""
        typer.echo(f"error: {where}{error.strerror or error}{hint}", err=True)
        raise typer.Exit(2) from None
