"""Which source files a result depends on: a module and what it imports, found by reading the imports.

Nothing is listed by hand, so that nothing can be forgotten when code moves or grows.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

#: The packages whose sources belong to the project; others are covered by their versions.
PROJECT = ("optimize", "serve")


def source_digest(*modules: str) -> str:
    """SHA-256 over the sources of ``modules`` and of everything of the project that they import, in turn.

    Imports inside functions count, those for type checkers only do not. A foreign module (a pass from another
    distribution) is read together with the modules of its own top-level package.

    Args:
        modules: importable names, such as ``optimize.passes.ptq``.

    Raises:
        ValueError: a module has no source file.
    """
    digest = hashlib.sha256()
    for name in sorted(closure(*modules)):
        digest.update(f"{name}\0".encode() + _source(name)[0] + b"\0")
    return digest.hexdigest()


def closure(*modules: str) -> frozenset[str]:
    """Names of ``modules``, and of the modules of the project and of their own packages that they import, in turn."""
    inside = {*PROJECT, *(name.partition(".")[0] for name in modules)}
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found or name.partition(".")[0] not in inside:
            continue
        found.add(name)
        waiting += _imports(name)
    return frozenset(found)


@functools.cache
def _source(name: str) -> tuple[bytes, bool]:
    """A module's source, and whether it is a package."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"the module {name} has no source file, so that changes to it could not be noticed")
    return Path(spec.origin).read_bytes(), spec.submodule_search_locations is not None


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
    """Absolute names of all modules that ``name`` imports when it is loaded or run."""
    source, is_package = _source(name)
    package = name if is_package else name.rpartition(".")[0]
    return tuple(entry for entry in imported_names(source, package) if _is_module(entry))


def imported_names(source: bytes, package: str) -> list[str]:
    """What a source imports when it is loaded or run: absolute names, of modules and of what is taken from them.

    Args:
        source: Python source.
        package: dotted name of the package that it lies in, which relative imports start from; may be empty.

    Raises:
        SyntaxError: it is no Python source.
        ImportError: a relative import leads out of the outermost package.
    """
    found: list[str] = []
    parts = package.split(".") if package else []
    for node in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(parts):
                raise ImportError(
                    f"line {node.lineno} imports from {node.level} packages up, and there are {len(parts)}"
                )
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    return list(dict.fromkeys(found))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without the blocks that only type checkers see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield from _walk(child)


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):  # a class of a module, a name that is computed
        return False
