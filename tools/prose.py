"""Measures how prose reads: words in a sentence, semicolons, and how often a page says "you".

``python -m tools.prose [FILE …]`` prints a table of Markdown pages. ``--python [FOLDER …]`` prints a table of the
docstrings and comments in folders of Python files. Pages and folders that are held to the aims below are marked. The
exit code is 1 if one of them misses an aim.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import math
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: The pages that are held to the aims, as patterns below the root. Pages of a guide also say "you".
HELD = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/get-started.md",
    "examples/README.md",
    "docs/guides/*.md",
    "docs/benchmarks/*.md",
    *(f"docs/design/{name}.md" for name in ("lowbit", "merging", "profiling", "pruning", "search")),
    "docs/explanations/*.md",
)
GUIDES = ("docs/get-started.md", "docs/guides/*.md")

#: The packages whose docstrings and comments are measured, and the folders that are held to the aims. A folder stands
#: for the Python files directly in it.
PACKAGES = ("serve", "optimize")
HELD_FOLDERS = (
    *("optimize", "optimize/data/formats", "optimize/run/certification", "optimize/run/recommendation"),
    *(f"optimize/{room}" for room in ("api", "data", "measure", "models", "profiling")),
    *(f"optimize/{room}" for room in ("report", "run", "store", "training")),
    *("optimize/training/distributed", "optimize/profiling/readers"),
    *("serve", "serve/asgi", "serve/runtime"),
    *(f"serve/asgi/{folder}" for folder in ("http", "process", "protocols")),
    *(
        f"serve/runtime/{folder}"
        for folder in ("card", "decoders", "device", "engines", "images", "model_files", "service")
    ),
    *(f"serve/{room}" for room in ("archive", "common", "export", "load", "packing", "runs", "torchserve", "tune")),
    *("optimize/tracing", "optimize/export", "optimize/export/onnx_graph", "optimize/passes"),
    *(
        f"optimize/quantization/{folder}"
        for folder in ("graph", "lowbit", "lowering", "placement", "recovery", "rewrites")
    ),
    *(f"optimize/quantization/lowering/{folder}" for folder in ("amx", "openvino", "tensorrt")),
    *("optimize/cli", "serve/cli", "optimize/lint/rules"),
    *("optimize/certify", "optimize/lint", "optimize/precision", "optimize/pruning", "optimize/quantization"),
)

_LIST_ITEM = re.compile(r"(?:[-*+]|\d+[.)])\s+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)*_]*\s+(?=[\"'“‘(\[*_]*[A-Z0-9])")
_WORD = re.compile(r"\S*\w\S*")
_SECTION = re.compile(r"(?:Args|Attributes|Returns|Raises|Yields|Settings|Note|Example|Examples):")
_ENTRY = re.compile(r"\*{0,2}\w[\w.]*(?:, \*{0,2}\w[\w.]*)*: (?=\S)")
_FOR_TOOLS = re.compile(r"#(?:!|\s*(?:noqa|type:|pragma|mypy:|ruff:|fmt:|SPDX))|\s+-\s+(?=noqa)")


@dataclass(frozen=True)
class Aims:
    """The most that a page may have: words in a sentence, and semicolons in 1,000 words; the least share of "you"."""

    mean: float = 12
    p90: int = 22
    longest: int = 40
    semicolons: float = 2
    you: float = 0.1


@dataclass(frozen=True)
class Prose:
    """What a page's sentences are like.

    ``mean``, ``p90`` (by the nearest rank) and ``longest`` count words in a sentence. ``semicolons`` is their number in
    1,000 words, ``you`` the share of sentences with "you", "your" or "yours".
    """

    words: int
    sentences: int
    mean: float
    p90: int
    longest: int
    semicolons: float
    you: float


def paragraphs(markdown: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a page, without code blocks, tables, headings, comments and directives."""
    text = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines: list[str] = []
    in_list = False
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        left_out = re.match(r"\||#+ |:::|!!!|\?\?\?|<|\[[^\]]+\]: ", stripped)
        item = _LIST_ITEM.match(stripped)
        if item and item[0][0].isdigit() and lines and not in_list:
            item = None  # a paragraph goes on: its line happens to begin with "316."
        if not stripped or left_out or item:
            if lines:
                yield " ".join(lines)
            lines = []
            in_list = bool(item)
        if stripped and not left_out:
            lines.append(stripped[item.end() :] if item else stripped)


