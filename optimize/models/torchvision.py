"""torchvision's networks for images: their builders, the preprocessing of their weights, and these weights' files.

Those are its classifiers and its networks for semantic segmentation.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize.models.logits import with_forward
from optimize.models.source import ModelSource
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError, did_you_mean, first_line
from serve.runtime.images.lean_torchvision import models, torchvision

#: The weight of an auxiliary head in the loss, as in torchvision's training of these networks.
_AUXILIARY = 0.5


def torchvision_source(name: str, others: Iterable[str] = ()) -> ModelSource:
    """Return a torchvision network with the preprocessing of its default weights.

    Args:
        name: a classifier, or a network for semantic segmentation.
        others: other names that would be found, to be suggested.

    Raises:
        UserError: the network does not exist. The nearest names are suggested.
    """
    maps = models.list_models(module=models.segmentation)
    if name in maps:
        return _segmentation_source(name)
    known = models.list_models(module=models)
    if name not in known:
        if name in models.list_models():
            raise UserError(
                f"{name} is a torchvision model, but neither a floating-point image classifier nor for segmentation"
            )
        raise UserError(
            f"there is no torchvision network {name!r}{did_you_mean(name, [*known, *maps, *others])}; write timm:NAME "
            "for timm, and path/to/file.py:FACTORY or package.module:FACTORY for your own model"
        )
    weights = models.get_model_weights(name).DEFAULT
    min_size, multiple = max(weights.meta.get("min_size", (1, 1))), 1
    # For these, torchvision's min_size is the size of training, not the smallest size that the network can take.
    if name.startswith("vit_"):
        min_size = multiple = int(name.rpartition("_")[2])
    elif name.startswith("swin"):
        min_size = 32  # five halvings of the side; windows are padded
    elif name.startswith("maxvit"):
        min_size = multiple = 224  # windows of 7 after five halvings, and no padding
    return ModelSource(
        reference=name,
        name=name,
        fingerprint=f"torchvision/{torchvision.__version__}/{name}",
        preprocessing=_transforms(weights),
        declared_by=f"torchvision's default weights, {weights.name}",
        min_size=min_size,
        size_multiple=multiple,
        origin="torchvision",
        task="classification",
        factory=functools.partial(_build, models.get_model_builder(name), name),
    )


def _segmentation_source(name: str) -> ModelSource:
    weights, builder = models.get_model_weights(name).DEFAULT, models.get_model_builder(name)
    source = ModelSource(
        reference=name,
        name=name,
        fingerprint=f"torchvision/{torchvision.__version__}/{name}",
        preprocessing=_transforms(weights),
        declared_by=f"torchvision's default weights, {weights.name}, without their crop",
        min_size=32,  # four or five halvings of the side
        origin="torchvision",
        task="segmentation",
        factory=functools.partial(_build_for_maps, builder, {}),
    )
    if "aux_loss" not in inspect.signature(builder).parameters:
        return source
    with_head = functools.partial(_build_for_maps, builder, {"aux_loss": True})
    return dataclasses.replace(source, auxiliary=(_AUXILIARY,), training_factory=with_head)


def with_weights(source: ModelSource, weights: str) -> ModelSource:
    """Return ``source`` with the transforms of those weights, and their only image size if they have one.

    Args:
        source: a torchvision network.
        weights: ``DEFAULT`` or an entry's name, such as ``IMAGENET1K_V1``.

    Raises:
        UserError: the weights do not exist. The message lists those that do.
    """
    entry = _entry(source.name, weights)
    # A ViT's position embedding has one row per patch of the images that it was trained on.
    only = max(entry.meta["min_size"]) if source.name.startswith("vit_") else None
    return dataclasses.replace(
        source,
        preprocessing=_transforms(entry),
        declared_by=f"torchvision's weights {entry.name}",
        only_size=only,
    )


def recognised(source: ModelSource, sha256: str) -> ModelSource:
    """Return ``source`` with the preprocessing of torchvision's weights of this SHA-256, or unchanged."""
    for entry in models.get_model_weights(source.name):
        digest = _digest(str(entry.url))
        if digest is not None and sha256.startswith(digest):
            found = with_weights(source, entry.name)
            return dataclasses.replace(
                found, declared_by=f"{found.declared_by}, recognized by the SHA-256 of the checkpoint"
            )
    return source


def download(source: ModelSource, weights: str) -> Path:
    """Return the file of torchvision's own weights, from torch's cache or the network.

    Raises:
        UserError: the weights do not exist, or are not in the cache and cannot be downloaded.
    """
    url = str(_entry(source.name, weights).url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urllib.parse.urlparse(url).path).name
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), _digest(url), progress=sys.stderr.isatty())
        except (OSError, RuntimeError) as error:  # URLError is an OSError; a wrong hash is a RuntimeError
            raise UserError(
                f"{source.name}: the weights {weights} cannot be downloaded ({first_line(error)}); without a "
                f"network, put their file at {path}"
            ) from None
    return path


def _entry(name: str, weights: str) -> Any:
    entries = models.get_model_weights(name)
    if weights not in entries.__members__:
        known = ", ".join(["DEFAULT", *(entry.name for entry in entries)])
        raise UserError(f"{name} has no weights {weights!r}{did_you_mean(weights, list(entries.__members__))}: {known}")
    return entries[weights]


def _digest(url: str) -> str | None:
    """Return the beginning of the file's SHA-256, which torch's hub puts into its name."""
    found = re.search(r"-([a-f0-9]{8,})\.", url.rpartition("/")[2])
    return found.group(1) if found else None


def _transforms(weights: Any) -> Preprocessing:
    presets = weights.transforms()
    side = presets.resize_size[0]
    # Networks for segmentation take any size and have no crop. All of a picture is scaled, so that each pixel has an
    # answer.
    crop = presets.crop_size[0] if hasattr(presets, "crop_size") else None
    return Preprocessing(
        resize=(side, side) if crop is None else side,
        crop=(crop or side, crop or side),
        mean=tuple(presets.mean),
        std=tuple(presets.std),
        interpolation=presets.interpolation.value,
    )


def _build(builder: Callable[..., nn.Module], name: str, num_classes: int, image_size: int | None) -> nn.Module:
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if name in ("googlenet", "inception_v3"):
        # Auxiliary heads would make the training forward return a tuple. torchvision's own weights were trained on
        # inputs in [-1, 1]. Their builder sets transform_input, which converts ImageNet's normalisation into that one.
        # We must do the same, or such a checkpoint loses accuracy silently. Their own initialisation takes 5 s
        # (truncated normals), and upstream is about to remove it.
        options |= {"aux_logits": False, "init_weights": False, "transform_input": True}
    if image_size is not None and name.startswith("vit_"):
        options["image_size"] = image_size
    if image_size is not None and name.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    return builder(**options)


def _build_for_maps(
    builder: Callable[..., nn.Module], options: dict[str, Any], num_classes: int, image_size: int | None
) -> nn.Module:
    """Build a network for segmentation that returns its logits, and in training those of its auxiliary head, too."""
    return with_forward(
        builder(weights=None, weights_backbone=None, num_classes=num_classes, **options), _logits_of_maps
    )


def _logits_of_maps(forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_of_logits(self: nn.Module, images: torch.Tensor) -> Any:
        found = forward(self, images)
        return (found["out"], found["aux"]) if self.training and "aux" in found else found["out"]

    return forward_of_logits
