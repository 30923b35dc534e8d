"""A model source: it builds a new ``nn.Module``, and declares the module's input.

Each origin has its file: `optimize.models.torchvision`, `optimize.models.timm`, `optimize.models.networks`,
`optimize.models.user_models` and `optimize.models.module_source`. `optimize.models.model_names` turns a name into a
source.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from optimize.tasks.base import find_task
from serve.runtime.card.card import Preprocessing
from serve.runtime.display import Described
from serve.runtime.errors import UserError, one_line

Origin = Literal["torchvision", "timm", "own", "smp", "user", "module"]


def _identity(num_classes: int, image_size: int | None) -> nn.Module:
    return nn.Identity()


@dataclass(frozen=True)
class ModelSource(Described):
    """The origin of a model's architecture, and its declared input.

    Attributes:
        reference: the user's text.
        name: short name, safe for folders and TorchServe: ``resnet18``, or the factory's name for user code.
        fingerprint: changes with the code that builds the module: ``torchvision/<version>/<name>``, or a SHA-256 over
            the user's source and the neighbours that it imports.
        preprocessing: the model's declaration: the transforms of a library's weights, or the user module's
            ``PREPROCESSING``. None if nothing is declared.
        declared_by: the origin of the declaration, in words: ``torchvision's weights IMAGENET1K_V1``.
        undeclared: parts of ``preprocessing`` (``mean``, ``std``, ``interpolation``) that the declaration left out.
        min_size: smallest side of the input in pixels that the network can take.
        size_multiple: the side must be a multiple of this (a ViT's patch).
        only_size: the only side that it can take, if named weights fix it.
        origin: which file of this package made it.
        task: the name of the task that its network is for. None: unknown, and it is tried.
        auxiliary: the weight in the loss of each output that the network has only in training, behind its first one.
        training: settings of `TrainingConfig` for this network, in place of the defaults.
        home: the imported module of the user's own code, which is searched for classes of pickled networks.
        factory: called by `build` with ``num_classes`` and ``image_size``.
        training_factory: the same for a network with `auxiliary` outputs.
    """

    reference: str
    name: str
    fingerprint: str
    preprocessing: Preprocessing | None
    declared_by: str = "your PREPROCESSING"
    undeclared: frozenset[str] = frozenset()
    min_size: int = 1
    size_multiple: int = 1
    only_size: int | None = None
    origin: Origin = "user"
    task: str | None = None
    auxiliary: tuple[float, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    home: types.ModuleType | None = field(default=None, repr=False, compare=False)
    factory: Callable[[int, int | None], Any] = field(default=_identity, repr=False, compare=False)
    training_factory: Callable[[int, int | None], Any] | None = field(default=None, repr=False, compare=False)

    def build(self, num_classes: int, image_size: int | None = None, *, training: bool = False) -> nn.Module:
        """Build the module, randomly initialised, with ``num_classes`` outputs.

        ``num_classes`` and ``image_size`` (pixels, for networks that are built for one size) are passed only if the
        factory takes them. The result is without wrappers, and in float32 whatever its dtype was. With ``training`` it
        has its `auxiliary` outputs while it is in training mode.

        Raises:
            UserError: the size is illegal, the factory raises, or its result is not an eager ``nn.Module``.
        """
        if image_size is not None:
            self.check_size(image_size)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                build = (self.training_factory if training else None) or self.factory
                model = build(num_classes, image_size)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            raise UserError(f"{self.reference}: building the model failed: {one_line(error)}") from None
        model = unwrapped(model)
        if isinstance(model, torch.jit.ScriptModule):
            raise UserError(f"{self.reference}: returned a TorchScript module; return what it was made from")
        if not isinstance(model, nn.Module):
            raise UserError(f"{self.reference}: must return a torch.nn.Module, it returned {type(model).__name__}")
        return model.float()

    def check_task(self, task: str, data: str) -> None:
        """Refuse a network that is for another task than the data called ``data``.

        Raises:
            UserError: it is.
        """
        if self.task not in (None, task, find_task(task).networks_for):
            raise UserError(
                f"{self.reference} is a network for {self.task}, and {data} is for {task}: choose a network or data "
                "of one task"
            )

    def check_size(self, size: int) -> None:
        """Refuse a side of the input that the network cannot take, and name the nearest that it can.

        Raises:
            UserError: ``size`` is below ``min_size``, not a multiple of ``size_multiple``, or not ``only_size``.
        """
        if self.only_size is not None:
            if size != self.only_size:
                raise UserError(
                    f"{self.name} with {self.declared_by} cannot take images of {size}x{size} pixels: it is "
                    f"made for {self.only_size}x{self.only_size}"
                )
        elif size < self.min_size or size % self.size_multiple:
            step = self.size_multiple
            below = size // step * step
            legal = sorted({self.legal_size(size), below if below >= self.min_size else self.legal_size(size)})
            rule = f"a multiple of {step}, " if step > 1 else ""
            raise UserError(
                f"{self.name} cannot take images of {size}x{size} pixels: the side must be {rule}"
                f"at least {self.legal_size(self.min_size)}; the nearest is {' or '.join(map(str, legal))}"
            )

    def legal_size(self, at_least: int) -> int:
        """Return the smallest legal side of at least ``at_least`` pixels, or `only_size` if it is set."""
        step = self.size_multiple
        return self.only_size or -(-max(at_least, self.min_size) // step) * step


def unwrapped(module: object) -> object:
    """Remove the wrappers of ``torch.compile`` and of data parallelism around a module and in it, in place.

    Any other object is returned unchanged.
    """
    module = innermost(module)
    if isinstance(module, nn.Module) and not isinstance(module, torch.jit.ScriptModule):
        for part in list(module.modules()):
            if isinstance(part, torch.jit.ScriptModule):
                continue
            part._compiled_call_impl = None  # set by `nn.Module.compile`
            for name, child in part._modules.items():
                part._modules[name] = innermost(child)
    return module


def innermost(module: Any) -> Any:
    """Return the module inside its wrappers; see `unwrapped`."""
    while isinstance(module, nn.Module) and not isinstance(module, torch.jit.ScriptModule):
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif (inner := getattr(module, "_orig_mod", None)) is not None:
            module = inner
        else:
            break
    return module
