"""Cross-layer equalization: scales channels of neighbouring layers against each other until their ranges are alike.

Source: Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and Bias Correction (arXiv:1906.04721),
section 4.1. The input of a ReLU can be divided by s and its output multiplied by s, channel by channel. With s =
sqrt(r1 r2) / r2 a channel's range is the same in both weights. A ReLU6 is not homogeneous, and the paper replaces it by
a ReLU. Here its bound is divided, too: ``minimum(relu(x), 6 / s)`` gives the result of the ReLU6. Quantization turns
the bounds of the channels into one, the largest (see `relu6`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from optimize.store.layer_effects import Effect
from optimize.tracing.constants import attribute
from optimize.tracing.naming import free_name

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)
#: Layers with f(s x) = s f(x), channel by channel, where s > 0.
_HOMOGENEOUS = (
    *(nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout2d),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
_HOMOGENEOUS_FUNCTIONS = (torch.relu, functional.relu)
#: Rounds over all pairs. Networks need fewer, the paper's and others.
_ROUNDS = 50
_SETTLED = 1e-4
#: A larger scale belongs to a dead channel.
_LARGEST = 2.0**12

FIGURE = "weight range, largest channel to median"


@dataclass(frozen=True)
class Pair:
    """Two layers, the second of which is the only reader of the first. ``bound`` is the ReLU6 between them, if any.

    With a bound for each channel it is the node that reads the bounds.
    """

    first: str
    second: str
    bound: fx.Node | None = None


def pairs(module: fx.GraphModule) -> list[Pair]:
    """Return the pairs of a traced module without norms, in the graph's order. No pair spans a sum or a branch."""
    calls, tied = reads_of(module)
    found = []
    for node in module.graph.nodes:
        if not plain(module, node, calls, tied):
            continue
        bound, after = None, _only_user(node)
        while after is not None and (homogeneous(module, after) or (bound is None and _is_relu6(module, after))):
            bound = after if _is_relu6(module, after) else bound
            after = _only_user(after)
        if after is None or not plain(module, after, calls, tied):
            continue
        first, second = (module.get_submodule(str(layer.target)) for layer in (node, after))
        if isinstance(first, nn.Linear) == isinstance(second, nn.Linear):
            found.append(Pair(str(node.target), str(after.target), bound))
    return found


