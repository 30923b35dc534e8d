"""Layers that torch's integer kernels compute wrongly, kept in float: of classes that torch.ao has no kernel for.

FX (2.11 to 2.14) makes its own layers integer ones wherever they stand between integers, whatever it is told. Seen in
2.14: the kernels of PReLU, and of instance norms of small maps, give an SQNR of 10 dB and less where exact arithmetic
with the same integers has 40.
"""

from __future__ import annotations

from typing import Final

from torch import fx, nn
from torch.nn import functional

from optimize.quantization.placement.float_calls import call_in_float


class FloatPReLU(nn.PReLU):
    """See the module."""


class FloatInstanceNorm1d(nn.InstanceNorm1d):
    """See the module."""


class FloatInstanceNorm2d(nn.InstanceNorm2d):
    """See the module."""


class FloatInstanceNorm3d(nn.InstanceNorm3d):
    """See the module."""


_IN_FLOAT: Final[dict[type[nn.Module], type[nn.Module]]] = {
    nn.PReLU: FloatPReLU,
    nn.InstanceNorm1d: FloatInstanceNorm1d,
    nn.InstanceNorm2d: FloatInstanceNorm2d,
    nn.InstanceNorm3d: FloatInstanceNorm3d,
}

#: What they become.
IN_FLOAT: Final = tuple(_IN_FLOAT.values())


def free_inexact(module: fx.GraphModule) -> None:
    """Make these layers of classes that stay in float, in place; they compute the same and have the same state."""
    for node in list(module.graph.nodes):
        if node.target is functional.instance_norm:
            call_in_float(module, node)
    module.recompile()
    for layer in module.modules():
        layer.__class__ = _IN_FLOAT.get(type(layer), type(layer))
