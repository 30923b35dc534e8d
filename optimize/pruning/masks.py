"""Masks that set single weights to zero by their size."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from optimize.models.module_patterns import around
from optimize.store.layer_effects import WHOLE, Effect

Scope = Literal["global", "layer"]

#: By layer name, true where a weight stays.
Masks = Mapping[str, torch.Tensor]

ZEROS = "zeros among the weights (%)"
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def weighted(module: nn.Module, kept: Set[str]) -> dict[str, torch.Tensor]:
    """Return the weight of each convolution and linear layer outside the modules called ``kept``.

    A shared weight is returned once, by its first layer. It is kept if one of its layers is.
    """
    own = {name: kept.isdisjoint(around(name)) for name, _ in module.named_modules()}
    known = {id(tensor) for name, layer in module.named_modules() if not own[name] for tensor in layer.parameters()}
    found: dict[str, torch.Tensor] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, _LAYERS) and not is_parametrized(layer) and id(layer.weight) not in known:
            found[name] = layer.weight
            known.add(id(layer.weight))
    return found


def smallest(weights: Mapping[str, torch.Tensor], share: float, scope: Scope) -> Masks:
    """Mask the share of weights with the smallest absolute values, over all layers together or in each layer."""
    if scope == "layer":
        return {name: smallest({name: weight}, share, "global")[name] for name, weight in weights.items()}
    sizes = torch.cat([weight.detach().abs().flatten() for weight in weights.values()])
    stays = torch.ones(len(sizes), dtype=torch.bool)
    stays[torch.sort(sizes, stable=True).indices[: round(share * len(sizes))]] = False
    parts = torch.split(stays, [weight.numel() for weight in weights.values()])
    return {name: part.view(weight.shape) for (name, weight), part in zip(weights.items(), parts, strict=True)}


def n_of_m(weights: Mapping[str, torch.Tensor], n: int, m: int) -> Masks:
    """Keep the ``n`` largest absolute values of every ``m`` neighbouring input channels, at each place of a filter.

    Only layers whose input channels (of a group) are a multiple of ``m`` get a mask.
    """
    found = {}
    for name, weight in weights.items():
        if weight.shape[1] % m:
            continue
        last = weight.detach().abs().movedim(1, -1)
        parts = last.reshape(-1, m)
        stays = torch.zeros(parts.shape, dtype=torch.bool).scatter_(1, parts.topk(n, dim=1).indices, True)
        found[name] = stays.view(last.shape).movedim(-1, 1).contiguous()
    return found


def set_to_zero(module: nn.Module, masks: Masks) -> None:
    """Set masked weights to zero, in place."""
    with torch.no_grad():
        for name, mask in masks.items():
            weight: Any = module.get_submodule(name).weight
            weight.mul_(mask)


def zeros(masks: Masks, were: Mapping[str, torch.Tensor]) -> list[Effect]:
    """Return the percentage of zero weights of each layer and of all, before and after masking.

    Args:
        masks: true where a weight stays.
        were: by layer name, true where a weight was zero before.
    """
    before = [were[name].flatten() for name in masks]
    after = [was | ~mask.flatten() for was, mask in zip(before, masks.values(), strict=True)]
    whole = Effect(WHOLE, f"{ZEROS}, simulated at 1.0 times the speed", _share(*before), _share(*after))
    shares = zip(masks, before, after, strict=True)
    return [*(Effect(name, ZEROS, _share(was), _share(now)) for name, was, now in shares), whole]


def _share(*which: torch.Tensor) -> float:
    return 100 * float(torch.cat(which).double().mean())
