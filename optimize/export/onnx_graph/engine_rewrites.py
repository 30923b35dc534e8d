"""Rewrites operators of an exported program whose usual ONNX form engines get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # what registers `torch.ops.quantized_decomposed`
from torch import fx
from torch.export import ExportedProgram

from optimize.tracing.node_values import are_alike, value_of

#: Axes of attention: images, heads, places and channels.
_RANK = 4
#: Operators that create a tensor of given sizes: from a number, from a number with the dtype of a tensor, from a
#: tensor.
_FILLED, _NEW, _EXPANDED, _REPEATED = (
    tuple(getattr(torch.ops.aten, name).default for name in names.split())
    for names in ("full zeros ones", "new_full new_zeros new_ones", "expand expand_as broadcast_to", "repeat tile")
)
_COPIES = (*_FILLED, *_NEW, *_EXPANDED, *_REPEATED, torch.ops.aten.repeat_interleave.self_int)
_CLAMPS = tuple(getattr(torch.ops.aten, name).default for name in ("clamp", "clamp_", "clip", "clip_"))
_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


def write_out_circles(module: fx.GraphModule) -> None:
    """Write circular padding as a concatenation of slices, in place.

    OpenVINO 2026.4.1 does not know the mode ``wrap`` of ONNX's ``Pad``. Negative padding crops first, and the padding
    is taken from the rest.
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
                low, high = max(-before, 0), sizes[-axis] - max(-behind, 0)
                if high - low < sizes[-axis]:
                    given = module.graph.call_function(aten.slice.Tensor, (given, -axis, low, high))
                parts, size = [given], high - low
                if before > 0:
                    parts.insert(0, module.graph.call_function(aten.slice.Tensor, (given, -axis, size - before, size)))
                if behind > 0:
                    parts.append(module.graph.call_function(aten.slice.Tensor, (given, -axis, 0, behind)))
                if len(parts) > 1:
                    given = module.graph.call_function(aten.cat.default, (parts, -axis))
        put_for(given, node)
    module.recompile()


def write_out_attention(module: fx.GraphModule) -> None:
    """Write attention over more or fewer axes than images, heads, places and channels as attention over four, in place.

    onnxscript (0.7.2) translates no other. NesT, which attends within the blocks of a map, has five axes. All axes
    before the last two are independent, so they can be joined in any way. Attention with a mask for each of them stays
    unchanged.
    """
    aten = torch.ops.aten
    for node in module.graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default or not _of_another_rank(node):
            continue
        parts: list[Any] = list(node.args[:3])
        shapes = [part.meta["val"].shape for part in parts]
        with module.graph.inserting_before(node):
            parts = [
                module.graph.call_function(
                    aten.reshape.default, (part, [-1, *([1] if len(shape) < _RANK else []), *shape[1:][-3:]])
                )
                for part, shape in zip(parts, shapes, strict=True)
            ]
            found = module.graph.call_function(node.target, (*parts, *node.args[3:]), node.kwargs)
            sizes = [-1, *shapes[0][1:-1], shapes[2][-1]]
            answer = module.graph.call_function(aten.reshape.default, (found, sizes))
        put_for(answer, node)
    module.recompile()


def _of_another_rank(attention: fx.Node) -> bool:
    """Tell whether queries, keys and values have equal leading axes with known sizes, and not four axes in all."""
    mask: Any = dict(enumerate(attention.args)).get(3, attention.kwargs.get("attn_mask"))
    parts: Any = attention.args[:3]
    shapes = [part.meta["val"].shape for part in parts]
    return (
        all(_are_numbers(shape[1:]) for shape in shapes)
        and len(shapes[0]) != _RANK
        and all(shape[:-2] == shapes[0][:-2] for shape in shapes)
        and (mask is None or mask.meta["val"].ndim <= 2)  # a mask over places only
    )


def write_out_norms(module: fx.GraphModule) -> None:
    """Write an instance norm that uses running statistics as a batch norm, in place.

    Torch (2.14) writes it as a batch norm over the channels of all images, with factors that are repeated for the
    number of images. See `write_out_copies`.
    """
    aten = torch.ops.aten
    for node in module.graph.nodes:
        if node.target is aten.instance_norm.default and node.args[5] is False:
            node.target = aten.batch_norm.default
    module.recompile()


def write_out_slopes(module: fx.GraphModule) -> None:
    """Write a ReLU with a random slope in training as one with the mean slope, which it has in eval mode, in place.

    The exporter (torch 2.11 to 2.14) has no translation.
    """
    aten = torch.ops.aten
    for node in module.graph.nodes:
        if node.target is aten.rrelu.default:
            given, lower, upper, training = (*node.args, *(1 / 8, 1 / 3, False)[len(node.args) - 1 :])[:4]
            if not training:
                node.target, node.args = aten.leaky_relu.default, (given, (lower + upper) / 2)
    module.recompile()


def write_out_bounds(module: fx.GraphModule) -> None:
    """Write both bounds of a float clamp as floats if one of them is a float, in place.

    The exporter (torch 2.14) finds no operator for an integer and a float: ``x.clamp(0, 6.0)``.
    """
    for node in module.graph.nodes:
        if node.target not in _CLAMPS or not node.meta["val"].is_floating_point():
            continue
        given, *bounds = node.args
        if any(isinstance(bound, float) for bound in bounds):
            node.args = (given, *(float(bound) if isinstance(bound, int) else bound for bound in bounds))
    module.recompile()


