"""The user's own model: ``path/to/file.py:factory`` or ``package.module:factory``, imported and called."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from optimize.models.neighbour_modules import (
    Neighbourhood,
    import_module,
    is_installed,
    of_file,
    of_module,
    owners_of,
    running,
)
from optimize.models.preprocessing import FALLBACK
from optimize.models.preprocessing_config import parse_preprocessing
from optimize.models.source import ModelSource
from serve.common.layout import expanded
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import CardError, UserError, did_you_mean, one_line


def user_source(reference: str) -> ModelSource:
    """Return a model of the user's own. Its module is executed, as it is meant to be.

    Raises:
        UserError: the file, module or factory does not exist, the module cannot be imported, or its ``PREPROCESSING``
            is not usable.
    """
    where, _, attribute = reference.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{reference}: must be path/to/file.py:FACTORY or package.module:FACTORY")
    neighbourhood = _neighbourhood(where)
    try:
        module = import_module(neighbourhood)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        raise UserError(f"{where}: cannot be imported: {one_line(error)}") from None
    factory = getattr(module, attribute, None)
    if not callable(factory):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        mine = [n for n in there if getattr(vars(module)[n], "__module__", None) == module.__name__]
        listed = ", ".join(sorted(mine or there)[:12]) or "nothing callable"
        raise UserError(
            f"{where}: has no function or class {attribute!r}{did_you_mean(attribute, mine)}; it has {listed}"
        )
    preprocessing, undeclared, declared_by = declared_preprocessing(module)
    return ModelSource(
        reference=reference,
        name=re.sub(r"[^A-Za-z0-9_.-]", "-", attribute),
        fingerprint=_fingerprint(neighbourhood),
        preprocessing=preprocessing,
        declared_by=declared_by,
        undeclared=undeclared,
        home=module,
        factory=functools.partial(_build, factory, neighbourhood),
    )


def _build(factory: Callable[..., Any], neighbourhood: Neighbourhood, num_classes: int, image_size: int | None) -> Any:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some builtins and C extensions have no signature
        parameters = MappingProxyType({})
    options: dict[str, Any] = {}
    # **kwargs mostly pass num_classes on to a library's builder, which would refuse image_size.
    if "num_classes" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        options["num_classes"] = num_classes
    if "image_size" in parameters and image_size is not None:
        options["image_size"] = image_size
    with running(neighbourhood):  # for imports inside functions
        return factory(**options)


def _neighbourhood(where: str) -> Neighbourhood:
    """Return the user's module, and what it imports of the user's own code."""
    is_file = where.endswith(".py") or "/" in where
    path = expanded(where)
    if is_file and not path.is_file():
        raise UserError(f"{path}: there is no such file; write your own model as path/to/file.py:FACTORY")
    if is_file and path.suffix != ".py":
        raise UserError(f"{path}: is not a Python file (its name must end in .py)")
    try:
        return of_file(path) if is_file else of_module(where)
    except ModuleNotFoundError:
        raise UserError(f"there is no Python module {where!r}; for a file, write path/to/file.py:FACTORY") from None
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None


def _fingerprint(neighbourhood: Neighbourhood) -> str:
    """Return the SHA-256 over its sources, with the version of the distribution if it is installed."""
    top = neighbourhood.name.partition(".")[0]
    if not is_installed(neighbourhood.file):
        return neighbourhood.fingerprint
    versions = [f"{owner}/{importlib.metadata.version(owner)}" for owner in owners_of(top)]
    return "/".join([*versions, neighbourhood.fingerprint])


def declared_preprocessing(module: ModuleType) -> tuple[Preprocessing | None, frozenset[str], str]:
    """Check ``PREPROCESSING = {"resize": 32, "crop": [32, 32], "mean": […], "std": […]}`` of a user's module.

    Returns:
        The preprocessing, the names of the parts that it leaves to the defaults, and its description.

    Raises:
        UserError: it is not usable. The message names the part.
    """
    declared = getattr(module, "PREPROCESSING", None)
    where = getattr(module, "__file__", None) or module.__name__
    called = f"your PREPROCESSING in {Path(where).name}"
    if declared is None:
        return None, frozenset(), called
    if not isinstance(declared, Mapping):
        raise UserError(f"{where}: PREPROCESSING must be a dict, it is a {type(declared).__name__}")
    config = parse_preprocessing(declared, f"{where}: PREPROCESSING[{{!r}}]")
    given = config.given()
    if absent := [name for name in ("resize", "crop") if name not in given]:
        raise UserError(f"{where}: PREPROCESSING lacks {absent[0]!r}")
    try:
        return Preprocessing(**{**FALLBACK, **given}), frozenset(FALLBACK) - given.keys(), called
    except CardError as error:  # one mean, and the three default stds
        raise UserError(f"{where}: PREPROCESSING is not usable: {error}") from None
