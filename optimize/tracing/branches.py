"""Finds sums of parallel convolutions of one tensor by structure, and folds them into one convolution.

RepVGG (Ding et al. 2021, arXiv:2101.03697, section 3.3) trains a 3x3, a 1x1 and an identity branch, each with a batch
norm. ACNet (Ding et al. 2019, arXiv:1908.03930, section 3.3) trains a 3x3, a 1x3 and a 3x1. All branches are linear and
translation-equivariant, so their sum is one convolution. Its kernel is the sum of their kernels, each folded with its
norm and placed where it reads. Layer names do not matter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights

from optimize.tracing.trace import calls

_ADDITIONS: Final = (operator.add, operator.iadd, torch.add)
_METHODS: Final = ("add", "add_")
_AXES: Final = 2


@dataclass(frozen=True)
class Branch:
    """A convolution, a convolution with a norm, or a norm alone, between the input of a block and its sum.

    Attributes:
        end: the last node, which the sum reads.
        nodes: all nodes of the branch, ``end`` included.
        convolution: target of its convolution, or None.
        norm: target of its norm, or None.
    """

    end: fx.Node
    nodes: tuple[fx.Node, ...]
    convolution: str | None
    norm: str | None


@dataclass(frozen=True)
class Block:
    """Branches of one tensor that can become one convolution.

    Attributes:
        given: the node that all branches read.
        branches: two or more, at least one with a convolution. The one with the largest kernel comes first.
        total: the node of the sum that they are part of.
        others: the other addends of that sum.
    """

    given: fx.Node
    branches: tuple[Branch, ...]
    total: fx.Node
    others: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        """Target of the convolution that the others are folded into."""
        assert self.branches[0].convolution is not None
        return self.branches[0].convolution


def blocks(module: fx.GraphModule) -> list[Block]:
    """Return the blocks of a traced module, in the order of the graph.

    A branch counts only if nothing else reads its inner tensors, and if its layers are called nowhere else. Their
    weights must be stored, not computed. A tensor that is added unchanged (a residual connection) is no branch.
    """
    looked = _Looked(module)
    found: list[Block] = []
    for node in module.graph.nodes:
        if _is_sum(node) and not looked.is_inner(node):
            found += looked.blocks_of(node)
    return found


def merge_blocks(module: fx.GraphModule) -> list[tuple[Block, nn.Conv2d, nn.Conv2d]]:
    """Fold every block of a traced module in eval mode, in place.

    Returns:
        Each block with two convolutions: its largest branch alone, folded with its norm, and the merged convolution.
    """
    merged = []
    while found := blocks(module):
        block = found[0]  # later blocks may read its result, and merged it may be a branch of a sum around it
        merged.append((block, *_merge(module, block)))
        module.delete_all_unused_submodules()
        module.graph.lint()
        module.recompile()
    return merged


def _merge(module: fx.GraphModule, block: Block) -> tuple[nn.Conv2d, nn.Conv2d]:
    largest = _layer(module, block.name)
    kernels = [_folded(module, branch, largest) for branch in block.branches]
    weight = torch.zeros(largest.weight.shape, dtype=torch.float64)
    bias = torch.zeros(largest.out_channels, dtype=torch.float64)
    for kernel, offset, padding in kernels:
        high, wide = (place + kernel.shape[2 + axis] for axis, place in enumerate(padding))
        weight[:, :, padding[0] : high, padding[1] : wide] += kernel
        bias += offset
    alone, whole = (_twin(largest, *tensors) for tensors in ((kernels[0][0], kernels[0][1]), (weight, bias)))
    module.set_submodule(block.name, whole)
    graph, parts = module.graph, {node for branch in block.branches for node in branch.nodes}
    # Put it where the first branch reads the tensor: something may change it in place later.
    with graph.inserting_before(next(node for node in graph.nodes if node in parts)):
        answer = graph.call_module(block.name, (block.given,))
    with graph.inserting_before(block.total):
        for other in block.others:
            answer = graph.call_function(operator.add, (answer, other))
    block.total.replace_all_uses_with(answer)
    _erase(graph, block.total, parts)
    return alone, whole


def _erase(graph: fx.Graph, node: fx.Node, parts: set[fx.Node]) -> None:
    """Erase a sum, and the sums and parts before it that only it read. Other nodes may act without a reader."""
    before = node.all_input_nodes
    graph.erase_node(node)
    for one in before:
        if not one.users and (one in parts or _is_sum(one)):
            _erase(graph, one, parts)


def _twin(layer: nn.Conv2d, weight: torch.Tensor, bias: torch.Tensor) -> nn.Conv2d:
    """Return a convolution with the settings of another, other tensors, and always a bias."""
    twin: Any = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        layer.groups,
        bias=True,
    ).to(layer.weight.dtype)
    with torch.no_grad():
        twin.weight.copy_(weight)
        twin.bias.copy_(bias)
    return twin.eval()  # type: ignore[no-any-return]


def _folded(
    module: fx.GraphModule, branch: Branch, largest: nn.Conv2d
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Return a branch as kernel and bias in float64, and the row and column of its kernel in the largest kernel."""
    if branch.convolution is None:
        layer: nn.Conv2d | None = None
        each = largest.in_channels // largest.groups
        weight = torch.zeros(largest.out_channels, each, 1, 1, dtype=torch.float64)
        for channel in range(largest.out_channels):
            weight[channel, channel % each] = 1.0
        bias = torch.zeros(largest.out_channels, dtype=torch.float64)
    else:
        layer = _layer(module, branch.convolution)
        weight = layer.weight.detach().double()
        bias = torch.zeros(layer.out_channels).double() if layer.bias is None else layer.bias.detach().double()
    if branch.norm is not None:
        norm: Any = module.get_submodule(branch.norm)
        scale, shift = (None if one is None else one.detach().double() for one in (norm.weight, norm.bias))
        mean, variance = norm.running_mean.double(), norm.running_var.double()
        folded = fuse_conv_bn_weights(weight, bias, mean, variance, norm.eps, scale, shift)
        weight, bias = (one.detach() for one in folded)
    shift_rows, shift_columns = (
        (_ends(largest)[axis][0] - (_ends(layer)[axis][0] if layer is not None else 0)) // _dilation(largest, axis)
        for axis in range(_AXES)
    )
    return weight, bias, (shift_rows, shift_columns)


