"""A live ``nn.Module`` as a model source and a checkpoint, unaffected by later changes of the module."""

from __future__ import annotations

import copy
import functools
import re
import sys
import types

import torch
from torch import nn

from optimize.models import timm
from optimize.models.checkpoint import Checkpoint
from optimize.models.live_objects import module_digest, tensors_digest
from optimize.models.source import ModelSource, innermost, unwrapped
from optimize.models.stated_classes import stated_classes
from optimize.models.user_models import declared_preprocessing
from serve.runtime.errors import UserError, one_line


def module_source(module: nn.Module) -> tuple[ModelSource, Checkpoint]:
    """Return a source and a checkpoint for an existing module.

    The module is copied at once and not changed. The copy is on the CPU, in float32 and eval mode, without the wrappers
    of ``torch.compile`` and data parallelism. Its preprocessing is the ``PREPROCESSING`` of the Python module of its
    class, or timm's configuration if timm made it.

    Returns:
        A source whose ``build`` returns copies with the weights, and the weights. ``num_classes`` and ``image_size``
            are the module's own. The fingerprint changes with code, structure and plain attributes.

    Raises:
        UserError: it is not an eager module, has parameters without values, or cannot be copied.
    """
    given = innermost(module)
    if isinstance(given, torch.jit.ScriptModule):
        raise UserError("a TorchScript module cannot be optimized; give the nn.Module that it was made from")
    if not isinstance(given, nn.Module):
        raise UserError(f"a model must be a torch.nn.Module, this is a {type(given).__name__}")
    module = given
    name = type(module).__name__
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise UserError(f"{name}: {key} has no values yet; load weights, or run a batch through it first")
    try:
        own = copy.deepcopy(module)
        unwrapped(own)
        own = own.cpu().float().eval()
    except Exception as error:  # noqa: BLE001 - anything in the module may refuse to be copied
        raise UserError(f"{name}: cannot be copied: {one_line(error)}") from None
    for parameter in own.parameters():
        parameter.grad = None
        parameter.requires_grad_(parameter.is_floating_point())
    home = sys.modules.get(type(module).__module__, types.ModuleType("none"))
    preprocessing, undeclared, by = declared_preprocessing(home)
    if preprocessing is None and (found := timm.declared_by_module(module)) is not None:
        preprocessing, by = found
    state = own.state_dict()
    source = ModelSource(
        reference=name,
        name=re.sub(r"[^A-Za-z0-9_.-]", "-", name),
        fingerprint=module_digest(own),
        preprocessing=preprocessing,
        declared_by=by,
        undeclared=undeclared,
        origin="module",
        factory=functools.partial(_copied, own),
    )
    notes = (f"the weights are those of the given {name}",)
    return source, Checkpoint(state, tensors_digest(state), notes=notes, classes=stated_classes(own))


def _copied(module: nn.Module, num_classes: int, image_size: int | None) -> nn.Module:
    return copy.deepcopy(module)
