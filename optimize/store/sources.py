"""Finds the source files that a result depends on: a module and everything that it imports.

The imports are read from the source, so no list by hand can become outdated when code moves or grows. Comments and
blank lines do not count, because a remark must not cause another training. Everything else counts, including docstrings
and layout.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import pkgutil
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from optimize.store.source_cache import SourceCache

#: The packages of the project. Other packages are covered by their versions.
PROJECT = ("optimize", "serve")


def code_of(*makers: Callable[..., Any]) -> str:
    """Return `source_digest` of the modules that define the given functions or classes."""
    return source_digest(*(maker.__module__ for maker in makers))


def source_digest(*modules: str) -> str:
    """Return the SHA-256 over the sources of ``modules`` and of all project modules that they import, recursively.

    Imports inside functions count. Imports for type checkers alone do not. A module of another distribution (a pass,
    for instance) is read with the modules of its own top-level package.

    Args:
        modules: importable names, such as ``optimize.passes.ptq``.

    Raises:
        ValueError: a module has no source file.
    """
    digest = hashlib.sha256()
    for name in sorted(closure(*modules)):
        digest.update(f"{name}\0{_facts(name).digest}\0".encode())
    _CACHE.save()
    return digest.hexdigest()


def closure(*modules: str) -> frozenset[str]:
    """Return the names of ``modules`` and of all modules that they import, recursively.

    Only modules of the project and of the packages of ``modules`` count. A module with a ``Registry`` counts as
    importing all modules of the registry's package, although no import says so, because a reader of the registry may
    get any of them. A module in that package does not thereby import its neighbours.
    """
    inside = {*PROJECT, *(name.partition(".")[0] for name in modules)}
    found: set[str] = set()
    pending = list(modules)
    while pending:
        name = pending.pop()
        if name in found or name.partition(".")[0] not in inside:
            continue
        found.add(name)
        package = name.rpartition(".")[0]
        if "." in package:  # the package runs too; the exports of a distribution's top package change no result
            pending.append(package)
        facts = _facts(name)
        pending += [entry for entry in facts.imports if entry.partition(".")[0] in inside and _found(entry) is not None]
        for room in facts.registries:
            if not any(root.startswith(f"{room}.") for root in modules):
                pending += _members(room)
    return frozenset(found)


@functools.cache
def _source(name: str) -> tuple[bytes, bool]:
    """Return a module's source, and whether it is a package."""
    spec = _found(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"the module {name} has no source file, so changes to it could not be noticed")
    return Path(spec.origin).read_bytes(), spec.submodule_search_locations is not None


@functools.cache
def without_comments(source: bytes) -> bytes:
    """Return Python source without comments and without blank lines between statements. Strings are not changed.

    Raises:
        SyntaxError: it is not Python source.
        tokenize.TokenError: it ends within a statement.
        ValueError: its encoding is not the one that it states (UTF-8 by default).
    """
    source = source.replace(b"\r\n", b"\n").replace(b"\r", b"\n")  # as Python reads it
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    # Not splitlines: it ends a line at a form feed, where the tokenizer that counts lines does not.
    lines = source.decode(encoding).removesuffix("\n").split("\n")
    blank = set()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type == tokenize.NL and not lines[row - 1].strip():
            blank.add(row)  # a blank line within a string is not a token of its own
    return "\n".join(line for row, line in enumerate(lines, start=1) if row not in blank).encode()


@dataclass(frozen=True)
class _Facts:
    """Facts about a module's source.

    Attributes:
        digest: SHA-256 of the source without comments.
        imports: absolute names of all that it imports when it is loaded or run.
        registries: packages of its registries.
    """

    digest: str
    imports: tuple[str, ...]
    registries: tuple[str, ...]


_CACHE = SourceCache(Path(__file__).read_bytes())


@functools.cache
def _facts(name: str) -> _Facts:
    source, is_package = _source(name)
    found = _CACHE.fact((name.encode(), bytes([is_package]), source), lambda: _read(name, source, is_package))
    return _Facts(found["digest"], tuple(found["imports"]), tuple(found["registries"]))


def _read(name: str, source: bytes, is_package: bool) -> dict[str, Any]:
    package = name if is_package else name.rpartition(".")[0]
    nodes = list(_walk(ast.parse(source)))
    return {
        "digest": hashlib.sha256(without_comments(source)).hexdigest(),
        "imports": _imported(nodes, package),
        "registries": list(_registered_packages(nodes, name, package)),
    }


def _registered_packages(nodes: Iterable[ast.AST], name: str, package: str) -> Iterator[str]:
    """Yield the packages of a module's registries: strings, or its own ``__name__`` or ``__package__``."""
    for node in nodes:
        if not isinstance(node, ast.Call) or _called(node.func) != "Registry":
            continue
        for value in [keyword.value for keyword in node.keywords if keyword.arg == "package"] or node.args[1:2]:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value
            elif isinstance(value, ast.Name) and value.id in ("__name__", "__package__"):
                yield name if value.id == "__name__" else package
            else:
                raise ValueError(f"{name}: the package of a Registry must be a string, __name__ or __package__")


@functools.cache
def _members(package: str) -> tuple[str, ...]:
    """Return all modules of a package. Empty for a module that is not a package."""
    spec = _found(package)
    assert spec is not None
    return tuple(f"{package}.{entry.name}" for entry in pkgutil.iter_modules(spec.submodule_search_locations or ()))


def imported_names(source: bytes, package: str) -> list[str]:
    """Return the absolute names that a source imports when it is loaded or run: modules and the names taken from them.

    Args:
        source: Python source.
        package: dotted name of the source's package, at which relative imports start. It may be empty.

    Raises:
        SyntaxError: it is not Python source.
        ImportError: a relative import leads out of the outermost package.
    """
    return _imported(_walk(ast.parse(source)), package)


def _imported(nodes: Iterable[ast.AST], package: str) -> list[str]:
    found: list[str] = []
    parts = package.split(".") if package else []
    for node in nodes:
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
    """Walk as `ast.walk` does, in source order and without the blocks for type checkers."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        children: list[ast.AST] = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and _is_for_type_checkers(child.test):
                children += child.orelse
            else:
                children.append(child)
        pending += reversed(children)


def _is_for_type_checkers(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _called(node: ast.expr) -> str:
    """Return the last part of a name: ``Registry`` for ``registry.Registry[Target]``, empty for other expressions."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@functools.cache
def _found(name: str) -> ModuleSpec | None:
    """Find a module's spec. None if there is no such module, for instance for the name of a class.

    Nothing that could be large is imported: `importlib.util.find_spec` would import all parent packages, for instance
    matplotlib.
    """
    package, _, last = name.rpartition(".")
    try:
        if not package:
            return importlib.util.find_spec(last)
        above = _found(package)
        if above is None or above.submodule_search_locations is None:
            return None
        return PathFinder.find_spec(name, above.submodule_search_locations)
    except (ImportError, ValueError):  # a computed name, or a module without a spec
        return None
