"""Finds the user's module and the neighbours that it imports, imports them, and hashes them together.

They are found without running code. Installed packages (site-packages, the standard library) are not read, and a
neighbour of the same name never hides them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from optimize.store.sources import PROJECT, imported_names, without_comments
from serve.runtime.card.card import sha256_file
from serve.runtime.errors import UserError

_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_INSTALLED = tuple(
    Path(path).resolve() for key in ("purelib", "platlib", "stdlib", "platstdlib") if (path := sysconfig.get_path(key))
)


@dataclass(frozen=True)
class Neighbourhood:
    """A user's module and what it imports of the user's own code, recursively.

    Attributes:
        name: the name that the module is imported by.
        files: file of each module by name, including the module's own.
        folders: where its absolute imports are searched for, after everything that is installed.
        alias: name and folder of a package that is created for its relative imports, if the folder is not a package or
            an installed one has its name. None if it is not needed.
    """

    name: str
    files: Mapping[str, Path]
    folders: tuple[Path, ...] = ()
    alias: tuple[str, Path] | None = None

    @property
    def file(self) -> Path:
        """Return the module's own file."""
        return self.files[self.name]

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 over the code without comments, and the names that it is imported by, in any folder.

        It also covers the versions of the installed packages that it imports.
        """
        digest = hashlib.sha256()
        for top in self._foreign():
            if version := version_of(top):
                digest.update(f"{top} {version}\0".encode())
        private = self.alias[0] if self.alias else ""  # contains the path
        for name, path in sorted(self.files.items()):
            public = "" if name == self.name else name.removeprefix(private)
            digest.update(f"{public}\0{_code_digest(path)}\0".encode())
        return digest.hexdigest()

    def _foreign(self) -> list[str]:
        """Return the top-level names of its imports that are not its own, Python's or this project's."""
        found: set[str] = set()
        for name, path in self.files.items():
            with contextlib.suppress(ImportError):  # importing it will report the error
                found |= {entry.partition(".")[0] for entry in _imports(name, path)}
        return sorted(found - self.tops - sys.stdlib_module_names - {*PROJECT})

    @property
    def tops(self) -> set[str]:
        """The first parts of the modules' names."""
        return {name.partition(".")[0] for name in self.files}

    def new(self, before: set[str]) -> list[str]:
        """Return the modules of these packages that were imported since ``sys.modules`` had the names ``before``."""
        tops = self.tops
        return [name for name in sys.modules if name not in before and name.partition(".")[0] in tops]

    def contents(self) -> dict[str, tuple[Path, str]]:
        """Return file and SHA-256 of each module at present."""
        return {name: (path, sha256_file(path)) for name, path in self.files.items()}


def of_file(path: Path) -> Neighbourhood:
    """Return the neighbourhood of a file, in the package that contains it.

    Its package is found by the ``__init__.py`` above it, and further up by its relative imports. Absolute imports are
    searched for where Python does, then in its folder and in each folder above.

    Raises:
        OSError: a file cannot be read.
    """
    path = path.resolve()
    importlib.invalidate_caches()
    depth = next(n for n, folder in enumerate(path.parents) if not (folder / "__init__.py").is_file())
    for levels in range(depth, len(path.parents)):
        with contextlib.suppress(ImportError):  # a relative import leads further up
            return _in_package(path, levels) if levels else _alone(path)
    return Neighbourhood(_private(path), {_private(path): path})  # importing it will report the error


def of_module(name: str) -> Neighbourhood:
    """Return the neighbourhood of a module that Python itself finds. For an installed one it is only its own file.

    Raises:
        ModuleNotFoundError: the module does not exist, or has no file.
        OSError: a file cannot be read.
    """
    importlib.invalidate_caches()
    files = _located(name, found_in(name.partition(".")[0]))
    if name not in files:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if not is_installed(files[name]):
        files, _ = _followed(files, {}, ())
    else:
        files = {name: files[name]}
    return Neighbourhood(name, files)


