"""Weights that a layer computes at each call (parametrised ones) as weights that it has: integers are made of those."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized


def store_weights(traced: fx.GraphModule) -> None:
    """Replace layers whose weights are computed by torch's own with what comes out, in place.

    torch.ao (2.11 to 2.14) writes to the weights of what it trains. Not by ``remove_parametrizations``, which changes a
    layer's class: copies of the layer have the same one, and would lose their weights with it.
    """
    known: dict[int, nn.Module] = {}
    for name, layer in list(traced.named_modules(remove_duplicate=False)):
        if is_parametrized(layer):
            traced.set_submodule(name, known.setdefault(id(layer), _stored(layer)))


def _stored(layer: Any) -> nn.Module:
    own: Any = type(layer).__mro__[1]  # the class that was parametrised
    plain: nn.Module = own.__new__(own)
    modules = {name: module for name, module in layer._modules.items() if name != "parametrizations"}
    plain.__dict__ = {**layer.__dict__, "_parameters": dict(layer._parameters), "_modules": modules}
    for name in layer.parametrizations:
        plain.register_parameter(name, nn.Parameter(getattr(layer, name).detach().clone()))
    return plain
