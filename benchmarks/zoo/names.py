"""Which models the zoo has: torchvision's classifiers, and a small one of each of timm's families."""

from __future__ import annotations

import importlib.util
import re
import warnings

import torch

#: How timm's builders call what is small, the smallest first.
_SMALL = (
    "atto",
    "femto",
    "pico",
    "xxt",
    "xxs",
    "nano",
    "xt",
    "xs",
    "050",
    "tiny",
    "_t",
    "mini",
    "_s",
    "small",
    "18",
    "s0",
    "b0",
)
#: Largest that is taken of a family of timm's, in parameters.
_LARGEST = 400e6


def torchvision_names() -> list[str]:
    """The classifiers of torchvision, by name."""
    from torchvision import models

    return sorted(models.list_models(module=models))


def timm_names() -> list[str]:
    """One architecture of each family of timm's, as ``timm:NAME``; none where it is not installed."""
    if importlib.util.find_spec("timm") is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm

        found = [_smallest(timm.list_models(module=family)) for family in timm.list_modules()]
    return sorted(f"timm:{name}" for name in found if name)


def _smallest(names: list[str]) -> str | None:
    """The first of a family, from small names to large, that takes images of 3 channels and up to 256 pixels."""
    import timm

    for name in sorted(names, key=lambda name: (_rank(name), len(name), name)):
        wanted = timm.get_pretrained_cfg(name)
        if wanted is None or wanted.input_size[0] != 3 or wanted.num_classes < 2:
            continue
        if wanted.fixed_input_size and wanted.input_size[1] > 256:
            continue
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = timm.create_model(name, pretrained=False, num_classes=10)
            except Exception:  # noqa: BLE001 - what cannot be built without memory is told of when it is its turn
                return name
        if sum(parameter.numel() for parameter in model.parameters()) <= _LARGEST:
            return name
    return None


def _rank(name: str) -> int:
    return next((rank for rank, word in enumerate(_SMALL) if word in name), len(_SMALL))


def family(name: str) -> str:
    """The family of a model, for tables and tests: ``resnet``, ``swin_v2``, ``timm``."""
    if name.startswith("timm:"):
        return "timm"
    if name.startswith(("mobilenet_v3", "efficientnet_v2", "swin_v2")):
        return "_".join(name.split("_")[:2])
    found = re.match(r"[a-z]+", name.replace("mobilenet_v2", "mobilenetv2"))
    assert found is not None
    return {"wide": "wide_resnet", "inception": "inception", "mobilenetv": "mobilenet_v2"}.get(found[0], found[0])