def plain(paragraph: str) -> str:
    """Return a paragraph as it is read aloud: a link as its text, inline code as one word, no pictures."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", paragraph)
    text = re.sub(r"(`+).+?\1", "CODE", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\b(e\.g|i\.e|vs|etc)\.", r"\1", text)


def sentences(markdown: str) -> list[str]:
    """Return the sentences of a page; a list item begins a sentence of its own."""
    return _sentences_of(paragraphs(markdown))


def _sentences_of(found: Iterable[str]) -> list[str]:
    split = [sentence for each in found for sentence in _SENTENCE_END.split(plain(each))]
    return [sentence for sentence in split if _WORD.search(sentence)]


def docstring_paragraphs(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring, without code, section titles and the names of arguments.

    Each list item and each entry of a section like ``Args:`` is a paragraph of its own.
    """
    lines: list[str] = []
    section = literal = False
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        stripped, indented = line.strip(), line.startswith(" ")
        if stripped and not indented:
            section, literal = bool(_SECTION.fullmatch(stripped)), False
        begins = _LIST_ITEM.match(stripped) or (section and _indent(line) == 4)
        if not stripped or begins or (section and not indented):
            if lines:
                yield " ".join(lines)
            literal = literal or bool(lines and lines[-1].endswith("::"))
            lines = []
        if stripped and not (section and not indented) and not literal and not stripped.startswith((">>>", "|")):
            lines.append((_ENTRY if section and begins else _LIST_ITEM).sub("", stripped, count=1))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def comment_paragraphs(source: str) -> Iterator[str]:
    """Yield the comments of a Python file. Lines of one comment are one paragraph; comments for tools are left out."""
    lines: list[str] = []
    last = (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _FOR_TOOLS.match(token.string):
            continue
        if lines and token.start != (last[0] + 1, last[1]):
            yield " ".join(lines)
            lines = []
        lines.append(token.string.lstrip("#: "))
        last = token.start
    if lines:
        yield " ".join(lines)


def python_sentences(source: str) -> list[str]:
    """Return the sentences of the docstrings and comments of a Python file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    docstrings = [text for node in nodes if (text := ast.get_docstring(node)) is not None]
    return _sentences_of([*comment_paragraphs(source), *itertools.chain(*map(docstring_paragraphs, docstrings))])


def measure(markdown: str) -> Prose:
    """Measure the prose of a page."""
    return _measured(sentences(markdown))


def measure_folder(folder: Path) -> Prose:
    """Measure the docstrings and comments of the Python files directly in a folder."""
    files = sorted(folder.glob("*.py"))
    return _measured([each for path in files for each in python_sentences(path.read_text(encoding="utf-8"))])


def _measured(found: Sequence[str]) -> Prose:
    lengths = sorted(len(_WORD.findall(sentence)) for sentence in found) or [0]
    words = sum(lengths)
    return Prose(
        words=words,
        sentences=len(found),
        mean=words / len(lengths),
        p90=lengths[math.ceil(0.9 * len(lengths)) - 1],
        longest=lengths[-1],
        semicolons=1000 * sum(sentence.count(";") for sentence in found) / max(words, 1),
        you=sum(bool(re.search(r"\byou(r|rs)?\b", each, re.IGNORECASE)) for each in found) / len(lengths),
    )


def missed(prose: Prose, *, guide: bool, aims: Aims = Aims()) -> list[str]:
    """Name each aim that a page misses, with the figure and the aim. Only a guide must say "you"."""
    checks = {
        f"mean {prose.mean:.1f} words, above {aims.mean:g}": prose.mean > aims.mean,
        f"p90 {prose.p90} words, above {aims.p90}": prose.p90 > aims.p90,
        f"longest {prose.longest} words, above {aims.longest}": prose.longest > aims.longest,
        f"{prose.semicolons:.1f} semicolons, above {aims.semicolons:g}": prose.semicolons > aims.semicolons,
        f"{prose.you:.0%} you, below {aims.you:.0%}": guide and prose.you < aims.you,
    }
    return [text for text, is_missed in checks.items() if is_missed]


def matching(patterns: Sequence[str]) -> list[Path]:
    """Return the pages below the root that match one of the patterns, sorted."""
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def folders_of(roots: Sequence[Path]) -> list[Path]:
    """Return each folder with Python files, from these roots down, sorted."""
    return sorted({path.parent for root in roots for path in root.rglob("*.py")})


def main(arguments: Sequence[str]) -> int:
    """Print the table of the given files or folders, by default of all. Return 1 if a held one misses an aim."""
    if arguments[:1] == ["--python"]:
        paths = folders_of([Path(each).resolve() for each in arguments[1:]] or [ROOT / each for each in PACKAGES])
        held, guides = matching(HELD_FOLDERS), []
    else:
        paths = [Path(each).resolve() for each in arguments] or matching(("*.md", "docs/**/*.md", "examples/*.md"))
        held, guides = matching(HELD), matching(GUIDES)
    print(f"{'page or folder':44} {'words':>6} {'mean':>5} {'p90':>4} {'max':>4} {'; /1000':>8} {'you':>5}")
    failed = False
    for path in paths:
        found = measure_folder(path) if path.is_dir() else measure(path.read_text(encoding="utf-8"))
        faults = missed(found, guide=path in guides) if path in held else []
        failed = failed or bool(faults)
        name = f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}{' *' if path in held else ''}"
        print(
            f"{name:44} {found.words:6,} {found.mean:5.1f} {found.p90:4} {found.longest:4} {found.semicolons:8.1f} "
            f"{found.you:5.0%}{''.join(f'  {fault}' for fault in faults)}"
        )
    print("* is held to the aims of tools/prose.py")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
