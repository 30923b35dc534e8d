"""Measures the shape of the code: folders, files, importers, shared names, and how the documents read.

``python -m tools.house [REVISION …]`` prints a table with one column for each git revision and one for the files as
they are now. Use it before and after a change of the house.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import median_low as median

from tools.prose import measure

ROOT = Path(__file__).parents[1]
PACKAGES = ("optimize", "serve")

#: Folders of plug-ins, in which a file is found by being there. They may be long, and name files as other folders do.
REGISTRIES = (
    "optimize/passes",
    "optimize/data/formats",
    "optimize/lint/rules",
    "optimize/profiling/readers",
    "serve/export",
    "serve/runtime/decoders",
    "serve/runtime/engines",
    "serve/runtime/tasks",
    "optimize/tasks",
)

#: Names that may come as often as they like.
COMMON_NAMES = ("__init__", "__main__", "base")


def modules(root: Path) -> dict[str, Path]:
    """Return the packages' modules by their dotted names."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def imported(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the known modules that a module imports anywhere in its code."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            found |= {full if (full := f"{origin}.{alias.name}") in known else origin for alias in node.names}
    return found & known.keys() - {name}


def lines(paths: Sequence[Path]) -> int:
    """Count the lines of some files."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def figures(root: Path) -> dict[str, str]:
    """Measure one tree of the repository.

    Returns:
        Each figure as text, by what it is a figure of.
    """
    known = modules(root)
    importers = Counter(other for name, path in known.items() for other in imported(name, path, known))
    files = Counter(path.parent.relative_to(root).as_posix() for path in known.values())
    plain = {folder: count for folder, count in files.items() if folder not in REGISTRIES}
    named = [path for path in known.values() if path.parent.relative_to(root).as_posix() in plain]
    largest = max(plain, key=lambda folder: plain[folder])
    names = Counter(path.stem for path in named if path.stem not in COMMON_NAMES)
    shared = [count for count in names.values() if count > 2]
    tests = sorted((root / "tests").rglob("*.py"))
    documents = "\n\n".join(
        path.read_text(encoding="utf-8") for path in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
    )
    prose = measure(documents)
    return {
        "folders": f"{len(files):,}",
        "files in a folder, median and most": f"{median(files.values())}, {files[largest]} ({largest})",
        "folders of more than 20 files, registries apart": f"{sum(count > 20 for count in plain.values())}",
        "modules": f"{len(known):,}",
        "modules with one importer": f"{sum(count == 1 for count in importers.values())}",
        "names that more than two modules share": f"{len(shared)}, by {sum(shared)} modules",
        "lines of code": f"{lines([*known.values()]):,}",
        "lines of tests": f"{lines(tests):,}",
        "words of README": f"{len((root / 'README.md').read_text(encoding='utf-8').split()):,}",
        "words of all documents": f"{prose.words:,}",
        "words in a sentence, mean and 90th percentile": f"{prose.mean:.1f}, {prose.p90}",
        "semicolons in 1,000 words": f"{prose.semicolons:.1f}",
        "sentences with you": f"{prose.you:.0%}",
    }


def at_revision(revision: str) -> dict[str, str]:
    """Measure the tree of a git revision.

    Raises:
        subprocess.CalledProcessError: git knows no such revision.
    """
    archive = subprocess.run(["git", "-C", ROOT, "archive", revision], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
        return figures(Path(folder))


def main(revisions: Sequence[str]) -> int:
    """Print the figures of each revision, and of the files as they are, as a Markdown table."""
    columns = {revision: at_revision(revision) for revision in revisions} | {"now": figures(ROOT)}
    print(f"| | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for figure in columns["now"]:
        print(f"| {figure} | {' | '.join(column[figure] for column in columns.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
