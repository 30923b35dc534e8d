"""Batch norms over the images of all processes, so that a batch counts as one although several compute it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from optimize.training.distributed.group import Sum

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class AllReducedBatchNorm(_BatchNorm):
    """torch's batch norm with the mean and the variance of all processes' values, also on CPUs.

    torch's own SyncBatchNorm refuses tensors of CPUs (2.14). Parameters and buffers have the names of a plain norm.

    Attributes:
        copies: the number of processes that have each image at present. Each image counts once.
    """

    copies = 1

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``(N, C, …)``. Statistics are in float32 for any input dtype."""
        if not self.training:
            return super().forward(input)
        values = input.float()
        dims = [0, *range(2, values.dim())]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        here = values.new_full((1,), values.numel() / values.size(1))
        sums = Sum.apply(torch.cat((values.sum(dims), here)))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        # In two steps, because the mean of squares minus the square of the mean would lose the digits that they share.
        variance = Sum.apply(centred.square().sum(dims)) / count
        self._follow(mean.detach(), variance.detach(), count / self.copies)
        out: torch.Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * (count / (count - 1)), share)


def synchronise(module: nn.Module, device: torch.device) -> nn.Module:
    """Replace the plain batch norms of ``module`` in place by norms over all processes.

    Returns the module, or its replacement if it is a norm itself.

    Call it after the module was prepared for QAT, because fusing a convolution with its norm works only with plain
    norms. Subclasses (a norm with its activation) stay, because their other work would be lost.
    """
    return _replaced(module, device, {})


def _replaced(module: nn.Module, device: torch.device, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace recursively. ``known`` has the replacement of each module, for one that is used twice."""
    if module not in known:
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _replaced(child, device, known)
        known[module] = _like(module, device)
    return known[module]


def _like(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the replacement of ``module`` alone: for a plain norm, one over all processes."""
    if type(module) not in _PLAIN:
        return module
    if device.type == "cuda":
        replaced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        return replaced
    assert isinstance(module, _BatchNorm)
    norm = AllReducedBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    )
    norm._parameters, norm._buffers = module._parameters, module._buffers
    return norm.train(module.training)


def count_each_once(module: nn.Module, copies: int) -> None:
    """Set the number of processes that have each of the next images."""
    for layer in module.modules():
        if isinstance(layer, AllReducedBatchNorm):
            layer.copies = copies
