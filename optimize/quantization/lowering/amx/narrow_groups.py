"""Convolutions in narrow groups, which torch and OpenVINO get wrong on CPUs with AMX: groups are put together.

oneDNN (in torch 2.14 and OpenVINO 2026.4.1) has int8 kernels for AMX that read fewer than 32 channels of a map row by
row. In groups of so few, with kernels of more than one place and more than 16 answers each (but for 32), they take off
what an integer for zero that is not 0 has added from the first group's sums, and from the others' something else: the
first group is right, and nothing of the others, for maps, batches and threads of some numbers (CPUBone's groups of 24
channels and 96 answers). With the groups put together that stand side by side, until they are wide enough, and zeros
for weights between them, the sums are the same integers. Behind a ReLU zero is 0, and groups are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.export.sparsity import packed_kind
from optimize.lint.graph import WIDE_GROUP, misfits_amx_narrow
from optimize.quantization.graph.explicit_quantizers import quantizing
from optimize.quantization.lowering.integer_biases import WEIGHTED, packed_layers, put_back, weight_bias, with_integers
from optimize.quantization.lowering.narrow_ranges import quantized_parameters
from optimize.tracing.constants import attribute

#: Groups that are one at most, in a graph.
_MOST = 4
#: Of a convolution in groups, and of no other layer.
_ARGUMENTS = 7


def put_groups_together(converted: fx.GraphModule, example: torch.Tensor) -> int:
    """Put groups of convolutions together where kernels need it, in place; returns of how many convolutions.

    Args:
        converted: torch's packed model; these layers get their weights packed anew.
        example: ``float32 (N, C, H, W)``.
    """
    narrow: list[tuple[Any, str, Any, int, int]] = []
    for owner, name, packed in packed_layers(converted):
        groups = _groups(owner, packed)
        if (together := _together(weight_bias(packed)[0], groups)) > 1:
            narrow.append((owner, name, packed, groups, together))
    if not narrow:
        return 0
    beside_zero = _beside_zero(converted, example)
    count = 0
    for owner, name, packed, groups, together in narrow:
        if (id(owner), name) not in beside_zero:
            continue
        weight, bias = weight_bias(packed)
        put_back(
            owner,
            name,
            packed,
            with_integers(weight, _between_zeros(weight.int_repr(), groups, together)),
            bias,
            groups=groups // together,
        )
        count += 1
    return count


def put_explicit_groups_together(module: fx.GraphModule) -> int:
    """As `put_groups_together`, of a program of ``aten`` operators with explicit quantizers that becomes a graph.

    Its file is to be a quarter of the float one: where more than `_MOST` groups would be one, they are left.
    """
    count = 0
    for node in list(module.graph.nodes):
        if node.target not in WEIGHTED or len(node.args) < _ARGUMENTS:
            continue  # the last argument is the groups
        given, weight, *others, groups = node.args
        if quantizing(given) != "dequantize_per_tensor" or quantizing(weight) != "dequantize_per_channel":
            continue
        integers, beside_zero = attribute(module, str(weight.args[0].target)), given.args[2] != 0
        together = _together(integers, groups)
        if together == 1 or together > _MOST or not beside_zero:
            continue
        name = f"groups_together_{count}"
        module.register_buffer(name, _between_zeros(integers, groups, together))
        with module.graph.inserting_before(weight):
            wide = module.graph.get_attr(name)
            weight = module.graph.call_function(weight.target, (wide, *weight.args[1:]), weight.kwargs)
        node.args = (given, weight, *others, groups // together)
        count += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return count


def _beside_zero(converted: fx.GraphModule, example: torch.Tensor) -> set[tuple[int, str]]:
    """Which packed layers are given integers of which one that is not 0 stands for zero: whose, and its name."""
    parameters, found = quantized_parameters(converted, example), set[tuple[int, str]]()
    for node in converted.graph.nodes:
        given = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if given is None or parameters.get(given, (1.0, 0))[1] == 0:
            continue
        if node.op == "call_module":
            found.add((id(converted.get_submodule(str(node.target))), ""))
        for constant in [each for each in node.all_input_nodes if each.op == "get_attr"]:
            path, _, name = str(constant.target).rpartition(".")
            found.add((id(converted.get_submodule(path)), name))
    return found


def _groups(owner: Any, packed: Any) -> int:
    """Of a packed convolution; 1 of other layers."""
    if isinstance(packed, torch.ScriptObject):
        kind = packed_kind(packed)
        groups: int = 1 if kind == "linear" else getattr(torch.ops.quantized, f"{kind}_groups")(packed)
        return groups
    return 1 if getattr(owner, "transposed", False) else getattr(owner, "groups", 1)


def _together(weight: torch.Tensor, groups: int) -> int:
    """How many groups are put together to one: the fewest with which all are wide enough, or all of them.

    Args:
        weight: ``(answers, channels of a group, *kernel)``.
        groups: of the convolution.
    """
    answers, channels = len(weight) // groups, weight.shape[1]
    if not misfits_amx_narrow(groups, channels, answers, weight[0, 0].numel()):
        return 1
    wide = (count for count in range(2, groups) if groups % count == 0 and count * channels >= WIDE_GROUP)
    return next(wide, groups)


def _between_zeros(integers: torch.Tensor, groups: int, together: int) -> torch.Tensor:
    """The weight of so many groups put together: each answer has its own channels among those of others."""
    answers, channels = len(integers) // groups, integers.shape[1]
    wide = integers.new_zeros(len(integers), together * channels, *integers.shape[2:])
    for group in range(groups):
        own, first = slice(group * answers, (group + 1) * answers), group % together * channels
        wide[own, first : first + channels] = integers[own]
    return wide
