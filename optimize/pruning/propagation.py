"""Finds which channels of a network belong together, by running its graph once with labels beside every channel.

Each tensor has a tensor of labels (see `optimize.pruning.channel_labels`). A convolution gives its outputs new labels.
A sum of two tensors ties their labels. An operation that moves values is executed on the labels themselves, so that a
concat, a slice or a flatten needs no rule. An unknown operation keeps the channels that reach it, with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from optimize.pruning.channel_labels import Labels, channel_dims, squeezed
from optimize.pruning.channels import Channels, Cut, Layer
from optimize.pruning.operations import (
    BINARY,
    CONCATS,
    CONVOLUTIONS,
    MOVEMENTS,
    PADS,
    PER_CHANNEL,
    PLACEWISE,
    POOLS,
    REDUCTIONS,
    RESHAPES,
    SAME_SHAPE,
    SPLITS,
    dims_of,
    in_batches,
    sliced,
)


def channels_of(graph_module: fx.GraphModule, example: torch.Tensor) -> Channels:
    """Run a traced module in eval mode on ``example``, ``(N, C, H, W)``, and find which channels belong together."""
    run = _Propagation(graph_module, len(example))
    with torch.no_grad():
        run.run(example)
    run.keep_shared()
    return Channels(run.labels, run.layers, run.norms, run.cuts)


class _Propagation(fx.Interpreter):
    """Runs the graph. ``known`` has the labels of each tensor that a node gives, in the node's own nesting."""

    def __init__(self, graph_module: fx.GraphModule, images: int) -> None:
        super().__init__(graph_module)
        self.images = images
        self.labels = Labels()
        self.layers: dict[str, Layer] = {}
        self.norms: dict[str, torch.Tensor] = {}
        self.cuts: dict[str, Cut] = {}
        self.known: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """See `fx.Interpreter`."""
        value = super().run_node(n)
        if n.op == "output":
            self._keep(n, "they are the network's outputs")
        elif n.op == "placeholder":
            self.known[n] = self._kept(value, "they meet the images")
        elif n.op == "get_attr":
            self.known[n] = self._kept(value, f"they meet the tensor {n.target}")
        elif _tensors(value):
            self.known[n] = self._labelled(n, value)
        return value

    def keep_shared(self) -> None:
        """Keep layers whose tensors are also read elsewhere."""
        owners: dict[int, set[str]] = {}
        for name, layer in self.module.named_modules():
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                owners.setdefault(id(tensor), set()).add(name)
        graph: Any = self.module.graph
        for node in graph.nodes:
            if node.op == "get_attr":
                owners.setdefault(id(self.fetch_attr(str(node.target))), set()).add("")
        for names in owners.values():
            for name in sorted(names) if len(names) > 1 else ():
                reason = f"the weights of {name} are read elsewhere, too"
                if name in self.layers:
                    self.labels.keep(torch.cat([self.layers[name].out, self.layers[name].into]), reason)
                if name in self.norms:
                    self.labels.keep(self.norms[name], reason)

    def _labelled(self, node: fx.Node, value: Any) -> Any:
        """Return the labels of a node's value."""
        found = self._of_module(node, value) if node.op == "call_module" else self._of_call(node, value)
        if found is None:
            self._keep(node, f"they reach {_words(self, node)}, through which channels are not followed")
            return self._kept(value, f"they meet what {_words(self, node)} gives, which is not followed")
        return found

    # --- modules

    def _of_module(self, node: fx.Node, value: Any) -> Any:  # noqa: PLR0911 - a rule each
        layer = self.fetch_attr(str(node.target))
        if is_parametrized(layer) or layer._forward_pre_hooks or layer._forward_hooks or len(node.args) != 1:
            return None
        given, kind = self._given(node.args[0]), type(layer)
        if given is None or not isinstance(value, torch.Tensor) or not in_batches(kind, given.shape):
            return None
        if kind in CONVOLUTIONS or kind is nn.Linear:
            return self._layer(node, layer, given, value)
        if kind in PER_CHANNEL and getattr(layer, "num_parameters", 2) > 1:
            vector = self._vector(given, 1 - value.ndim, node)
            name = str(node.target)
            self.labels.tie(self.norms.setdefault(name, vector), vector)
            return given.labels
        if kind in PLACEWISE or kind is nn.PReLU:
            return given.labels
        if kind in POOLS:
            self._vector(given, 1 - value.ndim, node)
            return given.labels
        if kind is nn.Flatten:
            return self._moved(layer(given.expanded()))
        return None

    def _layer(self, node: fx.Node, layer: Any, given: _Given, value: torch.Tensor) -> torch.Tensor:
        """Give the outputs of a convolution or a linear layer new labels."""
        name = str(node.target)
        dim = -1 if isinstance(layer, nn.Linear) else 1 - value.ndim
        into = self._vector(given, dim, node)
        groups = getattr(layer, "groups", 1)
        count = value.shape[dim]
        before = self.layers.get(name)
        out = before.out if before else self.labels.fresh(count)
        places = value.numel() // (self.images * count)
        if before is not None:
            self.labels.tie(before.into, into)
        per_group = len(into) // groups if groups > 1 else None
        kernel = tuple(layer.weight.shape[2:])
        self.layers[name] = Layer(name, out, into, per_group, kernel, places + (before.places if before else 0))
        if groups > 1:
            for whole in zip(into.chunk(groups), out.chunk(groups), strict=True):
                members = torch.cat(whole)
                self.labels.tie(members[:1].expand_as(members), members)
        shape = [1] * value.ndim
        shape[dim] = count
        return out.view(shape)

    # --- functions and methods

    def _of_call(self, node: fx.Node, value: Any) -> Any:  # noqa: PLR0911 - a rule each
        target = node.target
        if target in BINARY:
            return self._together(node, value)
        if target in SAME_SHAPE and not any(map(self._given, node.all_input_nodes[1:])):
            given = self._given(node.all_input_nodes[0])
            return given.labels if given else None
        if target in CONCATS:
            return self._concat(node, value)
        if target is operator.getitem:
            return self._item(node)
        given = self._given(node.args[0]) if node.args else None
        if given is None or (target not in SPLITS and not isinstance(value, torch.Tensor)):
            return None
        if target in POOLS and in_batches(target, given.shape):
            self._vector(given, 1 - value.ndim, node)
            return given.labels
        if target in REDUCTIONS:
            dims = dims_of(node, given.shape)
            if dims is None or set(dims) & set(channel_dims(given.labels)):
                return None
            keepdim = value.ndim == len(given.shape)
            return squeezed(given.expanded().amax(dims, keepdim=keepdim))
        if target in PADS:
            return self._padded(node, given, value)
        if target in SPLITS:
            return self._split(node, given, value)
        if target in MOVEMENTS and not any(map(self._given, node.all_input_nodes[1:])):
            moved = self._moved(self._executed(node))
            if target in RESHAPES:
                self._count(node, moved)
            return moved
        return None

    def _together(self, node: fx.Node, value: torch.Tensor) -> Any:
        """Tie the channels of two tensors in a sum or product."""
        operands = [given for argument in node.args[:2] if (given := self._given(argument))]
        if not operands or len(operands) < len(_tensors([self.env[read] for read in node.all_input_nodes])):
            return None
        dims = {dim for given in operands for dim in channel_dims(given.labels)}
        if not dims:
            return operands[0].labels.flatten().view([1] * value.ndim)
        if len(dims) > 1:
            return None
        (dim,) = dims
        labelled = [given for given in operands if dim + len(given.shape) >= 0 and given.shape[dim] > 1]
        first, *others = [given.vector(dim) for given in labelled]
        for other in others:
            self.labels.tie(first, other)
        shape = [1] * value.ndim
        shape[dim] = len(first)
        return first.view(shape)

    def _concat(self, node: fx.Node, value: torch.Tensor) -> Any:
        parts = [self._given(argument) for argument in node.args[0]]  # type: ignore[union-attr]
        place = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        if not isinstance(place, int) or not all(parts):
            return None
        given = [part for part in parts if part]
        dims = {dim for part in given for dim in channel_dims(part.labels)}
        joined = place - value.ndim if place >= 0 else place
        if dims <= {joined}:
            return self._moved(torch.cat([part.expanded() for part in given], joined))
        if len(dims) > 1:
            return None
        (dim,) = dims
        for part in given[1:]:
            self.labels.tie(given[0].vector(dim), part.vector(dim))
        return given[0].labels

    def _item(self, node: fx.Node) -> Any:
        source, index = node.args
        entry: Any = index
        known: Any = self.known[source] if isinstance(source, fx.Node) else None
        if not isinstance(known, torch.Tensor):
            return known[entry] if isinstance(known, tuple) and isinstance(entry, int) else None
        given = self._given(source)
        if given is None or any(map(self._given, node.all_input_nodes[1:])):  # an index that is a tensor
            return None
        moved = self._executed(node)
        for dim in channel_dims(given.labels):
            place = len(given.shape) + dim
            taken: Any = self.map_nodes_to_values((index,), node)
            part = sliced(taken[0], place, given.shape[dim])
            if part is None:
                return None
            start, stop = part
            vector = given.vector(dim)
            if (start, stop) != (0, len(vector)):
                self.cuts[node.name] = Cut(node.name, place, (vector[:start], vector[start:stop]))
        return self._moved(moved)

    def _padded(self, node: fx.Node, given: _Given, value: torch.Tensor) -> Any:
        arguments = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | node.kwargs
        (dims, pads) = channel_dims(given.labels), arguments["pad"]
        if not dims or not isinstance(pads, list | tuple):
            return None
        place = 2 * (-dims[0] - 1)
        pair: Any = tuple(pads[place : place + 2])
        if pair in ((), (0, 0)):
            return given.labels
        if arguments.get("mode", "constant") != "constant" or not all(type(each) is int and each >= 0 for each in pair):
            return None
        before, after = (self.labels.fresh(each) for each in pair)
        self.cuts[node.name] = Cut(node.name, dims[0], (before, after))
        shape = [1] * value.ndim
        shape[dims[0]] = -1
        return torch.cat([before, given.vector(dims[0]), after]).view(shape)

    def _split(self, node: fx.Node, given: _Given, value: Any) -> Any:
        place = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        if not isinstance(place, int):
            return None
        parts = tuple(self._moved(part) for part in self._executed(node))
        dim = place - len(given.shape) if place >= 0 else place
        if channel_dims(given.labels) == [dim]:
            vectors = torch.split(given.vector(dim), [part.shape[dim] for part in value])
            self.cuts[node.name] = Cut(node.name, dim, vectors)
        return parts

    def _count(self, node: fx.Node, moved: torch.Tensor) -> None:
        """Record a reshape with a fixed number of channels."""
        sizes: Any = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], list | tuple) else node.args[1:]
        for dim in channel_dims(moved):
            if len(sizes) != moved.ndim:
                self.labels.keep(moved, f"{node.name} gives their shape in a way that is not followed")
            elif type(size := sizes[dim]) is int and size != -1:
                self.cuts[node.name] = Cut(node.name, dim, (moved.flatten(),))

    # --- what they share

    def _executed(self, node: fx.Node) -> Any:
        """Return the result of a node that only moves values, executed on labels."""

        def labels_or_value(read: fx.Node) -> Any:
            given = self._given(read)
            return given.expanded() if given else self.env[read]

        args = fx.node.map_arg(node.args, labels_or_value)
        kwargs = fx.node.map_arg(node.kwargs, labels_or_value)
        run = self.call_method if node.op == "call_method" else self.call_function
        return run(node.target, args, kwargs)

    def _moved(self, labels: torch.Tensor) -> torch.Tensor:
        """Return labels that were moved with their values. If they spread over several dimensions, they must stay."""
        found = squeezed(labels)
        if len(channel_dims(found)) > 1:
            reason = "they are split over two dimensions, as in a channel shuffle"
            self.labels.keep(found, reason)
            return found.flatten()[:1].view([1] * found.ndim)
        return found

    def _given(self, argument: Any) -> _Given | None:
        """Return a tensor that a node reads, with its labels."""
        if not isinstance(argument, fx.Node) or not isinstance(labels := self.known.get(argument), torch.Tensor):
            return None
        return _Given(labels, tuple(self.env[argument].shape))

    def _vector(self, given: _Given, dim: int, node: fx.Node) -> torch.Tensor:
        """Return the labels along a dimension. If they change along another one, they must stay."""
        if not set(channel_dims(given.labels)) <= {dim}:
            self.labels.keep(
                given.labels, f"{_words(self, node)} reads them in a dimension that is not that of channels"
            )
            return given.labels.flatten()[:1].expand(given.shape[dim])
        return given.vector(dim)

    def _kept(self, value: Any, reason: str) -> Any:
        """Return labels for values that are no layer's channels, in their nesting: one label that must stay."""
        if isinstance(value, torch.Tensor):
            label = self.labels.fresh(1)
            self.labels.keep(label, reason)
            return label.view([1] * value.ndim)
        return tuple(self._kept(part, reason) for part in value) if isinstance(value, list | tuple) else None

    def _keep(self, node: fx.Node, reason: str) -> None:
        for read in node.all_input_nodes:
            for labels in _tensors(self.known.get(read)):
                self.labels.keep(labels, reason)


@dataclass(frozen=True)
class _Given:
    """Squeezed labels of a tensor, and its shape."""

    labels: torch.Tensor
    shape: tuple[int, ...]

    def expanded(self) -> torch.Tensor:
        return self.labels.expand(self.shape)

    def vector(self, dim: int) -> torch.Tensor:
        """Return the labels along ``dim``, counted from the last.

        Missing dimensions, or a single label, are repeated.
        """
        along = self.labels.flatten()
        return along if len(along) > 1 else along.expand(self.shape[dim])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in _tensors(part)] if isinstance(value, list | tuple | dict) else []


def _words(run: fx.Interpreter, node: fx.Node) -> str:
    """Describe a node: a module by its class and name, others by the function that they call."""
    if node.op == "call_module":
        return f"{type(run.fetch_attr(str(node.target))).__name__} {node.target}"
    target: str | Callable[..., Any] = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
