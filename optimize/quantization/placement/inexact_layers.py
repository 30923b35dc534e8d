"""Keeps layers in float that torch's integer kernels compute wrongly, as classes for which torch.ao has no kernel.

FX (2.11 to 2.14) turns its own layers into integer ones between integers, whatever the settings say. Seen in 2.14: the
kernels of PReLU, and of instance norms of small maps, give an SQNR of 10 dB and less. Exact arithmetic with the same
integers has 40.
"""

from __future__ import annotations

from typing import Final

from torch import fx, nn
from torch.nn import functional

from optimize.quantization.placement.float_calls import call_in_float


class FloatPReLU(nn.PReLU):
    """A PReLU that stays in float, see the module."""


class FloatInstanceNorm1d(nn.InstanceNorm1d):
    """An instance norm that stays in float, see the module."""


class FloatInstanceNorm2d(nn.InstanceNorm2d):
    """An instance norm that stays in float, see the module."""


class FloatInstanceNorm3d(nn.InstanceNorm3d):
    """An instance norm that stays in float, see the module."""


_IN_FLOAT: Final[dict[type[nn.Module], type[nn.Module]]] = {
    nn.PReLU: FloatPReLU,
    nn.InstanceNorm1d: FloatInstanceNorm1d,
    nn.InstanceNorm2d: FloatInstanceNorm2d,
    nn.InstanceNorm3d: FloatInstanceNorm3d,
}

#: The classes that stay in float.
IN_FLOAT: Final = tuple(_IN_FLOAT.values())


def free_inexact(module: fx.GraphModule) -> None:
    """Change the class of these layers to one that stays in float, in place. Results and state stay the same."""
    for node in list(module.graph.nodes):
        if node.target is functional.instance_norm:
            call_in_float(module, node)
    module.recompile()
    for layer in module.modules():
        layer.__class__ = _IN_FLOAT.get(type(layer), type(layer))
