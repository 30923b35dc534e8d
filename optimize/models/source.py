"""A name → something that builds a fresh ``nn.Module``: torchvision's classifiers, or the user's own code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torchvision
from torch import nn

from serve.runtime.card import Preprocessing, sha256_file
from serve.runtime.errors import CardError, UserError, did_you_mean, one_line


@dataclass(frozen=True)
class ModelSource:
    """Where a model's architecture comes from, and what it says about its input.

    Attributes:
        reference: what the user wrote.
        name: short name, safe for folders and TorchServe: ``resnet18``; the factory's for user code.
        fingerprint: ``torchvision/<version>/<name>``, or the SHA-256 of the user's source file. Modules
            that this file imports in turn are not covered.
        preprocessing: what the model declares: torchvision's default weights' transforms, or the user
            module's ``PREPROCESSING``; None if the user declares nothing.
        min_size: smallest side of the input in pixels that the network can take.
        size_multiple: the side must be a multiple of this (a ViT's patch).
        origin: ``torchvision`` or ``user``.
        factory: what `build` calls.
    """

    reference: str
    name: str
    fingerprint: str
    preprocessing: Preprocessing | None
    min_size: int = 1
    size_multiple: int = 1
    origin: Literal["torchvision", "user"] = "user"
    factory: Callable[..., Any] = field(default=nn.Identity, repr=False, compare=False)

    def build(self, num_classes: int, image_size: int | None = None) -> nn.Module:
        """Build the module, randomly initialised, with ``num_classes`` outputs.

        ``num_classes`` and ``image_size`` (pixels, for networks that are built for one size) are passed
        only if the factory takes them.

        Raises:
            UserError: the size is illegal, the factory raises, or what it returns is not an ``nn.Module``.
        """
        if image_size is not None:
            self.check_size(image_size)
        options = self._torchvision_options if self.origin == "torchvision" else self._user_options
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = self.factory(**options(num_classes, image_size))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            raise UserError(f"{self.reference}: building the model failed: {one_line(error)}") from None
        if not isinstance(model, nn.Module):
            raise UserError(f"{self.reference}: must return a torch.nn.Module, it returned {type(model).__name__}")
        return model

    def check_size(self, size: int) -> None:
        """Refuse a side of the input that the network cannot take, naming the nearest that it can.

        Raises:
            UserError: ``size`` is below ``min_size`` or no multiple of ``size_multiple``.
        """
        if size < self.min_size or size % self.size_multiple:
            step = self.size_multiple
            below = size // step * step
            legal = sorted({self.legal_size(size), below if below >= self.min_size else self.legal_size(size)})
            rule = f"a multiple of {step}, " if step > 1 else ""
            raise UserError(
                f"{self.name} cannot take images of {size}x{size} pixels: the side must be {rule}"
                f"at least {self.legal_size(self.min_size)}; the nearest is {' or '.join(map(str, legal))}"
            )

    def legal_size(self, at_least: int) -> int:
        """The smallest legal side of at least ``at_least`` pixels."""
        step = self.size_multiple
        return -(-max(at_least, self.min_size) // step) * step

    def _torchvision_options(self, num_classes: int, image_size: int | None) -> dict[str, Any]:
        options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
        if self.name in ("googlenet", "inception_v3"):
            # Auxiliary heads would make the training forward a tuple. torchvision's own weights were
            # trained on inputs in [-1, 1]: their builder sets transform_input, which changes ImageNet's
            # normalisation into that one, and so must we or such a checkpoint loses accuracy silently.
            # Their own initialisation takes 5 s (truncated normals) and is on its way out upstream.
            options |= {"aux_logits": False, "init_weights": False, "transform_input": True}
        if image_size is not None and self.name.startswith("vit_"):
            options["image_size"] = image_size
        if image_size is not None and self.name.startswith("maxvit"):
            options["input_size"] = (image_size, image_size)
        return options

    def _user_options(self, num_classes: int, image_size: int | None) -> dict[str, Any]:
        try:
            parameters = inspect.signature(self.factory).parameters
        except (TypeError, ValueError):  # some builtins and C extensions have no signature
            return {}
        options: dict[str, Any] = {}
        # **kwargs mostly hand num_classes on to a library's builder, which would refuse image_size.
        if "num_classes" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            options["num_classes"] = num_classes
        if "image_size" in parameters and image_size is not None:
            options["image_size"] = image_size
        return options


def resolve_model(reference: str) -> ModelSource:
    """Find a model by a torchvision name, ``path/to/file.py:factory`` or ``package.module:factory``.

    The user's module is executed, which is what it is for; from a file it is registered in
    ``sys.modules`` under a name that depends only on its path.

    Raises:
        UserError: there is no such model (the nearest names are suggested), file, module or factory, or
            the user's module does not import.
    """
    if ":" in reference:
        return _user_source(reference)
    if reference.endswith(".py"):
        raise UserError(f"{reference}: say which function builds the model: {reference}:FACTORY")
    return _torchvision_source(reference)


def _torchvision_source(name: str) -> ModelSource:
    models = torchvision.models
    known = models.list_models(module=models)
    if name not in known:
        if name in models.list_models():
            raise UserError(f"{name} is a torchvision model, but not an image classifier of floating-point kind")
        raise UserError(
            f"there is no torchvision classifier {name!r}{did_you_mean(name, known)}; "
            "your own model is path/to/file.py:FACTORY or package.module:FACTORY"
        )
    weights = models.get_model_weights(name).DEFAULT
    min_size, multiple = max(weights.meta.get("min_size", (1, 1))), 1
    # What torchvision gives as min_size for these is the size of training, not what the network needs.
    if name.startswith("vit_"):
        min_size = multiple = int(name.rpartition("_")[2])
    elif name.startswith("swin"):
        min_size = 32  # five halvings of the side; windows are padded
    elif name.startswith("maxvit"):
        min_size = multiple = 224  # windows of 7 after five halvings, and no padding
    presets = weights.transforms()
    declared = Preprocessing(
        resize=presets.resize_size[0],
        crop=(presets.crop_size[0], presets.crop_size[0]),
        mean=tuple(presets.mean),
        std=tuple(presets.std),
        interpolation=presets.interpolation.value,
    )
    return ModelSource(
        reference=name,
        name=name,
        fingerprint=f"torchvision/{torchvision.__version__}/{name}",
        preprocessing=declared,
        min_size=min_size,
        size_multiple=multiple,
        origin="torchvision",
        factory=models.get_model_builder(name),
    )


def _user_source(reference: str) -> ModelSource:
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
    return ModelSource(
        reference=reference,
        name=re.sub(r"[^A-Za-z0-9_.-]", "-", attribute),
        fingerprint=sha256_file(Path(source)),
        preprocessing=_declared_preprocessing(getattr(module, "PREPROCESSING", None), where),
        factory=factory,
    )


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


def _declared_preprocessing(declared: object, where: str) -> Preprocessing | None:
    """Check a user module's ``PREPROCESSING = {"resize": 32, "crop": [32, 32], "mean": […], "std": […]}``."""
    if declared is None:
        return None
    if not isinstance(declared, Mapping):
        raise UserError(f"{where}: PREPROCESSING must be a dict, it is a {type(declared).__name__}")
    known = ("resize", "crop", "mean", "std", "interpolation")
    if unknown := sorted(str(key) for key in declared if key not in known):
        raise UserError(f"{where}: PREPROCESSING has the unknown key {unknown[0]!r}; known are {', '.join(known)}")
    if absent := [key for key in ("resize", "crop") if key not in declared]:
        raise UserError(f"{where}: PREPROCESSING lacks {absent[0]!r}")
    values: dict[str, Any] = dict(declared)
    if isinstance(values["crop"], int):
        values["crop"] = (values["crop"], values["crop"])
    try:
        values["crop"] = tuple(_whole(side) for side in values["crop"])
        values["resize"] = _whole(values["resize"])
        for key in ("mean", "std"):
            if key in values:
                values[key] = tuple(float(number) for number in values[key])
        return Preprocessing(**values)
    except (CardError, TypeError, ValueError) as error:
        raise UserError(f"{where}: PREPROCESSING is not usable: {one_line(error)}") from None


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"sizes must be whole numbers of pixels, got {number!r}")
    return number
