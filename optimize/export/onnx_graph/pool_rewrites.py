"""Rewrites pools of an exported program that engines get wrong or that the exporter does not know."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from optimize.export.onnx_graph.engine_rewrites import put_for
from optimize.tracing.node_values import value_of

_ATEN = torch.ops.aten
_AVERAGES, _MAXIMA = (
    tuple(getattr(_ATEN, f"{kind}_pool{axes}d").default for axes in (1, 2, 3)) for kind in ("avg", "max")
)
#: Operators whose output is never negative.
_POSITIVE = (_ATEN.relu.default, _ATEN.relu_.default, _ATEN.sigmoid.default)
#: Defaults of an average pool's arguments, see `settings_of`.
_POOL_DEFAULTS: tuple[Any, ...] = (None, None, [], [0, 0], False, True, None)


def write_out_means(module: fx.GraphModule) -> None:
    """Write a pool over a whole map as a mean, in place.

    Torch's own decomposition (2.14) gives the result the layout of the input by ``as_strided``, if that is
    channels-last (behind a permute, as in ConvNeXt and Swin). The exporter turns it into a Gather with computed
    indices. Behind such a Gather in an int8 graph, OpenVINO 2026.4.1 gives wrong results.
    """
    pool = torch.ops.aten.adaptive_avg_pool2d.default
    for node in module.graph.nodes:
        size: Any = node.args[1] if node.target is pool else None
        if size is not None and list(size) in ([1], [1, 1]):
            node.target, node.args = torch.ops.aten.mean.dim, (node.args[0], [-1, -2], True)
    module.recompile()


def write_out_shares(module: fx.GraphModule) -> None:
    """Write averages that do not divide by the number of places as plain averages times a factor, in place.

    There are two cases. If the divisor is given explicitly, the exporter (torch 2.11 to 2.14) forgets it. The other
    case is a pool that counts padding zeros and may reach beyond them, as rounded up sizes allow. There ONNX Runtime
    (1.31) counts more places between integers, and is up to 33 steps off. OpenVINO 2026.4.1 does so in float.
    """
    for node in module.graph.nodes:
        if node.target is not _ATEN.avg_pool2d.default:
            continue
        images, kernel, stride, padding, ceil, counted, divisor = settings_of(node)
        if divisor is None and not (ceil and counted):
            continue
        if divisor is None and not any(padding):
            node.args = (images, kernel, stride, padding, ceil, False)  # no zeros to count
            continue
        with module.graph.inserting_before(node):
            value = images.meta["val"]  # factors have the dtype of the images, as a product needs it
            ones = module.graph.call_function(
                _ATEN.full.default, ([1, 1, *value.shape[2:]], 1.0), {"dtype": value.dtype}
            )
            if divisor is None:
                share = module.graph.call_function(node.target, (ones, *node.args[1:]))
            else:
                share = _counts(module.graph, ones, node)
                share = module.graph.call_function(_ATEN.mul.Tensor, (share, math.prod(kernel) / divisor))
            inside = module.graph.call_function(node.target, (images, kernel, stride, padding, ceil, False))
            averages = module.graph.call_function(_ATEN.mul.Tensor, (inside, share))
        put_for(averages, node)
    module.recompile()


def settings_of(pool: fx.Node) -> tuple[Any, ...]:
    """Return an average pool's images, kernel, stride, padding, ceil mode, whether zeros count, and divisor."""
    given: tuple[Any, ...] = pool.args
    return (*given, *_POOL_DEFAULTS[len(given) :])


def _counts(graph: fx.Graph, ones: fx.Node, pool: fx.Node) -> fx.Node:
    """Return the share of a pool's kernel that lies within the image at each place, with borders that complete it."""
    images, kernel, stride, padding, *_ = settings_of(pool)
    borders: list[int] = []
    sizes, places = images.meta["val"].shape[-2:], pool.meta["val"].shape[-2:]
    for size, count, width, step, before in zip(sizes, places, kernel, stride or kernel, padding, strict=True):
        borders = [before, (count - 1) * step + width - size - before, *borders]  # last axis first
    filled = graph.call_function(torch.ops.aten.constant_pad_nd.default, (ones, borders, 0.0))
    return graph.call_function(torch.ops.aten.avg_pool2d.default, (filled, kernel, stride))


