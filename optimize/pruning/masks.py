"""Single weights as zeros: which, and how they stay zero while the others are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from optimize.errors import PassError
from optimize.models.patterns import around
from optimize.store.effects import WHOLE, Effect

Scope = Literal["global", "layer"]

#: By layer's name, true where a weight stays.
Masks = Mapping[str, torch.Tensor]

ZEROS = "zeros among the weights (%)"
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def weighted(module: nn.Module, kept: Set[str]) -> dict[str, torch.Tensor]:
    """The weight of each convolution and linear layer, but those within the modules called ``kept``."""
    return {
        name: layer.weight
        for name, layer in module.named_modules()
        if isinstance(layer, _LAYERS) and not is_parametrized(layer) and not kept & set(around(name))
    }


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


@contextmanager
def held(module: nn.Module, masks: Masks) -> Iterator[None]:
    """Set what is masked to zero, and keep it there while the block trains the module.

    A weight of zero without a gradient stays zero by SGD with momentum and decay, and by Adam.

    Raises:
        PassError: a weight that is masked is not zero at the end.
    """
    weights: dict[str, Any] = {name: module.get_submodule(name).weight for name in masks}
    hooks = []
    for name, weight in weights.items():
        with torch.no_grad():
            weight.mul_(masks[name])
        hooks.append(weight.register_hook(_without(masks[name])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for name, mask in masks.items():
        weight = module.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        if bool(weight.detach().cpu()[~mask].any()):
            raise PassError(f"weights of {name} that were pruned have been trained")


def _without(mask: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: gradient * mask.to(gradient.device)


def zeros(masks: Masks, module: nn.Module) -> list[Effect]:
    """How many of each layer's weights are zero, and of all, in percent, before they are masked and after."""
    before, after = [], []
    for name, mask in masks.items():
        weight: Any = module.get_submodule(name).weight
        before.append((weight == 0).flatten())
        after.append(before[-1] | ~mask.flatten())
    whole = Effect(WHOLE, f"{ZEROS}, simulated at 1.0 times the speed", _share(*before), _share(*after))
    shares = zip(masks, before, after, strict=True)
    return [*(Effect(name, ZEROS, _share(was), _share(now)) for name, was, now in shares), whole]


def _share(*which: torch.Tensor) -> float:
    return 100 * float(torch.cat(which).double().mean())
