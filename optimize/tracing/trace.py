"""Symbolic tracing: from a module to its FX graph."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from optimize.errors import PassError
from optimize.tracing.constants import NotConstantError, constant_value
from optimize.tracing.foreign_layers import OF_LAYERS, LayerTracer, as_plain_layers
from optimize.tracing.needed_dropouts import write_as_layers
from optimize.tracing.proxies import taken_for_tensors, without_proxies
from optimize.tracing.shape_tracer import ShapedTracer
from serve.runtime.errors import one_line

#: Key in a traced module's ``meta``: a sentence for each layer that was left unchanged, by layer name. The empty name
#: stands for the whole network.
LEFT = "left"


def trace(module: nn.Module, example: torch.Tensor | None = None) -> fx.GraphModule:
    """Symbolically trace a module in eval mode.

    ``example`` is an input ``(N, C, H, W)``. A forward that branches on sizes or computes with them is traced for the
    sizes of the example, except the batch size. See `optimize.tracing.shape_tracer`. Without an example such a forward
    is refused.

    Eval mode matters. FX stores ``self.training`` in calls such as ``F.dropout(x, training=…)`` and torchvision's
    ``stochastic_depth``. Traced in training mode they would stay active for ever. With an example, a dropout whose
    result is overwritten becomes a layer. See `optimize.tracing.needed_dropouts`.

    A submodule whose forward cannot be traced stays one call, as long as there are other layers with weights. Autocast
    is removed. Both are reported in `LEFT` of the graph module's ``meta``.

    Inputs other than the images take their defaults. Subclasses of torch's layers become torch's own where they compute
    the same. See `optimize.tracing.foreign_layers`.

    Raises:
        PassError: the forward cannot be traced, for example because it branches on tensor values.
    """
    tracer, graph, kept = _traced(module.eval(), example)
    graph_module = fx.GraphModule(tracer.root, graph, type(module).__name__)
    graph_module.meta[LEFT] = kept
    _ask_the_images(graph_module)
    _detach(graph_module)
    _set(graph_module)
    _settle_numbers(graph_module)
    if example is not None:
        write_as_layers(graph_module, example)
    as_plain_layers(graph_module)
    return graph_module


def note_shapes(graph_module: fx.GraphModule, example: torch.Tensor) -> None:
    """Note the shape and dtype of each node for ``example``, ``(N, C, H, W)``, as its ``tensor_meta``."""
    with torch.no_grad():
        ShapeProp(graph_module).propagate(example.clone())  # a network may change its images in place


def calls(graph_module: fx.GraphModule) -> Counter[int]:
    """Count the calls of each layer by its `id`. A layer with two names is one layer."""
    called = (node.target for node in graph_module.graph.nodes if node.op == "call_module")
    return Counter(id(graph_module.get_submodule(str(name))) for name in called)


def _traced(module: nn.Module, example: torch.Tensor | None) -> tuple[fx.Tracer, fx.Graph, dict[str, str]]:
    """Return the tracer, the graph, and a reason for each submodule that stays one call.

    All sizes are calls in the graph where that is possible.

    Raises:
        PassError: the forward cannot be traced.
    """
    # Trace into torch's transformers if possible. With a mask they may take another branch.
    wholes = (False, True) if any(type(layer) in OF_LAYERS for layer in module.modules()) else (False,)
    ways = list(itertools.product(wholes, (False, True) if example is not None else (False,)))
    # First the whole network. Then with some modules kept, and the most able tracer first, as it keeps the fewest.
    attempts = [
        *((whole, shaped, False) for whole, shaped in ways),
        *((whole, shaped, True) for whole, shaped in reversed(ways)),
    ]
    errors = []
    for whole, shaped, keeping in attempts:
        kept: dict[str, str] = {}
        while True:
            of_shapes = shaped and example is not None
            tracer = ShapedTracer(example, whole, kept) if of_shapes else LayerTracer(whole, kept)  # type: ignore[arg-type]
            try:
                with taken_for_tensors(), without_proxies(module), without_autocast(kept):
                    graph = tracer.trace(module)
                graph.lint()  # a value that a forward stored and reads again may belong to another graph
                return tracer, graph, kept
            except Exception as error:  # noqa: BLE001 - the user's forward runs on proxies and may raise anything
                errors.append(error)
                failed = tracer.failed
                if not keeping or failed is None or failed in kept or not _weights_beside(module, (failed, *kept)):
                    break
                kept[failed] = f"{failed} stays as it is: {one_line(error)}"
    raise PassError(f"torch.fx cannot trace this model: {one_line(errors[len(ways) - 1])}") from None


def _weights_beside(module: nn.Module, kept: Iterable[str]) -> bool:
    """Tell whether a network has weights outside the named modules."""
    inside = {id(parameter) for name in kept for parameter in module.get_submodule(name).parameters()}
    return any(id(parameter) not in inside for parameter in module.parameters())


@contextlib.contextmanager
def without_autocast(left: dict[str, str] | None = None) -> Iterator[None]:
    """Disable autocast within the block, and write a sentence to ``left`` if there was one. See `LEFT`.

    A traced graph has no autocast. A module that stays one call would compute in another type than an ONNX engine does.
    """
    before = torch.autocast.__enter__, torch.autocast.__exit__

    def enter(self: torch.autocast) -> torch.autocast:
        if self._enabled and left is not None:
            left[""] = "autocast is ignored: everything is computed in float32"
        return self

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda self, *error: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = before  # type: ignore[method-assign]


def graph_as_is(module: nn.Module, example: torch.Tensor | None = None, *, training: bool = False) -> fx.Graph:
    """Return the graph of a module with its layers unchanged, in the mode in which it is to run.

    `trace` makes a new module that computes the same in eval mode. This graph is of the module itself, so that it can
    be trained. For a graph module it is a copy of its own graph.

    Raises:
        PassError: as `trace`.
    """
    if isinstance(module, fx.GraphModule):
        return copy.deepcopy(module.graph)
    before = [(layer, layer.training) for layer in module.modules()]
    try:
        _, graph, _ = _traced(module.train(training), example)
    finally:
        for layer, mode in before:
            layer.training = mode
    return graph


def _ask_the_images(graph_module: fx.GraphModule) -> None:
    """Take device and dtype of new tensors from the images instead of a weight.

    XCiT creates its positions on the device of a layer's weight. In an int8 layer ``weight`` is a method.
    """
    graph = graph_module.graph
    images = next(node for node in graph.nodes if node.op == "placeholder")
    for node in list(graph.nodes):
        if node.target is not getattr or node.args[1] not in ("device", "dtype") or node.args[0].op != "get_attr":
            continue
        weight, asked = node.args
        node.args = (images, asked)
        if not weight.users:
            graph.erase_node(weight)


def _detach(graph_module: fx.GraphModule) -> None:
    """Write ``x.data`` as ``x.detach()``. Torch (2.11 to 2.14) exports the value of ``x.data`` as a constant."""
    for node in graph_module.graph.nodes:
        if node.target is getattr and node.args[1:] == ("data",):
            node.op, node.target, node.args = "call_method", "detach", node.args[:1]


def _set(graph_module: fx.GraphModule) -> None:
    """Make readers of a tensor after ``y.set_(x)`` read ``x``. Reversible networks use it.

    ``y.set_()`` without ``x`` empties ``y``. Torch (2.11 to 2.14) has no gradient for either, and its exporter has no
    translation.
    """
    for node in list(graph_module.graph.nodes):
        if node.op != "call_method" or node.target != "set_" or len(node.args) > 2:
            continue
        tensor = node.args[0]
        readers = {reader for reader in (*node.users, *tensor.users) if reader > node}
        if len(node.args) == 1 and readers:
            continue  # the tensor is empty from here on
        for reader in readers:
            for name in (node, tensor):
                reader.replace_input_with(name, node.args[1])
        graph_module.graph.erase_node(node)


def _settle_numbers(graph_module: fx.GraphModule) -> None:
    """Replace numbers read from the network's own tensors, such as ``self.temperature.item()``, by their value."""
    known: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: known.get(used, used))
        if node.op == "call_method" and node.target == "item":
            with contextlib.suppress(NotConstantError):
                known[node] = constant_value(graph_module, node)
    for node in reversed(known):
        graph_module.graph.erase_node(node)
