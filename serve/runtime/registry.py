"""Registries of extensible kinds, for example engines. Each entry is a file of a package or comes from outside.

An entry registers itself when its module is imported. The first read of a registry imports the modules of its package.
It also imports the modules that installed distributions name as entry points of the registry's group.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib import metadata
from typing import Generic, Protocol, TypeVar

from .errors import UserError, did_you_mean


class Named(Protocol):
    """An entry of a registry: anything with a name."""

    @property
    def name(self) -> str:
        """The name on the command line, in recipes and in reports."""
        ...


T = TypeVar("T", bound=Named)


def defined_at(code: object) -> str:
    """Return module and name of a function or class. Empty for partials, lambdas and others without a name."""
    name = getattr(code, "__qualname__", "")
    return f"{code.__module__}.{name}" if name and "<lambda>" not in name else ""


class Registry(Generic[T]):
    """The entries of one kind by name. After the first read, several threads may read it.

    Args:
        kind: the word for an entry in messages, for example ``pass``.
        package: the package with the project's own entries, or a single module.
        group: the entry-point group of foreign distributions. Each entry point names a module to import.
        may_lack: whether a module of the package may be skipped if a library that it imports is not installed.
    """

    def __init__(self, kind: str, package: str, group: str, *, may_lack: bool = False) -> None:
        self.kind = kind
        self._package = package
        self._group = group
        self._may_lack = may_lack
        self._left_out: dict[str, str] = {}
        self._entries: dict[str, T] = {}
        self._homes: dict[str, str] = {}
        self._read = False

    def register(self, entry: T, home: str = "") -> T:
        """Add an entry and return it.

        Args:
            entry: the entry.
            home: where it is defined, see `defined_at`. An entry from the same place is replaced: a notebook may run a
                cell again.

        Raises:
            ValueError: the name is taken.
        """
        if entry.name in self._entries and not (home and home == self._homes.get(entry.name)):
            raise ValueError(f"a {self.kind} named {entry.name!r} is registered already")
        self._entries[entry.name] = entry
        self._homes[entry.name] = home
        return entry

    def registered(self) -> tuple[T, ...]:
        """Return the entries registered so far, without a search for more."""
        return tuple(self._entries.values())

    def all(self) -> dict[str, T]:
        """Return every entry, sorted by name.

        Raises:
            UserError: a foreign distribution's module does not import.
        """
        if not self._read:
            package = importlib.import_module(self._package)
            own = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", ()))]
            for name in own:
                self._import(name)
            for point in metadata.entry_points(group=self._group):
                if point.module.rpartition(".")[2] in own:
                    continue  # in an archive, a foreign engine belongs to the package
                try:
                    importlib.import_module(point.module)
                except Exception as error:
                    raise UserError(
                        f"the {self.kind} {point.name!r} of {point.dist.name if point.dist else 'a distribution'} "
                        f"cannot be imported: {type(error).__name__}: {error}"
                    ) from error
            self._read = True
        return dict(sorted(self._entries.items()))

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(f"{self._package}.{name}")
        except ModuleNotFoundError as error:
            lacking = (error.name or "").partition(".")[0]
            if not self._may_lack or lacking == self._package.partition(".")[0]:
                raise
            self._left_out[name] = lacking

    def find(self, name: str) -> T:
        """Return the entry called ``name``.

        Raises:
            UserError: there is none. The message names the closest and lists all.
        """
        known = self.all()
        if name not in known:
            left_out = "".join(f"; {entry}.py needs {library}" for entry, library in self._left_out.items())
            raise UserError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}{left_out}"
            )
        return known[name]
