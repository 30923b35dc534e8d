"""Gives all readers of a tensor the same integers: duplicate or split observers of torch.ao are merged.

torch.ao (2.11 to 2.14) has two faults when it prepares for its packed kernels:

- A layer norm has no output range in the x86 backend, but each of its integer readers has one. It is packed with one of
  their quantizers. The other readers get integers and quantize them again, or normalise them, which fails. Swin's
  second version has such a norm, read by a sum and a view. In timm's MambaOut a sum and a norm read it.
- Concatenated tensors share one range. A view, a pool or a clamp shares the range of its input. If that input is
  concatenated, the first rule overrides the second. Examples are the patches of a ViT behind its class token, a pool in
  Inception, and a ReLU6 in a Res2Net. The packed program then concatenates integers of different scales, and warns.
"""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.ao.quantization.backend_config import ObservationType
from torch.nn import functional

from optimize.quantization.graph.nodes import TOGETHER, is_layer_norm, is_watcher, what_is_called
from optimize.quantization.targets import Target

_SHARED = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT

#: Operators that only reorder or select elements of a tensor.
_VIEWS = frozenset(
    {"reshape", "view", "permute", "transpose", "contiguous", "squeeze", "unsqueeze", torch.flatten, torch.transpose}
    | {functional.max_pool2d, nn.MaxPool2d}
)


def share_watchers(prepared: fx.GraphModule, target: Target) -> None:
    """Give all readers of a layer norm one observer, and operators that keep the scale their input's, in place.

    Args:
        prepared: with observers or fake-quantize modules.
        target: the target that it was prepared for. If torch has kernels for it, they tell which operators keep the
            scale.
    """
    configs = target.backend_config().configs if target.packed else ()
    keeping = _VIEWS | {config.pattern for config in configs if config.observation_type is _SHARED} - TOGETHER
    for node in list(prepared.graph.nodes):
        if is_layer_norm(prepared, node):
            _read_alike(prepared, node)
    for node in prepared.graph.nodes:
        if not is_watcher(prepared, node) or what_is_called(prepared, node.args[0]) not in keeping:
            continue
        before = node.args[0].args[0]
        if is_watcher(prepared, before):
            _replace(prepared, _watcher(prepared, before), _watcher(prepared, node))
    prepared.recompile()


def _read_alike(prepared: fx.GraphModule, norm: fx.Node) -> None:
    watching = [user for user in norm.users if is_watcher(prepared, user)]
    if not watching or len(norm.users) == 1:
        return
    first = watching[0]
    norm.append(first)  # right behind it, before all its readers
    for other in watching[1:]:
        other.replace_all_uses_with(first)
        prepared.graph.erase_node(other)
    for user in list(norm.users):
        if user is not first:
            user.replace_input_with(norm, first)


def _watcher(prepared: fx.GraphModule, node: fx.Node) -> nn.Module:
    return prepared.get_submodule(str(node.target))


def _replace(prepared: fx.GraphModule, old: nn.Module, new: nn.Module) -> None:
    """Put observer ``new`` everywhere in the place of ``old``."""
    if old is new:
        return
    for name, module in list(prepared.named_modules(remove_duplicate=False)):
        if module is old:
            prepared.set_submodule(name, new)
