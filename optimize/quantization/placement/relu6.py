"""Writes a ReLU6 for int8 as a layer's ReLU whose range ends at 6, so that the end of the integers is the bound.

torch.ao (2.11 to 2.14) has kernels for a convolution with a ReLU, and none with a ReLU6. It would give the convolution
its own range, half of it for negative numbers that the ReLU6 cuts off. It would then clamp in another pass over memory.
If a range ends at or below 6, the largest integer stands for all values above it, and the clamp changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase, QConfigMapping
from torch.ao.quantization.observer import ObserverBase
from torch.nn import functional

from optimize.quantization.graph.nodes import called_module
from optimize.tracing.naming import free_name
from optimize.tracing.zero_padding import LAYERS as ZEROS

#: Layers whose kernels include a ReLU.
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: Operators of one tensor whose output never exceeds its values, so that a bound still holds behind them. Padding zeros
#: are below each bound. Interpolation is not included, as it may overshoot.
_WITHIN = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.Flatten, nn.Identity, nn.PixelShuffle, nn.PixelUnshuffle, *ZEROS),
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_WITHIN_FUNCTIONS = (
    *(torch.adaptive_avg_pool1d, functional.adaptive_avg_pool1d),
    *(functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d),
    *(functional.max_pool1d, functional.max_pool2d, functional.max_pool3d),
    *(torch.flatten, torch.mean, torch.reshape, torch.squeeze, torch.unsqueeze, torch.transpose, torch.permute),
)
_WITHIN_METHODS = ("contiguous", "flatten", "mean", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view")


class _Bound:
    """A pre-hook that clamps what an observer sees and passes on to the bound."""

    def __init__(self, most: float) -> None:
        self._most = most

    def __call__(self, watcher: nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return given[0].clamp(max=self._most)


def bound_relus(module: fx.GraphModule, mapping: QConfigMapping, but_not: Collection[str] = ()) -> dict[str, float]:
    """Replace each ReLU6 behind a layer that will be quantized by a ReLU, in place.

    Args:
        module: see `trace_calls`.
        mapping: which layers are quantized. None for a name means in float.
        but_not: layers whose ReLU6 stays.

    Returns:
        The bound of each such layer by its name, for `bind`.
    """
    bounds: dict[str, float] = {}
    for node in list(module.graph.nodes):
        most = _bound(module, node)
        given = _input(node)
        layer = _layer_before(module, given) if most is not None and given is not None else None
        if most is None or layer is None or layer in but_not or not _quantized(module, layer, mapping):
            continue
        name = free_name(module, f"{layer.replace('.', '_')}_relu")
        module.add_submodule(name, nn.ReLU().train(module.training))
        with module.graph.inserting_before(node):
            relu = module.graph.call_module(name, (given,))
        node.replace_all_uses_with(relu)
        module.graph.erase_node(node)
        for unused in [before for before in module.graph.nodes if before.target is torch.relu and not before.users]:
            module.graph.erase_node(unused)
        bounds[layer] = most
    module.recompile()
    return bounds


def bind(prepared: fx.GraphModule, bounds: Mapping[str, float]) -> frozenset[str]:
    """Clamp what the observers of those layers see and pass on to the layers' bounds.

    Args:
        prepared: with observers or fake-quantize modules.
        bounds: from `bound_relus`, for the module that was prepared.

    Returns:
        The layers whose observer also sees values that may exceed their bound (the other inputs of a concatenation).
            Their bound would be lost. Behind a pool, which FX gives the observer of its input, nothing can exceed it.
    """
    watching: dict[str, nn.Module] = {}
    places: defaultdict[nn.Module, list[fx.Node]] = defaultdict(list)
    for node in prepared.graph.nodes:
        watcher = called_module(prepared, node)
        if isinstance(watcher, (ObserverBase, FakeQuantizeBase)):
            places[watcher].append(node)
            if node.args[0].op == "call_module":
                watching[str(node.args[0].target)] = watcher
    own: set[str] = set()
    for name in bounds.keys() & watching.keys():
        seen = places[watching[name]]
        if all(_within(prepared, node, name, seen) for node in seen):
            own.add(name)
    for name in own:
        watching[name].register_forward_pre_hook(_Bound(bounds[name]))
    return frozenset(bounds.keys() - own)


def _within(prepared: fx.GraphModule, place: fx.Node, layer: str, places: Sequence[fx.Node]) -> bool:
    """Tell whether an observer sees at a place only a layer's output, or values that it passed on elsewhere."""
    given = place.args[0]
    while isinstance(given, fx.Node) and given not in places:
        if given.op == "call_module" and given.target == layer:
            return True
        if not _gives_no_more(prepared, given):
            return False
        given = given.args[0] if given.args else None
    return isinstance(given, fx.Node)


def _gives_no_more(prepared: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        called = prepared.get_submodule(str(node.target))
        if type(called) in _DROPOUTS:
            return not called.training  # in training it scales up the rest
        return type(called) in _WITHIN and getattr(called, "divisor_override", None) is None
    if node.op == "call_method":
        return node.target in _WITHIN_METHODS
    return node.op == "call_function" and node.target in _WITHIN_FUNCTIONS


def _bound(module: fx.GraphModule, node: fx.Node) -> float | None:
    """Return the bound of a ReLU6, of a Hardtanh from 0, or the largest of a ReLU's channels; None for other nodes."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        if type(layer) in (nn.ReLU6, nn.Hardtanh) and isinstance(layer, nn.Hardtanh) and layer.min_val == 0:
            return float(layer.max_val)
    if node.op == "call_function" and node.target is functional.relu6:
        return 6.0
    if node.op == "call_function" and node.target is torch.minimum:  # as `equalize` writes it
        relu, bounds = node.args
        if _is_relu(relu) and isinstance(bounds, fx.Node) and bounds.op == "get_attr":
            return float(getattr(module, str(bounds.target)).max())
    return None


def _is_relu(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is torch.relu and len(node.users) == 1


def _input(node: fx.Node) -> fx.Node | None:
    """Return the input of a bounded ReLU."""
    before = node.all_input_nodes[0] if node.all_input_nodes else None
    return before.all_input_nodes[0] if node.target is torch.minimum and _is_relu(before) and before else before


def _layer_before(module: fx.GraphModule, before: fx.Node) -> str | None:
    """Return the layer whose output, normalised or not, this node is, for one reader alone."""
    while before.op == "call_module" and len(before.users) == 1:
        kind = type(module.get_submodule(str(before.target)))
        if kind in _LAYERS:
            return str(before.target)
        if kind not in _NORMS:
            return None
        before = before.all_input_nodes[0]
    return None


def _quantized(module: fx.GraphModule, layer: str, mapping: QConfigMapping) -> bool:
    if layer in mapping.module_name_qconfigs:
        return mapping.module_name_qconfigs[layer] is not None
    kind = type(module.get_submodule(layer))
    return mapping.object_type_qconfigs.get(kind, mapping.global_qconfig) is not None