def reads_of(module: fx.GraphModule) -> tuple[Counter[str], Counter[int]]:
    """Return how often each layer is called, and how often each parameter is used, by its id."""
    calls = Counter(str(node.target) for node in module.graph.nodes if node.op == "call_module")
    tied = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    read = (attribute(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr")
    tied.update(id(value) for value in read)
    return calls, tied


def bound_channels(module: fx.GraphModule, found: Sequence[Pair]) -> list[Pair]:
    """Replace the ReLU6 of each pair by a ReLU and a minimum with a bound for each channel, in place.

    The answers stay the same.

    Returns:
        The pairs with these bounds.
    """
    bounded = []
    for pair in found:
        if pair.bound is None:
            bounded.append(pair)
            continue
        layer = module.get_submodule(pair.first)
        name = free_name(module, f"{pair.first.replace('.', '_')}_bound")
        module.register_buffer(name, torch.full((_channels(layer), *[1] * (_ndim(layer) - 2)), 6.0))
        with module.graph.inserting_before(pair.bound):
            relu = module.graph.call_function(torch.relu, (pair.bound.args[0],))
            bounds = module.graph.get_attr(name)
            least = module.graph.call_function(torch.minimum, (relu, bounds))
        pair.bound.replace_all_uses_with(least)
        module.graph.erase_node(pair.bound)
        bounded.append(dataclasses.replace(pair, bound=bounds))
    module.delete_all_unused_submodules()
    module.graph.lint()
    module.recompile()
    return bounded


def equalize(module: fx.GraphModule, found: Sequence[Pair]) -> list[Effect]:
    """Scale the weights of all pairs, in place, in turns until none changes.

    Args:
        module: after `bound_channels`.
        found: the pairs that it returned.

    Returns:
        For each layer, the ratio of its largest output channel's range to the median range.
    """
    names = list(dict.fromkeys(name for pair in found for name in (pair.first, pair.second)))
    before = {name: spread(module.get_submodule(name)) for name in names}
    for _ in range(_ROUNDS):
        changes = [_scale(module, pair) for pair in found]
        if max(changes, default=0.0) < _SETTLED:
            break
    return [Effect(name, FIGURE, before[name], spread(module.get_submodule(name))) for name in names]


def spread(layer: nn.Module) -> float:
    """Return the range of the output channel with the largest weight, over that of the median non-zero channel."""
    ranges = _outgoing(layer)
    ranges = ranges[ranges > 0]
    return float(ranges.max() / ranges.median()) if len(ranges) else 1.0


@torch.no_grad()
def _scale(module: fx.GraphModule, pair: Pair) -> float:
    """Divide the channels of the first layer and multiply those of the second. Return the largest change, or 0."""
    first, second = module.get_submodule(pair.first), module.get_submodule(pair.second)
    before, after = _outgoing(first), _incoming(second)
    alive = (before > 0) & (after > 0)
    ratio = (before / after.clamp(min=torch.finfo(after.dtype).tiny)).sqrt()
    scale = torch.where(alive, ratio, 1.0).clamp(1 / _LARGEST, _LARGEST)
    multiply_rows(first, 1 / scale)
    if pair.bound is not None:
        bounds: torch.Tensor = module.get_buffer(str(pair.bound.target))
        bounds.div_(scale.view_as(bounds).to(bounds.dtype))
    multiply_inputs(second, scale)
    return float((scale.log()).abs().max())


def _outgoing(layer: nn.Module) -> torch.Tensor:
    """Return the largest magnitude of each output channel's weights, ``float64 (out,)``."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.detach().double().flatten(1).abs().amax(1)


def _incoming(layer: nn.Module) -> torch.Tensor:
    """Return the largest magnitude of each input channel's weights, ``float64 (in,)``."""
    return _by_input(layer).detach().double().abs().flatten(2).amax((1, 2)).flatten()


def _by_input(layer: nn.Module) -> torch.Tensor:
    """Return the weight as ``(groups * in a group, out a group, …)``: a row for each input channel."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    groups = int(getattr(layer, "groups", 1))
    grouped = weight.reshape(groups, -1, *weight.shape[1:])  # (groups, out a group, in a group, …)
    swapped = grouped.transpose(1, 2)
    return swapped.reshape(-1, *swapped.shape[2:], *[1] * (weight.ndim == 2))


@torch.no_grad()
def multiply_rows(layer: nn.Module, factor: torch.Tensor) -> None:
    """Multiply each output channel of a layer by its factor, ``(out,)``, in place."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    weight.copy_(weight.double() * factor.view(-1, *[1] * (weight.ndim - 1)))
    if layer.bias is not None:
        layer.bias.copy_(layer.bias.double() * factor)  # type: ignore[operator]


@torch.no_grad()
def multiply_inputs(layer: nn.Module, factor: torch.Tensor) -> None:
    """Multiply the weights that read each input channel by its factor, ``(in,)``, in place."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    groups = int(getattr(layer, "groups", 1))
    grouped = weight.double().reshape(groups, -1, *weight.shape[1:])
    factors = factor.view(groups, 1, -1, *[1] * (weight.ndim - 2))
    weight.copy_((grouped * factors).reshape(weight.shape))


def _channels(layer: nn.Module) -> int:
    return int(layer.weight.shape[0])  # type: ignore[index]


def _ndim(layer: nn.Module) -> int:
    return int(layer.weight.ndim)  # type: ignore[arg-type]


def _only_user(node: fx.Node) -> fx.Node | None:
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and user.all_input_nodes[:1] == [node] else None


def plain(module: fx.GraphModule, node: fx.Node, calls: Counter[str], tied: Counter[int]) -> bool:
    """Tell whether a node calls a layer with its own weight, neither shared nor computed."""
    if node.op != "call_module":
        return False
    layer = module.get_submodule(str(node.target))
    own = all(tied[id(parameter)] == 1 for parameter in layer.parameters())
    return type(layer) in _LAYERS and calls[str(node.target)] == 1 and own and not parametrize.is_parametrized(layer)


def homogeneous(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node computes f with f(s x) = s f(x), channel by channel, where s > 0."""
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) in _HOMOGENEOUS
    return (node.op == "call_function" and node.target in _HOMOGENEOUS_FUNCTIONS) or (
        node.op == "call_method" and node.target in ("relu", "relu_")
    )


def _is_relu6(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.ReLU6
    return node.op == "call_function" and node.target is functional.relu6
