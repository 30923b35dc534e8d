"""Single weights as zeros: which, by their size."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from optimize.models.module_patterns import around
from optimize.store.layer_effects import WHOLE, Effect

Scope = Literal["global", "layer"]

#: By layer's name, true where a weight stays.
Masks = Mapping[str, torch.Tensor]

ZEROS = "zeros among the weights (%)"
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def weighted(module: nn.Module, kept: Set[str]) -> dict[str, torch.Tensor]:
    """The weight of each convolution and linear layer, but those within the modules called ``kept``.

    What several layers share stands here once, by the first; it is kept if it is that of one that is.
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
    """Without the share of weights that are smallest in absolute value, of all layers together or of each layer."""
    if scope == "layer":
        return {name: smallest({name: weight}, share, "global")[name] for name, weight in weights.items()}
    sizes = torch.cat([weight.detach().abs().flatten() for weight in weights.values()])
    stays = torch.ones(len(sizes), dtype=torch.bool)
    stays[torch.sort(sizes, stable=True).indices[: round(share * len(sizes))]] = False
    parts = torch.split(stays, [weight.numel() for weight in weights.values()])
    return {name: part.view(weight.shape) for (name, weight), part in zip(weights.items(), parts, strict=True)}


def n_of_m(weights: Mapping[str, torch.Tensor], n: int, m: int) -> Masks:
    """Of every ``m`` neighbouring input channels, at each place of a filter, the ``n`` largest in absolute value.

    Only of layers whose input channels (of a group) are a multiple of ``m``.
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
    """Set what is masked to zero, in place."""
    with torch.no_grad():
        for name, mask in masks.items():
            weight: Any = module.get_submodule(name).weight
            weight.mul_(mask)


def zeros(masks: Masks, were: Mapping[str, torch.Tensor]) -> list[Effect]:
    """How many of each layer's weights are zero, and of all, in percent, before they are masked and after.

    Args:
        masks: what stays.
        were: by layer's name, true where a weight was zero before.
    """
    before = [were[name].flatten() for name in masks]
    after = [was | ~mask.flatten() for was, mask in zip(before, masks.values(), strict=True)]
    whole = Effect(WHOLE, f"{ZEROS}, simulated at 1.0 times the speed", _share(*before), _share(*after))
    shares = zip(masks, before, after, strict=True)
    return [*(Effect(name, ZEROS, _share(was), _share(now)) for name, was, now in shares), whole]


def _share(*which: torch.Tensor) -> float:
    return 100 * float(torch.cat(which).double().mean())
