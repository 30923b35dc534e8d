"""Batch norms behind layers, of a float network that is to be trained for integers: what would spoil the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from optimize.errors import NotApplicableError
from optimize.quantization.graph.nodes import called_module

_LAYERS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

#: Least factor, of a norm's weight over its standard deviation, that a layer is trained with.
_LEAST: Final = 1e-4


def with_factors(traced: fx.GraphModule) -> None:
    """Give norms that have no factors some that change nothing and are not trained, in place.

    torch.ao (2.11 to 2.14, ``fuse_conv_bn``) fuses no others for training.

    Raises:
        NotApplicableError: a norm has no running statistics; torch.ao fails on it, and a graph has none to be made of.
    """
    for node in traced.graph.nodes:
        norm = called_module(traced, node)
        if not isinstance(norm, _BatchNorm):
            continue
        if norm.running_mean is None:
            raise NotApplicableError(
                f"the norm {node.target} has no running statistics (track_running_stats=False): what it gives for an "
                "image depends on the others of its batch, and has no range"
            )
        if not norm.affine:
            norm.affine = True
            norm.weight = nn.Parameter(torch.ones_like(norm.running_mean), requires_grad=False)
            norm.bias = nn.Parameter(torch.zeros_like(norm.running_mean), requires_grad=False)


def turn_signs(traced: fx.GraphModule) -> None:
    """Make the factors of norms behind layers positive, in place, by turning signs of weights around.

    It computes the same. Folded into integers from -8 to 7, a negative factor would ask for an 8.
    """
    for layer, norm in _with_norms(traced):
        sign = torch.where(norm.weight.detach() < 0, -1.0, 1.0)
        layer.weight.data *= sign.view(-1, *(1,) * (layer.weight.ndim - 1))
        if layer.bias is not None:
            layer.bias.data *= sign
        norm.weight.data *= sign
        norm.running_mean *= sign  # type: ignore[operator]


def lift_factors(traced: fx.GraphModule) -> None:
    """Keep the factors of norms behind layers away from 0, in place.

    torch.ao's fused layers (2.11 to 2.14, ``_ConvBnNd._forward_approximate``) quantize the weight times the factor, and
    divide by the factor: 0, as a branch has it that begins with nothing, or what is almost 0, as a channel that died,
    gives no number. What a channel gives is moved by a ten thousandth of its deviation from the mean at most.
    """
    for _, norm in _with_norms(traced):
        assert isinstance(norm.running_var, torch.Tensor)
        least = _LEAST * (norm.running_var + norm.eps).sqrt()
        weight = norm.weight.data
        norm.weight.data = torch.where(weight < 0, -1.0, 1.0) * weight.abs().maximum(least)


def _with_norms(traced: fx.GraphModule) -> Iterator[tuple[Any, _BatchNorm]]:
    """Layers with the norm that alone sees what they give, with factors and statistics of its own."""
    for node in traced.graph.nodes:
        norm = called_module(traced, node)
        if not isinstance(norm, _BatchNorm) or not norm.affine or norm.running_mean is None:
            continue
        before = node.all_input_nodes[0]
        layer = called_module(traced, before)
        if type(layer) in _LAYERS and len(before.users) == 1:
            yield layer, norm