def put_for(written: fx.Node, node: fx.Node) -> None:
    """Replace a node by one that was written before it, and note the new node's value.

    A program knows its outputs by the node's name, and the exporter (torch 2.11 to 2.14) looks for it. So the new node
    takes over the name of an output.
    """
    with node.meta["val"].fake_mode:
        value_of(written)
    answers = any(reader.op == "output" for reader in node.users)
    node.replace_all_uses_with(written)
    node.graph.erase_node(node)
    if answers:
        written.name = node.name


def write_out_copies(program: ExportedProgram) -> None:
    """Write tensors that are the same for each image as a sum with a zero of each image, in place.

    Examples are a class token and a map of zeros. The exporter writes an Expand to a shape that depends on the number
    of images. OpenVINO 2026.4.1 reads that number from another tensor, such as the output of the convolution that makes
    patches. It then loses the bias of that convolution if its output is quantized. The int8 graph of a ViT gave wrong
    answers, and so did that of an EdgeNeXt, which counts places in its own zeros. The sum is exact. A tensor that
    already has a part for each image, and is repeated along other axes, keeps its first size. An example is the norm in
    a division.
    """
    module, aten = program.graph_module, torch.ops.aten
    (images,) = (node for node in module.graph.nodes if node.name in program.graph_signature.user_inputs)
    depends = {images}
    for node in list(module.graph.nodes):
        if depends.intersection(node.all_input_nodes):
            depends.add(node)
        value: Any = node.meta["val"] if node.target in _COPIES else None
        if value is None or (axis := _axis_of_images(value, images.meta["val"])) is None:
            continue
        shared = node.target in (*_FILLED, *_NEW) or not depends.intersection(node.args[:1])
        with module.graph.inserting_before(node):
            if shared and (once := _once(module.graph, node, axis)) is not None:
                zeros = _zeros(module.graph, images, _put_at(axis, -1, [1] * value.ndim), value.dtype)
                together = aten.logical_or.default if value.dtype == torch.bool else aten.add.Tensor
                written = module.graph.call_function(together, (once, zeros))
            elif _is_of_each(node, axis):
                sizes = _put_at(axis, -1, value.shape)
                written = module.graph.call_function(aten.expand.default, (node.args[0], sizes))
            else:
                continue
        put_for(written, node)
    module.recompile()


def _axis_of_images(value: torch.Tensor, images: torch.Tensor) -> int | None:
    """Return the axis with one place for each image, if no other size depends on the batch."""
    axes = [axis for axis, size in enumerate(value.shape) if not isinstance(size, int)]
    return axes[0] if len(axes) == 1 and are_alike(value.shape[axes[0]], images.shape[0]) else None


def _once(graph: fx.Graph, copies: fx.Node, axis: int) -> fx.Node | None:
    """Return the tensor for one image instead of repeated along an axis.

    None: it has several places there already.
    """
    sizes = _put_at(axis, 1, copies.meta["val"].shape)
    (given, *rest), target = copies.args, copies.target
    assert callable(target)
    arguments: tuple[Any, ...]
    if target in _FILLED:
        arguments = (sizes, *rest)
    elif target in _NEW:
        arguments = (given, sizes, *rest[1:])
    elif not _is_one(given.meta["val"], axis - len(sizes)):  # type: ignore[union-attr]
        return None
    elif target in _REPEATED:
        times: Any = rest[0]
        arguments = (given, _put_at(axis - len(sizes) + len(times), 1, times))
    else:
        return graph.call_function(torch.ops.aten.expand.default, (given, sizes))
    return graph.call_function(target, arguments, copies.kwargs)


def _is_one(given: torch.Tensor, axis: int) -> bool:
    """Tell whether a tensor has one place along an axis, counted from the last. Missing leading axes have one place."""
    return -axis > given.ndim or given.shape[axis] == 1


def _is_of_each(copies: fx.Node, axis: int) -> bool:
    """Tell whether a part for each image is repeated along other axes."""
    given: torch.Tensor = copies.args[0].meta["val"]  # type: ignore[union-attr]
    same_axes = given.ndim == copies.meta["val"].ndim
    return copies.target in _EXPANDED and same_axes and not isinstance(given.shape[axis], int)


def _put_at(axis: int, size: int, sizes: Sequence[Any]) -> list[Any]:
    """Return sizes with one of them replaced."""
    return [*sizes[:axis], size, *sizes[axis + 1 :]]


def _are_numbers(sizes: Sequence[Any]) -> bool:
    """Tell whether no size depends on the images."""
    return all(isinstance(size, int) for size in sizes)


def _zeros(graph: fx.Graph, images: fx.Node, sizes: list[int], dtype: torch.dtype) -> fx.Node:
    """Return a 0 for each image: the first number of each image times 0. All sizes are 1, or -1 for the images."""
    # Pixels are only read through the cast at the beginning of a graph: TensorRT supports nothing else on uint8.
    number: fx.Node = next((user for user in images.users if user.target in _CASTS), images)
    given: torch.Tensor = number.meta["val"]
    for axis in range(1, given.ndim):
        number = graph.call_function(torch.ops.aten.slice.Tensor, (number, axis, 0, 1))
    number = graph.call_function(torch.ops.aten.mul.Scalar, (number, 0.0))
    if given.dtype != dtype:
        number = graph.call_function(torch.ops.aten.to.dtype, (number, dtype))
    return graph.call_function(torch.ops.aten.reshape.default, (number, sizes))
