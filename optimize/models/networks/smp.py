"""Networks of segmentation_models_pytorch (the optional extra ``smp``): an architecture around an encoder."""

from __future__ import annotations

import functools
import importlib.util
import types
import warnings

from torch import nn

from optimize.models.source import ModelSource
from serve.runtime.errors import UserError, did_you_mean, listed

PREFIX = "smp:"

#: The library's own default, and the halvings of an image's side in every encoder of five stages.
_ENCODER, _MULTIPLE = "resnet34", 32

#: The beginning of the names of timm's encoders in this library. timm has hundreds.
_OF_TIMM = "tu-"


def smp_source(name: str) -> ModelSource:
    """Return a network of segmentation_models_pytorch. Its weights are random, and nothing is downloaded.

    Its preprocessing is not declared: most of its encoders were trained with ImageNet's statistics.

    Args:
        name: ``unet``, or with an encoder ``unet-mobilenet_v2``.

    Raises:
        UserError: the library is not installed, or it has no such architecture or encoder. The nearest names are
            suggested.
    """
    if importlib.util.find_spec("segmentation_models_pytorch") is None:
        raise UserError(
            f"{PREFIX}{name}: segmentation_models_pytorch is not installed; "
            "python -m pip install -c constraints.txt -e '.[smp]'"
        )
    library = _library()
    architecture, _, encoder = name.partition("-")
    known = [*library.MODEL_ARCHITECTURES_MAPPING]
    if architecture not in known:
        raise UserError(
            f"{PREFIX}{name}: there is no architecture {architecture!r}{did_you_mean(architecture, known)}; there are "
            f"{', '.join(known)}, each with an encoder behind a dash: {PREFIX}{known[0]}-{_ENCODER}"
        )
    encoder = encoder or _ENCODER
    encoders = library.encoders.get_encoder_names()
    if encoder not in encoders and not encoder.startswith(_OF_TIMM):
        near = did_you_mean(encoder, encoders) or f"; there are {listed(encoders, 6)}, and timm's as {_OF_TIMM}NAME"
        raise UserError(f"{PREFIX}{name}: there is no encoder {encoder!r}{near}")
    return ModelSource(
        reference=f"{PREFIX}{name}",
        name=f"{architecture}-{encoder}",
        fingerprint=f"smp/{library.__version__}/{architecture}/{encoder}",
        preprocessing=None,
        min_size=_MULTIPLE,
        size_multiple=_MULTIPLE,
        origin="smp",
        task="segmentation",
        factory=functools.partial(_build, architecture, encoder),
    )


def _library() -> types.ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import segmentation_models_pytorch
    library: types.ModuleType = segmentation_models_pytorch
    return library


def _build(architecture: str, encoder: str, num_classes: int, image_size: int | None) -> nn.Module:
    module: nn.Module = _library().create_model(architecture, encoder, encoder_weights=None, classes=num_classes)
    return module
