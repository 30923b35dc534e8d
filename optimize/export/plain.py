"""Operators of an exported program that engines get wrong in what the exporter makes of them, written another way."""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # what registers `torch.ops.quantized_decomposed`
from torch import fx
from torch.export import ExportedProgram

#: Of ``avg_pool2d``: images and kernel, stride, padding, whether sizes are rounded up, whether zeros count, divisor.
_POOL_DEFAULTS: tuple[Any, ...] = (None, None, [], [0, 0], False, True, None)
_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


def write_out_pools(module: fx.GraphModule) -> None:
    """Write a pool of all places as the mean that it is, in place.

    torch's own (2.14) decomposition gives the answer the layout of its input, by ``as_strided``, where that is
    channels-last (behind a permute, as in ConvNeXt and Swin); the exporter makes a Gather of it, by indices that the
    graph computes. OpenVINO 2026.4.1 answers something else behind such a Gather in an int8 graph.
    """
    pool = torch.ops.aten.adaptive_avg_pool2d.default
    for node in module.graph.nodes:
        size: Any = node.args[1] if node.target is pool else None
        if size is not None and list(size) in ([1], [1, 1]):
            node.target, node.args = torch.ops.aten.mean.dim, (node.args[0], [-1, -2], True)
    module.recompile()


def write_out_borders(module: fx.GraphModule) -> None:
    """Write an average that counts the zeros around an image as one that does not, times the share it counts, in place.

    OpenVINO 2026.4.1 averages the integers of a quantized tensor with zeros that are not its zero-point: the borders of
    MaxViT's shortcuts, which no ReLU ends, were up to 62 steps off.
    """
    aten = torch.ops.aten
    for node in module.graph.nodes:
        if node.target is not aten.avg_pool2d.default or not _shifted(node.args[0]):
            continue
        given: tuple[Any, ...] = node.args
        images, kernel, stride, padding, ceil, counted, divisor = (*given, *_POOL_DEFAULTS[len(given) :])
        if not any(padding) or not counted or divisor is not None:
            continue
        with module.graph.inserting_before(node):
            ones = module.graph.call_function(aten.full.default, ([1, 1, *images.meta["val"].shape[2:]], 1.0))
            share = module.graph.call_function(node.target, (ones, *given[1:]))
            inside = module.graph.call_function(node.target, (images, kernel, stride, padding, ceil, False))
            node.replace_all_uses_with(module.graph.call_function(aten.mul.Tensor, (inside, share)))
        module.graph.erase_node(node)
    module.recompile()


def write_out_circles(module: fx.GraphModule) -> None:
    """Write a border of what lies on the other side as slices that are put together, in place.

    Of ONNX's ``Pad`` OpenVINO 2026.4.1 does not know the mode ``wrap``.
    """
    aten = torch.ops.aten
    for node in module.graph.nodes:
        if node.target is not aten.pad.default or node.args[2:] != ("circular",):
            continue
        given: Any = node.args[0]
        borders: Any = node.args[1]
        sizes = given.meta["val"].shape
        with module.graph.inserting_before(node):
            for axis, (before, behind) in enumerate(zip(borders[::2], borders[1::2], strict=True), 1):
                parts, size = [given], sizes[-axis]
                if before:
                    parts.insert(0, module.graph.call_function(aten.slice.Tensor, (given, -axis, size - before, size)))
                if behind:
                    parts.append(module.graph.call_function(aten.slice.Tensor, (given, -axis, 0, behind)))
                if len(parts) > 1:
                    given = module.graph.call_function(aten.cat.default, (parts, -axis))
        node.replace_all_uses_with(given)
        module.graph.erase_node(node)
    module.recompile()


def note_values(module: fx.GraphModule) -> None:
    """Note what nodes give that were written into an exported program, in ``meta["val"]`` as `torch.export` does."""
    (mode,) = {value.fake_mode for node in module.graph.nodes if hasattr(value := node.meta.get("val"), "fake_mode")}
    for node in module.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            given, settings = fx.map_arg((node.args, node.kwargs), lambda before: before.meta["val"])
            with mode:
                node.meta["val"] = node.target(*given, **settings)


def _shifted(node: Any) -> bool:
    """Whether a tensor comes from integers that do not have 0 for 0."""
    of_integers = node.target is torch.ops.quantized_decomposed.dequantize_per_tensor.default
    return of_integers and bool(node.args[2] != 0)


def write_out_copies(program: ExportedProgram) -> None:
    """Write a constant that is copied for each image, such as a class token, as a sum with a zero of each, in place.

    The exporter makes an Expand of it, to a shape that the graph asks of the images. OpenVINO 2026.4.1 asks another
    tensor that has as many, as the answer of the convolution that makes patches, and loses the bias of that convolution
    where its answer is quantized: a ViT's int8 graph answered something else. The sum is exact.
    """
    module = program.graph_module
    (images,) = (node for node in module.graph.nodes if node.name in program.graph_signature.user_inputs)
    for node in _copies(module.graph, images):
        constant: Any = node.args[0]
        sizes: Any = node.args[1]
        value: torch.Tensor = constant.meta["val"]
        with module.graph.inserting_before(node):
            zeros = _zeros(module.graph, images, len(sizes), value.dtype)
            once = module.graph.call_function(torch.ops.aten.expand.default, (constant, [1, *sizes[1:]]))
            node.replace_all_uses_with(module.graph.call_function(torch.ops.aten.add.Tensor, (once, zeros)))
        module.graph.erase_node(node)
    module.recompile()


def _copies(graph: fx.Graph, images: fx.Node) -> list[fx.Node]:
    """Expansions of what depends on no image to a size that does, and to no other."""
    depends, found = {images}, []
    for node in graph.nodes:
        if any(before in depends for before in node.all_input_nodes):
            depends.add(node)
        if node.target is not torch.ops.aten.expand.default or node.args[0] in depends:
            continue
        first, *rest = node.args[1]
        if isinstance(first, fx.Node) and node.args[0].meta["val"].is_floating_point():
            found += [] if any(isinstance(size, fx.Node) for size in rest) else [node]
    return found


def _zeros(graph: fx.Graph, images: fx.Node, rank: int, dtype: torch.dtype) -> fx.Node:
    """A 0 for each image, ``(N, 1, ...)`` of that rank: its first number, times 0."""
    # Of pixels only their cast, which graphs begin with, is asked: TensorRT takes nothing else of uint8.
    number: fx.Node = next((user for user in images.users if user.target in _CASTS), images)
    given: torch.Tensor = number.meta["val"]
    for axis in range(1, given.ndim):
        number = graph.call_function(torch.ops.aten.slice.Tensor, (number, axis, 0, 1))
    if given.dtype != dtype:
        number = graph.call_function(torch.ops.aten.to.dtype, (number, dtype))
    number = graph.call_function(torch.ops.aten.mul.Scalar, (number, 0.0))
    return graph.call_function(torch.ops.aten.reshape.default, (number, [-1, *[1] * (rank - 1)]))
