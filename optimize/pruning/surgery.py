"""Removes channels: shrinks tensors, updates layers, and rewrites the numbers in the graph."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from optimize.errors import PassError
from optimize.pruning.groups import Grouping
from optimize.pruning.operations import CONVOLUTIONS, PADS, RESHAPES, SPLITS, entry_of
from optimize.tracing.trace import trace

#: The shapes of a pruned network where they differ from its parent's: channels ``[out, in]`` of each changed layer,
#: ``[channels]`` of each changed norm, and ``[dim, number, …]`` of each node that counts channels.
Structure = Mapping[str, Mapping[str, list[int]]]

_Places = Mapping[str, tuple[torch.Tensor, ...]]


def remove(graph_module: fx.GraphModule, grouping: Grouping, units: Iterable[int]) -> Structure:
    """Remove units from a traced module, in place, and return its new structure."""
    gone = torch.tensor(sorted(units), dtype=torch.int64)
    channels = grouping.channels

    def stay(labels: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(~torch.isin(channels.labels.sets(labels), gone)).flatten()

    sides: dict[str, tuple[torch.Tensor, ...]] = {
        name: (layer.out, layer.into) for name, layer in channels.layers.items()
    }
    sides |= {name: (labels,) for name, labels in channels.norms.items()}
    places = {name: tuple(map(stay, parts)) for name, parts in sides.items()}
    places = {name: parts for name, parts in places.items() if [*map(len, parts)] != [*map(len, sides[name])]}
    cuts = {
        name: [cut.dim, *(len(stay(part)) for part in cut.parts)]
        for name, cut in channels.cuts.items()
        if any(len(stay(part)) != len(part) for part in cut.parts)
    }
    _shrink(graph_module, places, cuts)
    return {"layers": {name: [len(part) for part in parts] for name, parts in places.items()}, "nodes": cuts}


def resized(module: nn.Module, structure: Structure, example: torch.Tensor | None = None) -> fx.GraphModule:
    """Trace ``module`` again and give it the shapes of a structure from `remove`. Its weights are arbitrary.

    ``example`` is an input, see `trace`.

    Raises:
        PassError: the structure does not fit this module.
    """
    graph_module = trace(module, example)
    layers, nodes = structure.get("layers", {}), structure.get("nodes", {})
    places = {name: tuple(map(torch.arange, sizes)) for name, sizes in layers.items()}
    try:
        _shrink(graph_module, places, nodes)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise PassError(f"the stored shapes of a pruned network do not fit this model: {error}") from None
    return graph_module.eval()


def joined(before: Structure, after: Structure) -> Structure:
    """Return the structure after two prunings of one graph with the same names."""
    return {part: {**before.get(part, {}), **after.get(part, {})} for part in ("layers", "nodes")}


def masked(graph_module: fx.GraphModule, grouping: Grouping, units: Iterable[int]) -> fx.GraphModule:
    """Return a copy of the whole module in which no layer reads the units. It computes the same as without them."""
    blind = copy.deepcopy(graph_module)
    gone = torch.tensor(sorted(units), dtype=torch.int64)
    for name, layer in grouping.channels.layers.items():
        weight: Any = blind.get_submodule(name).weight
        unread = torch.isin(grouping.channels.labels.sets(layer.into), gone)
        with torch.no_grad():
            if layer.per_group is None:
                weight[:, unread] = 0
            else:  # whole groups are removed, and these are their outputs
                weight[torch.isin(grouping.channels.labels.sets(layer.out), gone)] = 0
    return blind


def _shrink(graph_module: fx.GraphModule, places: _Places, cuts: Mapping[str, list[int]]) -> None:
    for name, parts in places.items():
        layer: Any = graph_module.get_submodule(name)
        _keep_tensors(layer, parts)
        if isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = map(len, parts)
        elif type(layer) in CONVOLUTIONS:
            if layer.groups > 1:
                layer.groups = layer.groups * len(parts[1]) // layer.in_channels
            layer.out_channels, layer.in_channels = map(len, parts)
        else:
            setattr(layer, "num_parameters" if isinstance(layer, nn.PReLU) else "num_features", len(parts[0]))
    nodes = {node.name: node for node in graph_module.graph.nodes}
    for name, (dim, *numbers) in cuts.items():
        _rewrite(nodes[name], dim, numbers)
    graph_module.graph.lint()
    graph_module.recompile()


def _keep_tensors(layer: Any, parts: tuple[torch.Tensor, ...]) -> None:
    """Keep these channels of a layer's tensors, as new tensors."""
    for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
        if not tensor.ndim:  # the number of batches that a norm has seen
            continue
        less = tensor.detach().index_select(0, parts[0].to(tensor.device))
        # A grouped convolution loses whole groups. The others read the same channels as before.
        if tensor.ndim > 1 and len(parts) > 1 and getattr(layer, "groups", 1) == 1:
            less = less.index_select(1, parts[1].to(tensor.device))
        less = less.clone(memory_format=torch.contiguous_format)
        if isinstance(tensor, nn.Parameter):
            less = nn.Parameter(less, requires_grad=tensor.requires_grad)
        setattr(layer, name, less)


def _rewrite(node: fx.Node, dim: int, numbers: list[int]) -> None:
    """Write new numbers of channels into a node. See `Cut`."""
    args: list[Any] = list(node.args)
    if node.target in PADS:
        pads: list[Any] = list(args[1]) if len(args) > 1 else [*node.kwargs["pad"]]  # type: ignore[misc]
        place = 2 * (-dim - 1)
        pads[place : place + 2] = numbers
        node.args, node.kwargs = (
            (args[0], tuple(pads), *args[2:]),
            {name: value for name, value in node.kwargs.items() if name != "pad"},
        )
    elif node.target in SPLITS:
        node.op, node.target, node.args, node.kwargs = "call_function", torch.split, (args[0], numbers, dim), {}
    elif node.target in RESHAPES:
        whole = isinstance(args[1], list | tuple)
        sizes = list(args[1] if whole else args[1:])
        sizes[dim] = numbers[0]
        node.args = (args[0], tuple(sizes)) if whole else (args[0], *sizes)
    else:
        entries = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
        entry = entry_of(entries, dim)
        assert entry is not None
        entries[entry] = slice(numbers[0], sum(numbers))
        node.args = (args[0], tuple(entries))