def import_module(neighbourhood: Neighbourhood) -> ModuleType:
    """Import the module, again if it or one of its neighbours has changed since its last import here.

    Raises:
        Exception: any exception of the module.
    """
    now = neighbourhood.contents()
    if any(_imported.get(name, content) != content for name, content in now.items()):
        for name in [name for name in _imported if name.partition(".")[0] in neighbourhood.tops]:
            sys.modules.pop(name, None)
            del _imported[name]
    if neighbourhood.name in _imported and neighbourhood.name in sys.modules:
        return sys.modules[neighbourhood.name]
    before = set(sys.modules)
    try:
        with running(neighbourhood):
            return _import(neighbourhood)
    except BaseException:
        for name in neighbourhood.new(before):
            del sys.modules[name]
            _imported.pop(name, None)
        raise


#: Modules imported here, with their file and its SHA-256 (None for a package without a file).
_imported: dict[str, tuple[Path, str] | None] = {}


@contextlib.contextmanager
def running(neighbourhood: Neighbourhood) -> Iterator[None]:
    """Let imports find the neighbours, after everything else, and record which of them are imported.

    No compiled files are written beside them. Python matches these by the source's size and the second of its change,
    so that a file changed again within that second would run in its old version.
    """
    importlib.invalidate_caches()
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    added = [str(folder) for folder in neighbourhood.folders]
    before = set(sys.modules)
    sys.path += added
    try:
        yield
    finally:
        sys.dont_write_bytecode = kept
        for folder in reversed(added):
            for position in range(len(sys.path) - 1, -1, -1):  # the last one is ours
                if sys.path[position] == folder:
                    del sys.path[position]
                    break
        if new := neighbourhood.new(before):
            contents = neighbourhood.contents()
            _imported.update((name, contents.get(name)) for name in new)


def _import(neighbourhood: Neighbourhood) -> ModuleType:
    if neighbourhood.alias is not None:
        name, folder = neighbourhood.alias
        if name not in sys.modules:
            _execute(name, folder / "__init__.py", folder)
    if neighbourhood.alias is not None or not _is_private(neighbourhood.name):
        return importlib.import_module(neighbourhood.name)
    return _execute(neighbourhood.name, neighbourhood.file, None)


def _execute(name: str, path: Path, folder: Path | None) -> ModuleType:
    """Execute a module of that name from that file, or a package of ``folder``, whose file may be missing."""
    locations = [str(folder)] if folder is not None else None
    if folder is not None and not path.is_file():
        spec: importlib.machinery.ModuleSpec | None = importlib.machinery.ModuleSpec(name, None, is_package=True)
        assert spec is not None
        spec.submodule_search_locations = locations
    else:
        spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=locations)
    if spec is None:
        raise UserError(f"{path}: is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)
    return module


def _code_digest(path: Path) -> str:
    """Return the SHA-256 of a Python source without its comments, or of another file's bytes.

    A comment must not cause another training.
    """
    content = path.read_bytes()
    if path.suffix == ".py":
        with contextlib.suppress(SyntaxError, tokenize.TokenError, ValueError):  # importing it will report the error
            content = without_comments(content)
    return hashlib.sha256(content).hexdigest()


def _private(path: Path) -> str:
    """Return a unique module name that depends only on the path."""
    stem = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)
    return f"optimize_user_{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _is_private(name: str) -> bool:
    return name.startswith("optimize_user_")


def _alone(path: Path) -> Neighbourhood:
    """Return the neighbourhood of a file that is in no package and has no relative imports."""
    name = _private(path)
    files, folders = _followed({name: path}, {}, path.parents)
    return Neighbourhood(name, files, tuple(dict.fromkeys([path.parent, *folders])))


