"""The operations through which channels are followed, by their effect on channels."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
import torchvision.ops
from torch import fx, nn
from torch.nn import functional

CONVOLUTIONS: frozenset[type[nn.Module]] = frozenset({nn.Conv1d, nn.Conv2d, nn.Conv3d})

#: Modules with numbers for each channel in dimension 1, and no effect of one channel on another.
PER_CHANNEL: frozenset[type[nn.Module]] = frozenset(
    {
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.PReLU),
    }
)

#: Elementwise modules.
PLACEWISE: frozenset[type[nn.Module]] = frozenset(
    {
        *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
        *(nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Tanh, nn.Softplus, nn.Softsign),
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    }
)

#: Operations on the places of each channel, which is dimension 1.
POOLS: frozenset[Any] = frozenset(
    {
        *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ZeroPad2d, nn.ReflectionPad2d),
        *(functional.avg_pool2d, functional.max_pool2d, torch.max_pool2d, functional.interpolate),
        *(functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d),
    }
)

#: Elementwise functions and methods of one tensor.
SAME_SHAPE: frozenset[Any] = frozenset(
    {
        *(functional.relu, functional.relu_, functional.relu6, functional.leaky_relu, functional.elu, functional.gelu),
        *(functional.silu, functional.mish, functional.hardswish, functional.hardsigmoid, functional.hardtanh),
        *(functional.sigmoid, functional.tanh, functional.softplus, functional.dropout, functional.dropout2d),
        *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.exp, torch.sqrt, torch.abs, torch.neg),
        *(torch.clamp, torch.clone, operator.neg, torchvision.ops.stochastic_depth),
        *("relu", "relu_", "sigmoid", "sigmoid_", "tanh", "exp", "sqrt", "abs", "neg", "clamp", "clamp_", "clone"),
        *("contiguous", "detach", "float"),
    }
)

#: Elementwise functions and methods of two operands.
BINARY: frozenset[Any] = frozenset(
    {
        *(operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul, operator.truediv),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum),
        *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"),
    }
)

CONCATS: frozenset[Any] = frozenset({torch.cat, torch.concat, torch.concatenate})
PADS: frozenset[Any] = frozenset({functional.pad})
SPLITS: frozenset[Any] = frozenset({torch.split, torch.chunk, "split", "chunk"})
REDUCTIONS: frozenset[Any] = frozenset({torch.mean, torch.sum, torch.amax, torch.amin, "mean", "sum", "amax", "amin"})
RESHAPES: frozenset[Any] = frozenset({torch.reshape, "reshape", "view"})

#: Operations that move values without changing them, and can be executed on labels.
MOVEMENTS: frozenset[Any] = RESHAPES | {
    *(torch.flatten, torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze),
    *("flatten", "permute", "transpose", "squeeze", "unsqueeze"),
}


def in_batches(operation: Any, shape: Sequence[int]) -> bool:
    """Tell whether an operation on places (``…1d``, ``…2d``, ``…3d``) takes the first dimension of a tensor for images.

    With one dimension less, it takes it for channels.
    """
    found = re.search(r"([123])d$", getattr(operation, "__name__", ""))
    if found is None or operation is nn.BatchNorm1d or operation in PLACEWISE:
        return True
    return len(shape) == int(found[1]) + 2


def dims_of(node: fx.Node, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions over which a reduction runs, counted from the last, -1. None: they are unknown."""
    found = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
    dims = found if isinstance(found, list | tuple) else (found,)
    if not dims or not all(type(dim) is int for dim in dims):
        return None
    return tuple(dim - len(shape) if dim >= 0 else dim for dim in dims)


def sliced(index: Any, dim: int, size: int) -> tuple[int, int] | None:
    """Return start and end of an index in dimension ``dim``, from the first, 0. None: it takes no contiguous range.

    The index has no ``...``, whose position would depend on the number of dimensions.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is None or isinstance(entry, slice | int) for entry in entries):
        return None
    place = entry_of(entries, dim)
    entry = entries[place] if place is not None else slice(None)
    if not isinstance(entry, slice):
        return None
    start, stop, step = entry.indices(size)
    return (start, stop) if step == 1 and stop > start else None


def entry_of(entries: Sequence[Any], dim: int) -> int | None:
    """Return the position of an index's entry for dimension ``dim``, from the first, 0. None: there is none."""
    read = [place for place, entry in enumerate(entries) if entry is not None]
    return read[dim] if dim < len(read) else None