class _Looked:
    """A module's graph with what the search needs to know of it."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._called = calls(module)
        self._read = {str(node.target).rpartition(".")[0] for node in module.graph.nodes if node.op == "get_attr"}
        tied: dict[int, int] = {}
        for _, parameter in module.named_parameters(remove_duplicate=False):
            tied[id(parameter)] = tied.get(id(parameter), 0) + 1
        self._tied = {one for one, count in tied.items() if count > 1}

    def is_inner(self, node: fx.Node) -> bool:
        """Tell whether a sum is only a part of another sum."""
        return len(node.users) == 1 and _is_sum(next(iter(node.users)))

    def blocks_of(self, total: fx.Node) -> Iterator[Block]:
        """Yield the block within a sum: at most one. Others are found after it is merged."""
        ends = list(self._leaves(total))
        branches = [branch for end in ends if ends.count(end) == 1 and (branch := self._branch(end)) is not None]
        for given in dict.fromkeys(branch.nodes[0].all_input_nodes[0] for branch in branches):
            alike = [branch for branch in branches if branch.nodes[0].all_input_nodes[0] is given]
            if (block := self._block(given, alike, total, ends)) is not None:
                yield block
                return

    def _leaves(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the addends of a sum. Zeros are skipped, because builtin ``sum`` begins with one."""
        for one in node.args:
            if not isinstance(one, fx.Node):
                continue
            if _is_sum(one) and len(one.users) == 1:
                yield from self._leaves(one)
            else:
                yield one

    def _branch(self, end: fx.Node) -> Branch | None:
        norm = self._norm(end)
        before = end.all_input_nodes[0] if norm else end
        convolution = self._convolution(before)
        if convolution:
            return Branch(end, (before, end) if norm else (end,), convolution, norm)
        return Branch(end, (end,), None, norm) if norm else None

    def _convolution(self, node: fx.Node) -> str | None:
        layer = self._own(node)
        if type(layer) is not nn.Conv2d or (layer.padding_mode != "zeros" and any(ends[1] for ends in _ends(layer))):
            return None
        return str(node.target)

    def _norm(self, node: fx.Node) -> str | None:
        layer = self._own(node)
        return str(node.target) if type(layer) is nn.BatchNorm2d and layer.running_mean is not None else None

    def _own(self, node: fx.Node) -> nn.Module | None:
        """Return the layer that a node calls, if nothing else calls it or reads its output or its weights."""
        if node.op != "call_module" or len(node.users) != 1 or len(node.all_input_nodes) != 1:
            return None
        layer = self._module.get_submodule(str(node.target))
        computed = parametrize.is_parametrized(layer) or layer._forward_pre_hooks or layer._forward_hooks
        shared = self._called[id(layer)] > 1 or str(node.target) in self._read
        tied = any(id(parameter) in self._tied for parameter in layer.parameters())
        return None if computed or shared or tied else layer

    def _block(self, given: fx.Node, alike: Sequence[Branch], total: fx.Node, ends: Sequence[fx.Node]) -> Block | None:
        """Return the branches of one tensor that form one convolution with the largest of them."""
        sizes = [
            (branch, _layer(self._module, branch.convolution).kernel_size) for branch in alike if branch.convolution
        ]
        for largest, _ in sorted(sizes, key=lambda one: -one[1][0] * one[1][1]):
            layer = _layer(self._module, str(largest.convolution))
            fitting = [branch for branch in alike if branch is largest or self._fits(branch, layer)]
            if len(fitting) > 1:
                order = sorted(fitting, key=lambda branch: branch is not largest)
                taken = {branch.end for branch in fitting}
                return Block(given, tuple(order), total, tuple(end for end in ends if end not in taken))
        return None

    def _fits(self, branch: Branch, largest: nn.Conv2d) -> bool:
        """Tell whether a branch fits into the kernel of the largest convolution, with zeros elsewhere."""
        if branch.convolution is None:
            norm: Any = self._module.get_submodule(str(branch.norm))
            same = norm.num_features == largest.in_channels == largest.out_channels and set(largest.stride) == {1}
            return same and all(_inside(largest, None, axis) for axis in range(_AXES))
        layer = _layer(self._module, branch.convolution)
        facts = ("in_channels", "out_channels", "groups", "stride")
        same = all(getattr(layer, fact) == getattr(largest, fact) for fact in facts)
        return same and all(_inside(largest, layer, axis) for axis in range(_AXES))


