"""Resolves a name to a `ModelSource`: torchvision's, timm's, or the user's own code. Finds named weights."""

from __future__ import annotations

from optimize.models import timm, torchvision
from optimize.models.checkpoint import Checkpoint, read_checkpoint
from optimize.models.networks import cnn, smp, unet
from optimize.models.source import ModelSource
from optimize.models.torchvision import torchvision_source
from optimize.models.user_models import user_source
from serve.runtime.errors import UserError

#: The project's own networks.
_OWN = {cnn.NAME: cnn.cnn_source, unet.NAME: unet.unet_source}

#: The endings of files of weights.
_WEIGHTS = (".pt", ".pth", ".ckpt", ".th", ".tar", ".safetensors", ".bin")


def resolve_model(reference: str) -> ModelSource:
    """Find a model by its name.

    That is a torchvision name, ``cnn_small``, ``unet_small``, ``timm:NAME``, ``smp:NAME``,
    ``path/to/file.py:factory`` or ``package.module:factory``.

    Raises:
        UserError: the model (the nearest names are suggested), file, module or factory does not exist, or the user's
            module cannot be imported.
    """
    if reference.startswith(timm.PREFIX):
        return timm.timm_source(reference.removeprefix(timm.PREFIX))
    if reference.startswith(smp.PREFIX):
        return smp.smp_source(reference.removeprefix(smp.PREFIX))
    if ":" in reference:
        return user_source(reference)
    if reference.endswith(".py"):
        raise UserError(f"{reference}: name the function that builds the model: {reference}:FACTORY")
    if reference.endswith(_WEIGHTS):
        raise UserError(
            f"{reference}: is a file of weights; name their network, and give the file with --checkpoint {reference}"
        )
    if reference.endswith(".onnx"):
        raise UserError(
            f"{reference}: passes work on PyTorch networks, not on ONNX graphs; name the original network, and "
            "give its weights with --checkpoint"
        )
    return _OWN[reference]() if reference in _OWN else torchvision_source(reference, _OWN)


def with_named_weights(source: ModelSource, weights: str) -> tuple[ModelSource, Checkpoint]:
    """Return ``source`` with the preprocessing of the library's weights ``weights``, and these weights.

    Raises:
        UserError: the model has no named weights, or none of this name, or they cannot be downloaded and are not on
            this machine.
    """
    if source.origin == "timm":
        raise timm.refuse_named_weights(source)
    if source.origin != "torchvision":
        raise UserError(f"{source.reference}: named weights exist only for models of torchvision; give a checkpoint")
    return torchvision.with_weights(source, weights), read_checkpoint(torchvision.download(source, weights))


def with_checkpoint(source: ModelSource, checkpoint: Checkpoint) -> ModelSource:
    """Return ``source`` with the preprocessing of ``checkpoint``, if it is one of the library's own files."""
    return torchvision.recognised(source, checkpoint.sha256) if source.origin == "torchvision" else source
