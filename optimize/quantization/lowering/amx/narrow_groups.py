"""Joins narrow groups of convolutions that torch and OpenVINO get wrong on CPUs with AMX.

oneDNN (in torch 2.14 and OpenVINO 2026.4.1) has int8 kernels for AMX that read fewer than 32 channels of a map row by
row. They are wrong for groups of so few channels, with kernels of more than one place and more than 16 outputs in each
group (except 32). A zero point other than 0 adds a share to every sum. The kernels subtract it from the first group's
sums, and something else from the others. So only the first group is right. This happens for some sizes of maps and
batches, and some numbers of threads. CPUBone has such groups, of 24 channels and 96 outputs. Here neighbouring groups
are joined until they are wide enough, with zero weights between them. The sums are the same integers. Behind a ReLU the
zero point is 0, and groups stay as they are.
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

#: Largest number of joined groups in a graph.
_MOST = 4
#: Number of arguments of a grouped convolution, and of no other layer.
_ARGUMENTS = 7


def put_groups_together(converted: fx.GraphModule, example: torch.Tensor) -> int:
    """Join groups of convolutions where kernels need it, in place, and return the number of convolutions changed.

    Args:
        converted: torch's packed model. These layers get their weights packed again.
        example: an input, ``float32 (N, C, H, W)``.
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
    """Do the same as `put_groups_together` in a program of ``aten`` operators with explicit quantizers.

    Its file must be a quarter of the float one. Groups stay as they are if more than `_MOST` would have to be joined.
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
    """Return the owner and name of each packed layer whose input has a zero point other than 0."""
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
    """Return the groups of a packed convolution, and 1 for other layers."""
    if isinstance(packed, torch.ScriptObject):
        kind = packed_kind(packed)
        groups: int = 1 if kind == "linear" else getattr(torch.ops.quantized, f"{kind}_groups")(packed)
        return groups
    return 1 if getattr(owner, "transposed", False) else getattr(owner, "groups", 1)


def _together(weight: torch.Tensor, groups: int) -> int:
    """Return the number of groups to join: the fewest that make all wide enough, or all groups.

    Args:
        weight: ``(outputs, channels of a group, *kernel)``.
        groups: of the convolution.
    """
    answers, channels = len(weight) // groups, weight.shape[1]
    if not misfits_amx_narrow(groups, channels, answers, weight[0, 0].numel()):
        return 1
    wide = (count for count in range(2, groups) if groups % count == 0 and count * channels >= WIDE_GROUP)
    return next(wide, groups)


def _between_zeros(integers: torch.Tensor, groups: int, together: int) -> torch.Tensor:
    """Return the weight of joined groups. Each output has its own channels, and zeros for those of the others."""
    answers, channels = len(integers) // groups, integers.shape[1]
    wide = integers.new_zeros(len(integers), together * channels, *integers.shape[2:])
    for group in range(groups):
        own, first = slice(group * answers, (group + 1) * answers), group % together * channels
        wide[own, first : first + channels] = integers[own]
    return wide