def _in_package(path: Path, levels: int) -> Neighbourhood:
    """Return the neighbourhood of a file whose outermost package is the folder ``levels`` above it."""
    top = path.parents[levels - 1]
    inner = [folder.name for folder in reversed(path.parents[: levels - 1])]
    places = found_in(top.name)
    free = (not places or top in places) and not any("." in part for part in (top.name, *inner))
    alias = None if free and (top / "__init__.py").is_file() else (_private(top), top)
    outermost = alias[0] if alias else top.name
    name = ".".join([outermost, *inner, *([path.stem] if path.stem != "__init__" else [])])
    files, folders = _followed(_located(name, [top]) | {name: path}, {outermost: top}, path.parents)
    return Neighbourhood(name, files, tuple(dict.fromkeys([*([] if alias else [top.parent]), *folders])), alias)


def _followed(
    files: Mapping[str, Path], known: Mapping[str, Path], search: Sequence[Path]
) -> tuple[dict[str, Path], list[Path]]:
    """Follow the imports of ``files`` that are not installed, recursively. Also returns the used folders of ``search``.

    Args:
        files: modules by name.
        known: outermost packages with a known folder.
        search: folders to search for what Python does not find, the nearest first.

    Raises:
        ImportError: a relative import leads out of the outermost package.
    """
    found, folders, waiting = dict(files), list[Path](), list(files)
    while waiting:
        name = waiting.pop()
        for entry in _imports(name, found[name]):
            top = entry.partition(".")[0]
            if top in sys.stdlib_module_names or top in PROJECT:
                continue
            places = [known[top]] if top in known else found_in(top)
            new = _located(entry, places) if not any(map(is_installed, places)) else {}
            if not places:
                for folder in search:
                    if new := _located(entry, _beside(folder, top)):
                        folders.append(folder)
                        break
            waiting += [module for module in new if module not in found]
            found = new | found
    return found, folders


def _imports(name: str, path: Path) -> list[str]:
    """Return the imports of a module.

    Raises:
        ImportError: a relative import leads out of the outermost package.
    """
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    try:
        return imported_names(path.read_bytes(), package) if path.suffix == ".py" else []
    except (SyntaxError, ValueError):  # importing it will report the error
        return []


@functools.cache
def version_of(top: str) -> str:
    """Return the versions of the distributions of a top-level module. Empty if there are none."""
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return " ".join(importlib.metadata.version(owner) for owner in owners_of(top))


def owners_of(top: str) -> list[str]:
    """Return the installed distributions of a top-level module."""
    return sorted(set(_distributions().get(top, ())))


_distributions = functools.cache(importlib.metadata.packages_distributions)  # reads the files of all distributions


def found_in(top: str) -> list[Path]:
    """Return where Python finds the outermost module ``top``: its file, or the package's folders. May be empty."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(top, None)
        except (AttributeError, ImportError, ValueError):
            continue
        if spec is not None:
            if spec.submodule_search_locations is not None:
                return [Path(folder).resolve() for folder in spec.submodule_search_locations]
            # A built-in module has no file, and counts as installed.
            return [Path(spec.origin).resolve()] if spec.has_location and spec.origin else [_INSTALLED[0]]
    return []


def _beside(folder: Path, name: str) -> list[Path]:
    """Return the package or file called ``name`` in ``folder``."""
    inside = folder / name
    if inside.is_dir():
        return [inside]
    return [path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()][:1]


def _located(name: str, places: Sequence[Path]) -> dict[str, Path]:
    """Return the files that run when ``name`` is imported: its packages' and its own.

    ``places`` are those of its first part.
    """
    found: dict[str, Path] = {}
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        here = [path for place in places if place.is_dir() for path in _beside(place, "__init__")]
        inside = [place for place in places if place.is_dir()]
        for path in (*here, *(place for place in places if place.is_file())):
            found.setdefault(".".join(parts[:count]), path)
        if count < len(parts):
            places = [path for place in inside for path in _beside(place, parts[count])]
    return found


def is_installed(path: Path) -> bool:
    """Return whether a file belongs to the standard library or to an installed distribution rather than to the user."""
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(map(path.is_relative_to, _INSTALLED))
