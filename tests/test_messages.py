"""Errors, warnings and help texts are plain English: short sentences, without the words that only this house used."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Packages whose texts are held to the rules.
PACKAGES = ("serve", "optimize")

#: The longest error, in characters without the values that it names.
LONGEST_ERROR = 180
#: The longest sentence of a help text, in words.
LONGEST_SENTENCE = 25

#: Turns of phrase that a reader from another house would stumble over, and what says the same.
DIALECT = {
    r"\banew\b": "again",
    r"\b(goes|go|going|went) on\b": "continues, keeps running",
    r"\bas (it|they) stands?\b": "unchanged",
    r"\b(is|are|was|were|be|been) (told|asked)\b": "who tells whom: the server refuses …",
    r"\basked for\b": "requested, or the name of the option",
    r"\b[Oo]f which\b": "a sentence of its own",
    r"\bat hand\b": "here, available",
    r"\b[Ww]ho(so)?ever\b": "everyone who",
    r"\b(is|are) to be\b": "must be, should be",
    r"\bif that is meant\b": "if you want that",
    r"(?<!there )\bis (none|no (file|folder|socket|regular|tensor|name|signature|YAML|number))\b": "is not a …",
    r"\bknown are\b": "known:",
    r"\b[Ww]ithout a word\b": "silently",
    r"\b[Ww]here not\b": "unless",
    r"\b[Mm]ost (seconds|MiB|images|connections|requests|bodies) (that|at|of|until)\b": "the limit of …",
    r"\bothers? than\b": "different from",
    r"\b(is|are) said\b": "is reported",
    r"\bfound out\b": "known, determined",
    r"\bsuch as was\b": "the same … as",
    r"\bas (is|was) meant\b": "as intended",
}


@dataclass(frozen=True)
class Text:
    """A text of the source: where it is, whether it is an ``error``, a ``help`` text or another ``text``."""

    place: str
    kind: str
    words: str


class Texts(ast.NodeVisitor):
    """Collects the texts of a module that are no docstrings of the code; values that a text names become ``…``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[Text] = []
        self._kind = "text"

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add(node, node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._add(node, "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring is not shown to a user
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        self.visit(node.func)
        for argument in node.args:
            self._visit_as("error" if called.endswith("Error") else self._kind, argument)
        for keyword in node.keywords:
            self._visit_as("help" if keyword.arg in ("help", "description", "summary") else self._kind, keyword.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        # Each public function in these folders whose parameters are options is a command.
        if "/cli/" in self.name and any("typer." in ast.unparse(entry) for entry in _annotations(node)):
            self._add(node, ast.get_docstring(node) or "", "help")
        self.generic_visit(node)

    def _visit_as(self, kind: str, node: ast.expr) -> None:
        outer, self._kind = self._kind, kind
        self.visit(node)
        self._kind = outer

    def _add(self, node: ast.expr | ast.stmt, words: str, kind: str | None = None) -> None:
        self.found.append(Text(f"{self.name}:{node.lineno}", kind or self._kind, words))


def _annotations(node: ast.FunctionDef) -> Iterator[ast.expr]:
    return (entry.annotation for entry in (*node.args.args, *node.args.kwonlyargs) if entry.annotation is not None)


def texts_of(source: str, name: str) -> list[Text]:
    """The texts of a module's source."""
    texts = Texts(name)
    texts.visit(ast.parse(source))
    return texts.found


@functools.cache
def texts() -> tuple[Text, ...]:
    """All texts of the packages."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(
        text for path in files for text in texts_of(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    )


def sentences(words: str) -> list[str]:
    """The sentences of a text; a semicolon or a colon in front of a blank ends one, too."""
    return [sentence for sentence in re.split(r"(?<=[.;:])\s+|\n\n", words) if sentence]


def _of(*kinds: str) -> list[Text]:
    return [text for text in texts() if text.kind in kinds]


def test_an_error_is_short() -> None:
    assert not [text for text in _of("error") if len(text.words) > LONGEST_ERROR]


def test_the_sentences_of_a_help_text_are_short() -> None:
    long = [
        (text.place, sentence)
        for text in _of("help")
        for sentence in sentences(text.words)
        if len(sentence.split()) > LONGEST_SENTENCE
    ]
    assert not long


def test_an_error_or_a_help_text_has_one_semicolon_at_most() -> None:
    chains = [
        (text.place, sentence)
        for text in _of("error", "help")
        for sentence in re.split(r"\.\s", text.words)
        if sentence.count(";") > 1
    ]
    assert not chains


def test_an_error_ends_without_a_full_stop() -> None:
    assert not [text for text in _of("error") if text.words.endswith(".")]


def test_the_help_of_a_command_line_ends_with_a_full_stop() -> None:
    of_commands = [text for text in _of("help") if "/cli/" in text.place]
    assert of_commands
    assert not [text for text in of_commands if not text.words.endswith(".")]


def test_no_error_or_help_text_has_two_blanks_in_a_row() -> None:
    assert not [text for text in _of("error", "help") if re.search(r"\S {2,}\S", text.words)]


@pytest.mark.parametrize("phrase", DIALECT)
def test_no_text_uses_words_of_the_house(phrase: str) -> None:
    found = [text for text in texts() if re.search(phrase, text.words)]
    assert not found, f"better: {DIALECT[phrase]}"


def test_texts_are_collected_with_their_kinds() -> None:
    source = '''
"""Not a text of a user."""


def run(name: Annotated[str, typer.Option(help="Help.")]) -> None:
    """A command."""
    raise errors.UserError(f"{name}: is bad; it must " f"be {'good'!r}")


def other(name: str) -> str:
    """Not a text of a user either."""
    return Field(default="a default", description="A field.") or "plain"
'''
    assert sorted((text.kind, text.words) for text in texts_of(source, "x/cli/y.py")) == [
        ("error", "…: is bad; it must be …"),
        ("help", "A command."),
        ("help", "A field."),
        ("help", "Help."),
        ("text", "a default"),
        ("text", "plain"),
    ]
