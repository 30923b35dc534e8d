"""Multiply-accumulates (MACs) and bytes of a network, from shapes alone. Nothing is computed or allocated.

A convolution uses each of its weights once for each output place of each image. A linear layer uses them once for each
row. A matrix product has one MAC for each pair that it multiplies. Sums, norms and activations have none. Torch's own
counter (`torch.utils.flop_counter`) has the formulas of its operators. Two of its operations are one MAC.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

_ATEN = torch.ops.aten
#: Operators with weights, whether stored or computed, as their second argument.
_LAYERS = frozenset(
    getattr(_ATEN, name).default for name in ("conv1d", "conv2d", "conv3d", "convolution", "linear")
) | {_ATEN.conv_transpose1d.default, _ATEN.conv_transpose2d.input, _ATEN.conv_transpose3d.input}


@dataclass(frozen=True)
class Work:
    """The work of an operator: its MACs, and the bytes that it must read and write at least once.

    Attributes:
        macs: multiply-accumulates of the whole batch.
        weights: bytes of its weights and other constants.
        read: bytes of its input activations.
        written: bytes of its output.
    """

    macs: int
    weights: int
    read: int
    written: int


def weighted_macs(weight: Sequence[int], places: int) -> int:
    """Return the MACs of a convolution or a linear layer.

    Args:
        weight: shape of its weight: ``(out, in / groups, *kernel)``, or ``(out, in)``.
        places: number of output positions without channels but with images, ``N * H * W``. For a transposed
            convolution, of input positions.
    """
    return math.prod(weight) * places


def product_macs(answer: Sequence[int], inner: int) -> int:
    """Return the MACs of a matrix product of shape ``(..., rows, columns)`` with ``inner`` pairs for each element."""
    return math.prod(answer) * inner


def layer_macs(module: nn.Module, example: torch.Tensor) -> dict[str, int]:
    """Return the MACs of each layer for one image.

    Args:
        module: on any device. It is called in its mode on tensors without content, and keeps its state.
        example: ``(N, C, H, W)``. Its values do not count.

    Returns:
        MACs by module name, in order of the first call, without layers that have none. What a module computes itself,
            such as the products of an attention, counts as its own. ``""`` is the network itself. A layer that is
            called twice counts twice.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # norms in training mode update theirs
    try:
        with _counting() as (counter, mode), _counted(module, counter) as found:
            module(mode.from_tensor(example))
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    return {name: flops // 2 // len(example) for name, flops in found.items()}


@contextlib.contextmanager
def _counted(module: nn.Module, counter: FlopCounterMode) -> Iterator[dict[str, int]]:
    """Yield the operations of each module without its children's, by name, for the calls in the block."""
    found: dict[str, int] = {}
    started: list[int] = []
    inside: list[int] = []  # for each open call, the operations of its children

    def enter(*_: object) -> None:
        started.append(counter.get_total_flops())
        inside.append(0)

    def leave(name: str) -> None:
        whole = counter.get_total_flops() - started.pop()
        own = whole - inside.pop()
        if own:
            found[name] = found.get(name, 0) + own
        if inside:
            inside[-1] += whole

    with contextlib.ExitStack() as hooks:
        for name, layer in module.named_modules():
            hooks.callback(layer.register_forward_pre_hook(enter).remove)
            hooks.callback(layer.register_forward_hook(lambda *_, name=name: leave(name)).remove)
        yield found


def total_macs(module: nn.Module, example: torch.Tensor) -> int:
    """Return the MACs of a network for one image. See `layer_macs`."""
    return sum(layer_macs(module, example).values())


def program_work(module: fx.GraphModule, example: torch.Tensor) -> dict[str, Work]:
    """Return the work of each call in an exported program's graph for a batch.

    Args:
        module: of ATen operators, as ``ExportedProgram.module()`` gives it.
        example: the batch ``(N, C, H, W)``. Its values do not count.

    Returns:
        Work by node name, in the graph's order. Views and slices count as read and written, though nothing moves.
    """
    with _counting() as (counter, mode):
        return _Working(module, counter).of(mode.from_tensor(example))


@contextlib.contextmanager
def _counting() -> Iterator[tuple[FlopCounterMode, FakeTensorMode]]:
    """Yield a counter of operations on tensors without content."""
    fast = torch.backends.mha.get_fastpath_enabled()
    # The fast path computes a whole attention in one operator that the counter (torch 2.14) does not know. Neither does
    # it know the CPU's fused product.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            FlopCounterMode(display=False) as counter,
        ):
            yield counter, mode
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Working(fx.Interpreter):
    """Runs a graph and notes the work of each call."""

    def __init__(self, module: fx.GraphModule, counter: FlopCounterMode) -> None:
        super().__init__(module)
        self._counter = counter
        self._found: dict[str, Work] = {}

    def of(self, batch: torch.Tensor) -> dict[str, Work]:
        self.run(batch)
        return self._found

    def run_node(self, node: fx.Node) -> Any:
        before = self._counter.get_total_flops()
        answer = super().run_node(node)
        if node.op == "call_function":
            weight = node.args[1] if node.target in _LAYERS else None
            constants = [one for one in node.all_input_nodes if one.op == "get_attr" or one is weight]
            given = [one for one in node.all_input_nodes if one not in constants]
            self._found[node.name] = Work(
                macs=(self._counter.get_total_flops() - before) // 2,
                weights=sum(_bytes(self.env[one]) for one in constants),
                read=sum(_bytes(self.env[one]) for one in given),
                written=_bytes(answer),
            )
        return answer


def _bytes(value: object) -> int:
    """Return the bytes of a tensor, or of several."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
