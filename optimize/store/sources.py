"""Which source files a result depends on: a module and what it imports, found by reading the imports.

Nothing is listed by hand, so that nothing can be forgotten when code moves or grows. Comments and blank
lines do not count: a remark must not cost a training. Everything else does, docstrings and layout included.
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

#: The packages whose sources belong to the project; others are covered by their versions.
PROJECT = ("optimize", "serve")


def code_of(*makers: Callable[..., Any]) -> str:
    """`source_digest` of the modules in which functions or classes are defined: those that make a result."""
    return source_digest(*(maker.__module__ for maker in makers))


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
        digest.update(f"{name}\0{_facts(name).digest}\0".encode())
    _CACHE.save()
    return digest.hexdigest()


def closure(*modules: str) -> frozenset[str]:
    """Names of ``modules``, and of the modules of the project and of their own packages that they import, in turn.

    A module that keeps a ``Registry`` imports all modules of the registry's package, though no import says so:
    whoever reads the registry may get any of them. One of those modules itself does not thereby import the others.
    """
    inside = {*PROJECT, *(name.partition(".")[0] for name in modules)}
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found or name.partition(".")[0] not in inside:
            continue
        found.add(name)
        package = name.rpartition(".")[0]
        if "." in package:  # it is run too; what the top of a distribution exports changes no result
            waiting.append(package)
        facts = _facts(name)
        waiting += [entry for entry in facts.imports if entry.partition(".")[0] in inside and _found(entry) is not None]
        for room in facts.registries:
            if not any(root.startswith(f"{room}.") for root in modules):
                waiting += _members(room)
    return frozenset(found)


@functools.cache
def _source(name: str) -> tuple[bytes, bool]:
    """A module's source, and whether it is a package."""
    spec = _found(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"the module {name} has no source file, so that changes to it could not be noticed")
    return Path(spec.origin).read_bytes(), spec.submodule_search_locations is not None


@functools.cache
def without_comments(source: bytes) -> bytes:
    """Python source without comments and without the blank lines between statements; strings stay as they are.

    Raises:
        SyntaxError: it is no Python source.
        tokenize.TokenError: it ends within a statement.
        ValueError: it is not in the encoding that it states, which is UTF-8 where it states none.
    """
    source = source.replace(b"\r\n", b"\n").replace(b"\r", b"\n")  # as Python reads it
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    # Not splitlines: a form feed ends a line for it, and none for the tokenizer that counts them.
    lines = source.decode(encoding).removesuffix("\n").split("\n")
    blank = set()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type == tokenize.NL and not lines[row - 1].strip():
            blank.add(row)  # a blank line within a string is no token of its own
    return "\n".join(line for row, line in enumerate(lines, start=1) if row not in blank).encode()


@dataclass(frozen=True)
class _Facts:
    """What a module's source says.

    Attributes:
        digest: SHA-256 of the source without comments.
        imports: absolute names of what it imports when it is loaded or run.
        registries: packages that its registries are made for.
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
    """The packages that a module's registries are made for: strings, or its own ``__name__`` or ``__package__``."""
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
    """All modules of a package; a module that is none has no others."""
    spec = _found(package)
    assert spec is not None
    return tuple(f"{package}.{entry.name}" for entry in pkgutil.iter_modules(spec.submodule_search_locations or ()))


def imported_names(source: bytes, package: str) -> list[str]:
    """What a source imports when it is loaded or run: absolute names, of modules and of what is taken from them.

    Args:
        source: Python source.
        package: dotted name of the package that it lies in, which relative imports start from; may be empty.

    Raises:
        SyntaxError: it is no Python source.
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
    """As `ast.walk`, in the order of the source and without the blocks that only type checkers see."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        children: list[ast.AST] = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and _is_for_type_checkers(child.test):
                children += child.orelse
            else:
                children.append(child)
        waiting += reversed(children)


def _is_for_type_checkers(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _called(node: ast.expr) -> str:
    """The last part of a name: ``Registry`` of ``registry.Registry[Target]``; empty of any other expression."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@functools.cache
def _found(name: str) -> ModuleSpec | None:
    """Where a module lies; None: there is none, as of a class in a module.

    Nothing is imported for it: `importlib.util.find_spec` imports all that the name lies in, be it matplotlib.
    """
    package, _, last = name.rpartition(".")
    try:
        if not package:
            return importlib.util.find_spec(last)
        above = _found(package)
        if above is None or above.submodule_search_locations is None:
            return None
        return PathFinder.find_spec(name, above.submodule_search_locations)
    except (ImportError, ValueError):  # a name that is computed; a module without a spec
        return None
