"""Moves the quantizer of an image whose pixels all lie halfway between two of its integers.

Pixels are 256 equidistant values. If all channels are normalised alike and images use the whole range, the integers are
as far apart as the pixels. With a mean of 0.5, or with zero point 0, each pixel is then a tie between two integers.
Ties go to the even integer, so only half of the integers occur. Engines that multiply in another order round some
pixels to the other side. A slightly wider range has no ties, and nearly all integers occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.ao.quantization import FakeQuantizeBase
from torch.ao.quantization.observer import FixedQParamsObserver, ObserverBase

from optimize.quantization.graph.editing import made_of
from optimize.quantization.graph.nodes import holds_watcher, is_watcher

#: A value counts as a tie if it is this near to one, in steps. The error of float32 is about 0.00002 steps.
_NEAR = 0.001
#: Share of an image's values above which they are no chance. By chance it is 0.002.
_MANY = 0.05
#: Factor of the wider range. The pixel next to the middle is then 0.002 steps away from its tie.
_WIDER = 1 + 1 / 256


def part_from_ties(prepared: fx.GraphModule, images: torch.Tensor) -> bool:
    """Widen the range of the image's quantizer if it makes ties of pixels, in place.

    That is the first quantizer behind the image, whatever the network does to the image before it.

    Args:
        prepared: with observers that have seen images, or fake-quantize modules; in eval mode.
        images: normalised, ``float32 (N, C, H, W)``.

    Returns:
        Whether the range was widened.
    """
    watchers = list(_first(prepared))
    if len(watchers) != 1:
        return False
    ((seeing, name),) = watchers
    if sum(node.target == seeing.target for node in prepared.graph.nodes) != 1:
        return False  # other tensors share it
    watcher = prepared.get_submodule(name)
    known: Any = watcher
    scale, zero_point = (float(each) for each in known.calculate_qparams())
    place = _shown(prepared, seeing.all_input_nodes[0], images).double() / scale
    if ((place - place.floor() - 0.5).abs() < _NEAR).double().mean() < _MANY:
        return False
    if isinstance(watcher, FakeQuantizeBase):
        observer: Any = watcher.activation_post_process
        for end in (observer.min_val, observer.max_val):
            end.mul_(_WIDER)
        for kept, value in zip((known.scale, known.zero_point), known.calculate_qparams(), strict=True):
            kept.copy_(value)
    elif isinstance(watcher, ObserverBase):
        fixed = FixedQParamsObserver(  # type: ignore[no-untyped-call]
            scale * _WIDER, int(zero_point), known.dtype, known.qscheme, known.quant_min, known.quant_max
        )
        prepared.set_submodule(name, fixed.to(images.device))
    return True


def _first(prepared: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """Yield the observers that see the image without another observer in between, and their names."""
    unwatched: set[fx.Node] = set()
    for node in prepared.graph.nodes:
        if node.op == "placeholder" or not unwatched.isdisjoint(node.all_input_nodes):
            if name := _watcher(prepared, node):
                yield node, name
            else:
                unwatched.add(node)


def _shown(prepared: fx.GraphModule, node: fx.Node, images: torch.Tensor) -> torch.Tensor:
    """Return the value of a node for images. Nothing behind the node is computed."""
    needed = set(made_of(node))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for each in prepared.graph.nodes:
        if each in needed:
            copies[each] = graph.node_copy(each, copies.__getitem__)
    graph.output(copies[node])
    with torch.no_grad():
        value: torch.Tensor = fx.GraphModule(prepared, graph)(images)
    return value


def _watcher(prepared: fx.GraphModule, node: fx.Node) -> str:
    """Return the name of the observer or fake-quantize module that a node calls. PT2E's wrappers contain it."""
    if is_watcher(prepared, node):
        return str(node.target)
    return f"{node.target}.observer" if holds_watcher(prepared, node) else ""
