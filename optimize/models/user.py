"""The user's own model: ``path/to/file.py:factory`` or ``package.module:factory``, imported and asked."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from optimize.models.preprocessing import FALLBACK, parse_preprocessing
from optimize.models.source import ModelSource
from serve.runtime.card import Preprocessing, sha256_file
from serve.runtime.errors import CardError, UserError, did_you_mean, one_line


def user_source(reference: str) -> ModelSource:
    """A model of the user's own; its module is executed, which is what it is for.

    Raises:
        UserError: there is no such file, module or factory, the module does not import, or its ``PREPROCESSING`` is
            not usable.
    """
    where, _, attribute = reference.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{reference}: must be path/to/file.py:FACTORY or package.module:FACTORY")
    is_file = where.endswith(".py") or "/" in where
    module = _module_from_file(Path(where).expanduser()) if is_file else _module_by_name(where)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        mine = [n for n in there if getattr(vars(module)[n], "__module__", None) == module.__name__]
        listed = ", ".join(sorted(mine or there)[:12]) or "nothing that can be called"
        raise UserError(
            f"{where}: has no function or class {attribute!r}{did_you_mean(attribute, mine)}; it has {listed}"
        )
    source = getattr(module, "__file__", None)
    if not source:
        raise UserError(f"{where}: is a module without a source file, so that changes to it could not be noticed")
    preprocessing, undeclared = _declared(getattr(module, "PREPROCESSING", None), where)
    return ModelSource(
        reference=reference,
        name=re.sub(r"[^A-Za-z0-9_.-]", "-", attribute),
        fingerprint=sha256_file(Path(source)),
        preprocessing=preprocessing,
        declared_by=f"your PREPROCESSING in {Path(source).name}",
        undeclared=undeclared,
        factory=functools.partial(_build, factory),
    )


def _build(factory: Callable[..., Any], num_classes: int, image_size: int | None) -> Any:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some builtins and C extensions have no signature
        return factory()
    options: dict[str, Any] = {}
    # **kwargs mostly hand num_classes on to a library's builder, which would refuse image_size.
    if "num_classes" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        options["num_classes"] = num_classes
    if "image_size" in parameters and image_size is not None:
        options["image_size"] = image_size
    return factory(**options)


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; a model of your own is path/to/file.py:FACTORY")
    path = path.resolve()
    try:
        digest = sha256_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    name = f"optimize_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    present = sys.modules.get(name)
    if present is not None and getattr(present, "__source_sha256__", None) == digest:
        return present
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Neighbours can be imported as if the file were run as a script, but never hide an installed package.
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        del sys.modules[name]
        raise UserError(f"{path}: does not import: {one_line(error)}") from None
    finally:
        sys.path.remove(str(path.parent))
    module.__dict__["__source_sha256__"] = digest
    return module


def _module_by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UserError(f"there is no Python module {name!r}; for a file, write path/to/file.py:FACTORY") from None
        raise UserError(f"{name}: does not import: {one_line(error)}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        raise UserError(f"{name}: does not import: {one_line(error)}") from None


def _declared(declared: object, where: str) -> tuple[Preprocessing | None, frozenset[str]]:
    """A user module's ``PREPROCESSING = {"resize": 32, "crop": [32, 32], "mean": […], "std": […]}``, checked.

    Returns:
        It, and the names of the parts that it leaves to the defaults.
    """
    if declared is None:
        return None, frozenset()
    if not isinstance(declared, Mapping):
        raise UserError(f"{where}: PREPROCESSING must be a dict, it is a {type(declared).__name__}")
    config = parse_preprocessing(declared, f"{where}: PREPROCESSING[{{!r}}]")
    given = config.given()
    if absent := [name for name in ("resize", "crop") if name not in given]:
        raise UserError(f"{where}: PREPROCESSING lacks {absent[0]!r}")
    try:
        return Preprocessing(**{**FALLBACK, **given}), frozenset(FALLBACK) - given.keys()
    except CardError as error:  # one mean, and the three default stds
        raise UserError(f"{where}: PREPROCESSING is not usable: {error}") from None