def write_out_maxima(module: fx.GraphModule) -> None:
    """Write adaptive maxima whose output size does not divide the image as pools of slices, in place.

    The exporter (torch 2.11 to 2.14) has no translation. Place ``i`` of ``n`` is the largest of the places from
    ``floor(i * size / n)`` to ``ceil((i + 1) * size / n)``, as in ATen's ``AdaptivePooling.h``.
    """
    aten = torch.ops.aten
    for node in list(module.graph.nodes):
        if node.target is not aten.adaptive_max_pool2d.default:
            continue
        (given, counts), readers = node.args, [reader for reader in node.users if reader.users]
        sizes = given.meta["val"].shape[-2:]
        divides = all(size % count == 0 for size, count in zip(sizes, counts, strict=True))
        if divides or any(reader.args[1] != 0 for reader in readers):
            continue  # a pool of equal patches, or one that returns indices
        with module.graph.inserting_before(node):
            for axis, size, count in zip((-2, -1), sizes, counts, strict=True):
                ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
                parts = []
                for low, high in ends:
                    part = module.graph.call_function(aten.slice.Tensor, (given, axis, low, high))
                    kernel = [high - low, 1] if axis == -2 else [1, high - low]
                    # A pool, because OpenVINO gets a maximum over an axis wrong (see
                    # `optimize.quantization.lowering.openvino.extremes`).
                    parts.append(module.graph.call_function(aten.max_pool2d.default, (part, kernel)))
                given = module.graph.call_function(aten.cat.default, (parts, axis))
        for reader in readers:
            put_for(given, reader)
    module.graph.eliminate_dead_code()
    module.recompile()


def part_borders(module: fx.GraphModule) -> None:
    """Put a maximum with the lowest float, which changes nothing, between zero padding and a pool, in place.

    ONNX Runtime (1.31, ``PadFusion``; its pull request 18136) turns the zeros into the pool's own padding. A max pool
    ignores its own padding, so the largest of a zero and of negative numbers became negative. Also, no pool may have
    padding as wide as its kernel. A graph with an average over single places at equal distances could not be opened.
    """
    for node in list(module.graph.nodes):
        if node.target not in (*_AVERAGES, *_MAXIMA) or not _changed_by_fusion(node):
            continue
        border: Any = node.args[0]
        value = border.meta["val"]
        with module.graph.inserting_before(node):
            lowest = module.graph.call_function(
                _ATEN.full.default, ([1] * value.ndim, torch.finfo(value.dtype).min), {"dtype": value.dtype}
            )
            larger = module.graph.call_function(_ATEN.maximum.default, (border, lowest))
        with value.fake_mode:
            value_of(larger)
        node.replace_input_with(border, larger)
    module.recompile()


def _changed_by_fusion(pool: fx.Node) -> bool:
    """Tell whether a pool reads zero padding and would fail, or give another result, with it as its own padding."""
    border: Any = pool.args[0]
    value = border.meta["val"]
    if border.target not in (_ATEN.pad.default, _ATEN.constant_pad_nd.default) or not value.is_floating_point():
        return False
    given, sides, *filled = border.args
    if any(filled[1:] if filled[:1] == ["constant"] else filled):  # another mode, or another value
        return False
    if pool.target in _MAXIMA and given.target not in _POSITIVE:
        return True
    kernel: Any = pool.args[1]
    padding: Any = pool.args[3] if len(pool.args) > 3 and pool.args[3] else [0] * len(kernel)
    axes = zip(reversed(kernel), reversed(padding), sides[::2], sides[1::2], strict=False)
    return any(own + max(before, behind) >= width for width, own, before, behind in axes)
