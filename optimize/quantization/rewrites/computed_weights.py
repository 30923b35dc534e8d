"""Stores weights that a layer computes at each call as constants. Quantizing and copying need stored weights."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

#: The hooks that computed weights before parametrisations existed. Such a weight is a plain attribute with a gradient.
#: Torch's ``deepcopy`` refuses it, and torch.ao (2.11 to 2.14) does not see it as a weight.
_HOOKS = (WeightNorm, SpectralNorm)


def store_weights(module: nn.Module) -> None:
    """Replace layers with computed weights by torch's own layers with the computed values, in place.

    torch.ao (2.11 to 2.14) writes to the weights of layers that it trains. ``remove_parametrizations`` is not used
    because it changes a layer's class. Copies of the layer share that class and would lose their weights.

    Args:
        module: in eval mode, traced or not.
    """
    known: dict[int, nn.Module] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if is_parametrized(layer):
            module.set_submodule(name, known.setdefault(id(layer), _stored(layer)))
        elif any(isinstance(hook, _HOOKS) for hook in layer._forward_pre_hooks.values()):
            module.set_submodule(name, known.setdefault(id(layer), _unhooked(layer)))


def _stored(layer: Any) -> nn.Module:
    own: Any = type(layer).__mro__[1]  # the class that was parametrised
    modules = {name: module for name, module in layer._modules.items() if name != "parametrizations"}
    plain = _with(layer, own, _parameters=dict(layer._parameters), _modules=modules)
    for name in layer.parametrizations:
        plain.register_parameter(name, nn.Parameter(getattr(layer, name).detach().clone()))
    return plain


def _unhooked(layer: Any) -> nn.Module:
    hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, _HOOKS)]
    others = {key: hook for key, hook in layer._forward_pre_hooks.items() if hook not in hooks}
    computed = {hook.name: _computed(layer, hook) for hook in hooks}
    parts = {f"{name}_{part}" for name in computed for part in ("g", "v", "orig", "u")}
    plain = _with(
        layer,
        type(layer),
        _parameters={name: value for name, value in layer._parameters.items() if name not in parts},
        _buffers={name: value for name, value in layer._buffers.items() if name not in parts},
        _forward_pre_hooks=OrderedDict(others),
        # The hooks of a spectral norm expect its vectors.
        _state_dict_hooks=OrderedDict(),
        _load_state_dict_pre_hooks=OrderedDict(),
    )
    for name, weight in computed.items():
        plain.__dict__.pop(name, None)
        plain.register_parameter(name, nn.Parameter(weight.detach().clone()))
    return plain


def _computed(layer: nn.Module, hook: Any) -> Any:
    return hook.compute_weight(layer, False) if isinstance(hook, SpectralNorm) else hook.compute_weight(layer)


def _with(layer: nn.Module, own: Any, **changed: Any) -> nn.Module:
    plain: nn.Module = own.__new__(own)
    plain.__dict__ = {**layer.__dict__, **changed}
    return plain
