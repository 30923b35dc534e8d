"""timm's image models (the optional extra ``timm``): their builders, and the preprocessing of their configuration."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import types
import warnings
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import nn

from optimize.models.source import ModelSource
from serve.runtime.card.card import Interpolation, Preprocessing
from serve.runtime.errors import UserError, did_you_mean, first_line

PREFIX = "timm:"
#: Modes of timm's crop that `Preprocessing` supports.
_CROPS = ("center", "squash")

#: A side in pixels, a multiple of every patch size but 14. Networks are tried with it to see whether their size is
#: free.
_TRIED = 128


def timm_source(name: str) -> ModelSource:
    """Return a timm model with the preprocessing of its ``pretrained_cfg``: size, mean, std, interpolation, crop share.

    Args:
        name: timm's name, with or without the tag of its weights: ``resnet50``, ``resnet50.a1_in1k``.

    Raises:
        UserError: timm is not installed, the model (the nearest names are suggested) or tag does not exist, or its
            input is not square.
    """
    if importlib.util.find_spec("timm") is None:
        raise UserError(f"{PREFIX}{name}: timm is not installed; python -m pip install -c constraints.txt -e '.[timm]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm
    if not name.strip() or ":" in name or not timm.is_model(name):
        where = "; models are not downloaded from the hub" if ":" in name or "/" in name else ""
        raise UserError(f"timm has no model {name!r}{did_you_mean(name.partition('.')[0], timm.list_models())}{where}")
    try:
        wanted = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # an unknown tag
        raise UserError(f"{PREFIX}{name}: {first_line(error)} {_tags(name.partition('.')[0])}") from None
    source = ModelSource(
        reference=f"{PREFIX}{name}",
        name=name,
        fingerprint=f"timm/{timm.__version__}/{name}",
        preprocessing=_preprocessing(name, wanted) if wanted is not None else None,
        declared_by=_words(wanted) if wanted is not None else "",
        min_size=max(wanted.min_input_size[1:]) if wanted is not None and wanted.min_input_size else 1,
        origin="timm",
        task="classification",
        factory=functools.partial(_build, name, False),
    )
    return _sized(source, wanted.input_size[-1]) if wanted is not None and wanted.fixed_input_size else source


def declared_by_module(module: nn.Module) -> tuple[Preprocessing, str] | None:
    """Return the preprocessing of a network that timm made, and its description. None if timm did not make it."""
    given = getattr(module, "pretrained_cfg", None)
    if not type(module).__module__.startswith("timm.") or not isinstance(given, Mapping):
        return None
    usual = {"crop_mode": "center", "tag": "", "architecture": type(module).__name__}
    wanted = types.SimpleNamespace(**usual | {name: value for name, value in given.items() if value is not None})
    return _preprocessing(wanted.architecture, wanted), _words(wanted)


def refuse_named_weights(source: ModelSource) -> UserError:
    """Return the error that says why timm's weights have no names here, and what to do instead."""
    import timm

    wanted = timm.get_pretrained_cfg(source.name)
    hub = f" (huggingface.co/{wanted.hf_hub_id})" if wanted is not None and wanted.hf_hub_id else ""
    return UserError(
        f"{source.reference}: weights of timm are not downloaded{hub}; give their file with --checkpoint. The "
        "preprocessing follows from the model's name"
    )


def _preprocessing(name: str, wanted: Any) -> Preprocessing:
    """Return timm's evaluation: the shorter side scaled to the input's size over ``crop_pct``, cut from the centre.

    With ``crop_mode`` ``squash``, both sides are scaled.
    """
    channels, height, width = wanted.input_size
    if height != width:
        raise UserError(f"{PREFIX}{name}: takes images of {height}x{width} pixels; only square inputs are supported")
    if len(wanted.mean) != channels:
        raise UserError(f"{PREFIX}{name}: takes {channels} channels and declares {len(wanted.mean)} means")
    known = wanted.interpolation in get_args(Interpolation)
    side = math.floor(height / wanted.crop_pct)
    return Preprocessing(
        resize=(side, side) if wanted.crop_mode == "squash" else side,
        crop=(height, width),
        mean=tuple(wanted.mean),
        std=tuple(wanted.std),
        interpolation=wanted.interpolation if known else "bicubic",
    )


def _words(wanted: Any) -> str:
    tag = f"{wanted.architecture}.{wanted.tag}" if wanted.tag else wanted.architecture
    other = [f"crop_mode {wanted.crop_mode!r} replaced by 'center'"] if wanted.crop_mode not in _CROPS else []
    if wanted.interpolation not in get_args(Interpolation):
        other.append(f"interpolation {wanted.interpolation!r} replaced by 'bicubic'")
    return f"timm's pretrained_cfg of {tag}" + (f", {', '.join(other)}" if other else "")


def _sized(source: ModelSource, native: int) -> ModelSource:
    """Determine the possible input sizes of a network that is built for one size, as far as timm's builder allows."""
    resizable = functools.partial(_build, source.name, True)
    try:
        # Without memory and arithmetic: half a second for the largest.
        with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = resizable(2, _TRIED).eval()
            model(torch.zeros(1, 3, _TRIED, _TRIED))
    except Exception:  # noqa: BLE001 - builders refuse in many ways: crossvit and efficientformer cannot be resized
        return dataclasses.replace(source, only_size=native)
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", 1)
    patch = max(patch) if isinstance(patch, tuple | list) else int(patch)
    smallest = max(source.min_size, patch)
    return dataclasses.replace(source, min_size=smallest, size_multiple=patch, factory=resizable)


def _tags(architecture: str) -> str:
    import timm

    known = [name.partition(".")[2] for name in timm.list_pretrained(f"{architecture}.*")]
    return f"It has {', '.join(known[:12])}{' …' if len(known) > 12 else ''}" if known else "It has none"


def _build(name: str, resizable: bool, num_classes: int, image_size: int | None) -> nn.Module:
    import timm

    options: dict[str, Any] = {"img_size": image_size} if resizable and image_size is not None else {}
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, **options)
    return model
