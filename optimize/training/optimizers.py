"""SGD or AdamW over a module's parameters, as the settings say; and gradients that are no longer than they allow."""

from __future__ import annotations

import torch
from torch import nn

from optimize.training.config import TrainingConfig


def make_optimizer(module: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of ``module``'s parameters: SGD with Nesterov momentum, or AdamW (arXiv:1711.05101)."""
    groups = _groups(module, config.weight_decay)
    if config.optimizer == "adamw":
        # On a CPU torch (2.14) passes over the weights once for each of a dozen operations if it is not told otherwise.
        fused = all(each.device.type == "cpu" and each.is_floating_point() for each in module.parameters())
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.momentum, 0.999), fused=fused or None)
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.momentum > 0)


def clip(optimizer: torch.optim.Optimizer, longest: float | None) -> None:
    """Scale the gradients of all parameters together, so that their L2 norm is at most ``longest``; None: leave them.

    One that is not finite is left to spoil the loss, which is then refused in one line.
    """
    if longest is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], longest)


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weights with decay; vectors (norms, biases) without."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