def _inside(largest: nn.Conv2d, layer: nn.Conv2d | None, axis: int) -> bool:
    """Tell whether a kernel reads only places along an axis that the largest kernel also reads, for every output."""
    size, padding, dilation = (
        (layer.kernel_size[axis], _ends(layer)[axis], _dilation(layer, axis)) if layer else (1, (0, 0), 1)
    )
    before, after = _ends(largest)[axis]
    step = _dilation(largest, axis)
    aligned = before >= padding[0] and (before - padding[0]) % step == 0
    fits = (before - padding[0]) // step + size <= largest.kernel_size[axis]
    # Both give the same number of outputs.
    reach = before + after - step * (largest.kernel_size[axis] - 1)
    return aligned and fits and (size == 1 or dilation == step) and reach == sum(padding) - dilation * (size - 1)


def _ends(layer: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the zeros before and after an image, by axis."""
    if isinstance(layer.padding, str):  # "same" puts the odd zero at the end
        whole = [
            d * (k - 1) if layer.padding == "same" else 0
            for d, k in zip(layer.dilation, layer.kernel_size, strict=True)
        ]
        rows, columns = ((one // 2, one - one // 2) for one in whole)
        return rows, columns
    return (layer.padding[0], layer.padding[0]), (layer.padding[1], layer.padding[1])


def _dilation(layer: nn.Conv2d, axis: int) -> int:
    """Return the dilation along an axis. A kernel with one place has none."""
    return layer.dilation[axis] if layer.kernel_size[axis] > 1 else 1


def _layer(module: fx.GraphModule, name: str | None) -> nn.Conv2d:
    layer = module.get_submodule(str(name))
    assert isinstance(layer, nn.Conv2d)
    return layer


def _is_sum(node: fx.Node) -> bool:
    """Tell whether a node adds two operands, without a factor."""
    if node.kwargs or len(node.args) != 2:
        return False
    known = (node.op == "call_function" and node.target in _ADDITIONS) or (
        node.op == "call_method" and node.target in _METHODS
    )
    return known and all(isinstance(one, fx.Node) or one == 0 for one in node.args)
