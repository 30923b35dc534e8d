"""The quantizer of an image whose pixels all lie halfway between two of its integers, moved off that place.

Pixels are 256 numbers at equal distances. Where an image is normalised alike in all channels and uses the whole range,
its integers have the same distances; with a mean of 0.5, or with zero-point 0, each pixel is then a tie between two.
Ties go to the even integer, so half of the integers occur, and engines that come to the place by another order of the
same multiplications let some pixels fall to the other side. A range that is a little wider has no ties, and nearly all
integers occur.
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

#: A place counts as a tie where it is nearer to one than this, in steps: float32 errs by some 0.00002 of them.
_NEAR = 0.001
#: Share of an image's values that chance leaves there: 0.002.
_MANY = 0.05
#: By how much the range becomes wider: the pixel next to the middle comes to lie 0.002 steps beside its tie.
_WIDER = 1 + 1 / 256


def part_from_ties(prepared: fx.GraphModule, images: torch.Tensor) -> bool:
    """Widen the range of the image's quantizer where it makes ties of pixels, in place.

    It is the first behind the image, whatever a network does to this in front of it.

    Args:
        prepared: with observers that have seen images, or fake-quantize modules; in eval mode.
        images: ``float32 (N, C, H, W)``, normalised.

    Returns:
        Whether it did.
    """
    watchers = list(_first(prepared))
    if len(watchers) != 1:
        return False
    ((seeing, name),) = watchers
    if sum(node.target == seeing.target for node in prepared.graph.nodes) != 1:
        return False  # others share it
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
    """Watchers of what is made of the image without another watcher between, and their names."""
    unwatched: set[fx.Node] = set()
    for node in prepared.graph.nodes:
        if node.op == "placeholder" or not unwatched.isdisjoint(node.all_input_nodes):
            if name := _watcher(prepared, node):
                yield node, name
            else:
                unwatched.add(node)


def _shown(prepared: fx.GraphModule, node: fx.Node, images: torch.Tensor) -> torch.Tensor:
    """What a node gives of images; nothing behind it is computed."""
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
    """Name of the observer or fake-quantize module that a node calls; in PT2E's watchers it lies inside."""
    if is_watcher(prepared, node):
        return str(node.target)
    return f"{node.target}.observer" if holds_watcher(prepared, node) else ""
