"""Prepares batch norms behind layers of a float network for integer training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from optimize.errors import NotApplicableError
from optimize.quantization.graph.nodes import called_module

_LAYERS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

#: Least factor with which a layer is trained: a norm's weight over its standard deviation.
_LEAST: Final = 1e-4


def with_factors(traced: fx.GraphModule) -> None:
    """Give norms without weight and bias ones and zeros that are not trained, in place.

    torch.ao (2.11 to 2.14, ``fuse_conv_bn``) does not fuse other norms for training.

    Raises:
        NotApplicableError: a norm has no running statistics. torch.ao fails on it, and no graph can be made of it.
    """
    for node in traced.graph.nodes:
        norm = called_module(traced, node)
        if not isinstance(norm, _BatchNorm):
            continue
        if norm.running_mean is None:
            raise NotApplicableError(
                f"the norm {node.target} has no running statistics (track_running_stats=False): its output for an "
                "image depends on the others in the batch, so it has no fixed range"
            )
        if not norm.affine:
            norm.affine = True
            norm.weight = nn.Parameter(torch.ones_like(norm.running_mean), requires_grad=False)
            norm.bias = nn.Parameter(torch.zeros_like(norm.running_mean), requires_grad=False)


def turn_signs(traced: fx.GraphModule) -> None:
    """Make the factors of norms behind layers positive, in place, by changing signs of weights.

    The result computes the same. With integers from -8 to 7, folding a negative factor would need an 8.
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
    divide by the factor. With 0 or almost 0 the result is no number. A branch that starts with nothing has 0. A dead
    channel has almost 0. A channel's output moves by at most a ten thousandth of its standard deviation.
    """
    for _, norm in _with_norms(traced):
        assert isinstance(norm.running_var, torch.Tensor)
        least = _LEAST * (norm.running_var + norm.eps).sqrt()
        weight = norm.weight.data
        norm.weight.data = torch.where(weight < 0, -1.0, 1.0) * weight.abs().maximum(least)


def _with_norms(traced: fx.GraphModule) -> Iterator[tuple[Any, _BatchNorm]]:
    """Yield each layer with the norm that is its only reader. The norm has factors and statistics."""
    for node in traced.graph.nodes:
        norm = called_module(traced, node)
        if not isinstance(norm, _BatchNorm) or not norm.affine or norm.running_mean is None:
            continue
        before = node.all_input_nodes[0]
        layer = called_module(traced, before)
        if type(layer) in _LAYERS and len(before.users) == 1:
            yield layer, norm
