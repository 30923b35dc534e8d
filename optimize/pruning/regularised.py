"""Training that pulls channels towards zero before they are removed, by a penalty beside the loss.

The removed channels are then near zero. Less is lost than by cutting channels that the network uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field
from torch import fx, nn

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.pruning.criteria import scores
from optimize.pruning.groups import Grouping
from optimize.pruning.settings import FineTuned
from optimize.training.config import Retraining
from optimize.training.loop import train

Pull = Literal["group", "bn"]

#: A unit counts as weak below this share of its group's mean.
_WEAK = 0.1


class Sparsifying(Retraining):
    """Settings of a training that pulls channels towards zero: those of any training, and the pull."""

    model_config = ConfigDict(title="Sparsifying")

    epochs: int = Field(
        default=3, ge=1, description="number of passes over the training images; the last epoch is kept"
    )
    pull: Pull = Field(
        default="group",
        description="what is penalized: group (all weights that would be removed together, group lasso) or bn "
        "(scales of batch norms, L1, as in Network Slimming)",
    )
    strength: float = Field(
        default=1e-3,
        gt=0,
        description="strength of the penalty: the gradient that it adds for a scale, or for a weight of average size "
        "(root mean square) in its channel",
    )


@dataclass(frozen=True)
class Part:
    """Channels of one parameter, and the units that they belong to.

    Attributes:
        parameter: its name.
        dim: the dimension of its channels.
        units: number of the unit of each channel, ``int64 (channels,)``. -1: the channel stays.
    """

    parameter: str
    dim: int
    units: torch.Tensor

    def along(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the channels in a shape that broadcasts with the parameter."""
        shape = [1] * tensor.ndim
        shape[self.dim] = -1
        return values.view(shape)


@dataclass(frozen=True)
class GroupLasso:
    """``strength · Σ √n ‖w‖₂`` over units. ``w`` are the ``n`` weights that are removed with a unit.

    Yuan and Lin 2006 (J. R. Stat. Soc. B 68, equation 2.1), over the groups of Fang et al. 2023 (arXiv:2301.12900). Its
    gradient is ``strength · w / rms(w)``: small units lose the larger share, and vanish.
    """

    parts: Sequence[Part]
    count: int
    strength: float

    @torch.no_grad()
    def add(self, module: nn.Module) -> None:
        """See `Penalty`."""
        parameters = dict(module.named_parameters())
        device = next(iter(parameters.values())).device
        # One more, for all channels that stay.
        squares, weights = (torch.zeros(self.count + 1, device=device) for _ in range(2))
        for part in self.parts:
            tensor, units = parameters[part.parameter], part.units.to(device) % (self.count + 1)  # -1: the last
            each = tensor.detach().movedim(part.dim, 0).flatten(1) if tensor.ndim > 1 else tensor.detach()[:, None]
            squares.index_add_(0, units, each.square().sum(1).float())
            weights.index_add_(0, units, torch.full((len(units),), float(each.shape[1]), device=device))
        pull = self.strength / (squares / weights.clamp_min(1)).sqrt().clamp_min(1e-12)
        pull[-1] = 0.0
        for part in self.parts:
            tensor = parameters[part.parameter]
            if tensor.grad is not None:
                tensor.grad.add_(tensor * part.along(tensor, pull[part.units.to(device)]))


@dataclass(frozen=True)
class ScaleL1:
    """``strength · Σ |γ|`` over the scales of batch norms (Liu et al. 2017, arXiv:1708.06519, equation 1)."""

    parts: Sequence[Part]
    strength: float

    @torch.no_grad()
    def add(self, module: nn.Module) -> None:
        """See `Penalty`."""
        parameters = dict(module.named_parameters())
        for part in self.parts:
            scale = parameters[part.parameter]
            if scale.grad is not None:
                scale.grad.add_(self.strength * scale.sign() * (part.units >= 0).to(scale.device))


def sparsify(
    module: fx.GraphModule, grouping: Grouping, context: Context, config: Sparsifying, *, keep_zeros: bool
) -> FineTuned:
    """Train a traced module in place, with a pull on all removable channels.

    It is left on the CPU, in eval mode, with the weights of the last epoch. Earlier epochs were pulled for less time.

    Raises:
        NotApplicableError: there is nothing to pull on.
    """
    before = _weak(module, grouping)
    penalty = _penalty(module, grouping, config)
    result = train(module, context, config, keep_zeros=keep_zeros, penalty=penalty)
    module.cpu().eval()
    after = _weak(module, grouping)
    note = (
        f"trained {len(result.epochs)} epochs with a pull on channels ({config.pull}, strength {config.strength:g}): "
        f"{after:.0%} of those that can be removed are below {_WEAK:g} of their group's mean, {before:.0%} before; "
        f"{result.metric} {result.held_out_score:.4f} on {result.held_out_images} held-out images"
    )
    return FineTuned((note, *result.notes), (result.history,))


def _penalty(module: fx.GraphModule, grouping: Grouping, config: Sparsifying) -> GroupLasso | ScaleL1:
    parts, count = parts_of(module, grouping)
    if config.pull == "group":
        return GroupLasso(parts, count, config.strength)
    scales = [part for part in parts if part.parameter.removesuffix(".weight") in grouping.channels.norms]
    if not any(bool((part.units >= 0).any()) for part in scales):
        raise NotApplicableError("no batch norm scales channels that can be removed, so pull: bn has no effect")
    return ScaleL1(scales, config.strength)


def parts_of(module: fx.GraphModule, grouping: Grouping) -> tuple[list[Part], int]:
    """Return every parameter that loses channels with a unit, and the number of units."""
    channels = grouping.channels
    number = {unit: place for place, unit in enumerate(unit for group in grouping.groups for unit in group.units)}

    def units(labels: torch.Tensor) -> torch.Tensor:
        return torch.tensor([number.get(unit, -1) for unit in channels.labels.sets(labels).tolist()])

    parts = []
    for name, layer in channels.layers.items():
        parts.append(Part(f"{name}.weight", 0, units(layer.out)))
        if layer.per_group is None:
            parts.append(Part(f"{name}.weight", 1, units(layer.into)))
    for name, labels in channels.norms.items():
        norm: Any = module.get_submodule(name)
        if getattr(norm, "weight", None) is not None and hasattr(norm, "running_mean"):
            parts.append(Part(f"{name}.weight", 0, units(labels)))
    # Leave out parameters that stay whole: the module knows a shared one by only one of its names.
    return [part for part in parts if bool((part.units >= 0).any())], len(number)


def _weak(module: fx.GraphModule, grouping: Grouping) -> float:
    """Return the share of units that are weak compared with the others of their group."""
    relative = torch.cat(scores(module, grouping, "group", None))
    return float((relative < _WEAK).double().mean())
