"""How a data set's images reach a model's network: size, crop, mean, std, interpolation."""

from __future__ import annotations

from optimize.data.records import ImageData
from optimize.models.source import ModelSource
from serve.runtime.card import Preprocessing

#: Side in pixels that the 8x8 digits are scaled to for a network that does not ask for another.
DIGITS_SIDE = 64


def default_preprocessing(source: ModelSource, data: ImageData, image_size: int | None = None) -> Preprocessing:
    """How the images of ``data`` reach the network of ``source``.

    Mean, std and interpolation are what the model declares, or ImageNet's. The size is, first that
    applies: ``image_size``, with ``resize`` in the declared proportion to the crop; a user's own
    declaration; for ``digits`` `DIGITS_SIDE`, and for other square images of up to 64 pixels their own
    size, each raised to what the network can take; torchvision's declaration; 224 out of 256.

    Raises:
        UserError: the network cannot take ``image_size``; the nearest legal one is named.
    """
    base = source.preprocessing or Preprocessing(resize=256, crop=(224, 224))

    def sized(resize: int, side: int) -> Preprocessing:
        return Preprocessing(resize, (side, side), base.mean, base.std, base.interpolation)

    declared_by_user = source.origin == "user" and source.preprocessing is not None
    if image_size is not None:
        source.check_size(image_size)
        return sized(round(image_size * base.resize / min(base.crop)), image_size)
    if declared_by_user:
        return base
    small = data.native_size is not None and data.native_size[0] == data.native_size[1] <= 64
    if small and data.native_size is not None:
        side = source.legal_size(DIGITS_SIDE if data.name == "digits" else data.native_size[0])
        return sized(side, side)
    return base
