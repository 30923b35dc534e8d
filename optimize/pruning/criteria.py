"""Scores how much a unit matters: by its channels' weights, their norms' scales, or the effect on the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import fx

from optimize.context import Context
from optimize.pruning.groups import Grouping
from serve.runtime.images.image_preprocessing import normalise
from serve.runtime.outputs import first_output

Criterion = Literal["l1", "l2", "bn", "group", "taylor"]


def scores(
    graph_module: fx.GraphModule, grouping: Grouping, criterion: Criterion, gradients: Mapping[str, torch.Tensor] | None
) -> list[torch.Tensor]:
    """Return the score of each group's units, ``float32 (units,)``. The lowest are removed first.

    - ``l1``, ``l2``: the norm of the filters that give the channels, relative to the layer's mean. Over several layers
      it is the mean. Source: Li et al. 2017, arXiv:1608.08710.
    - ``group``: the norm of all weights that are removed with the unit, relative to the group's mean. These are
      filters, scales of norms, and the next layers' weights for the channels. Source: Fang et al. 2023,
      arXiv:2301.12900.
    - ``bn``: the mean scale of the batch norms, not normalised. Source: Liu et al. 2017, arXiv:1708.06519.
    - ``taylor``: the square of gradient times weight, summed over the filters, not normalised. Source: Molchanov et al.
      2019, arXiv:1906.10771, equation 8.

    Args:
        graph_module: the network.
        grouping: its groups.
        criterion: one of those.
        gradients: for ``taylor``, the result of `first_order`.
    """
    places = _Places(graph_module, grouping)
    if criterion == "taylor":
        assert gradients is not None
        return places.gathered(places.sums(gradients))
    if criterion == "bn":
        return places.gathered(places.means(places.scales()))
    if criterion == "group":
        total = places.sums(places.squares())
        return [found / found.mean().clamp_min(1e-30) for found in places.gathered(total.sqrt())]
    norms = places.filters(1 if criterion == "l1" else 2)
    relative = {name: norm / norm.mean().clamp_min(1e-30) for name, norm in norms.items()}
    return places.gathered(places.means(relative))


def first_order(graph_module: fx.GraphModule, grouping: Grouping, context: Context, images: int) -> dict[str, Any]:
    """Return the mean over batches of (Σ gradient · weight)² for each layer's output channels, by ``out`` and its name.

    It is computed in eval mode on training images with their labels.
    """
    graph_module.to(context.device).eval()
    weights: dict[str, Any] = {name: graph_module.get_submodule(name).weight for name in grouping.channels.layers}
    frozen = [weight for weight in weights.values() if not weight.requires_grad]
    found: dict[str, torch.Tensor] = {}
    batches = context.calibration(images)
    try:
        for weight in frozen:  # weights that are not trained matter, too
            weight.requires_grad_(True)
        for done, (pixels, labels) in enumerate(batches, start=1):
            inputs = normalise(pixels, context.preprocessing, context.device, torch.float32)
            output = first_output(graph_module(inputs))
            loss = context.task.loss(output, labels.to(context.device), context.probabilities)
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                # None: the loss does not depend on it.
                change = (torch.zeros_like(weight) if gradient is None else gradient * weight).detach()
                share = change.flatten(1).sum(1).square().cpu() / len(batches)
                found[f"out {name}"] = found.get(f"out {name}", 0) + share
            context.listener.progressed(done / len(batches), "gradients")
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
    graph_module.cpu()
    return found


class _Places:
    """Figures of channels at each place, summed up by unit."""

    def __init__(self, graph_module: fx.GraphModule, grouping: Grouping) -> None:
        self._module, self._grouping = graph_module, grouping
        units = [unit for group in grouping.groups for unit in group.units]
        self._number = {unit: index for index, unit in enumerate(units)}

    def filters(self, order: int) -> dict[str, torch.Tensor]:
        """Return the norm of each output channel's weights."""
        return {
            f"out {name}": self._weight(name).flatten(1).norm(p=order, dim=1) for name in self._grouping.channels.layers
        }

    def scales(self) -> dict[str, torch.Tensor]:
        """Return the absolute scale of each channel of a norm."""
        found = {}
        for name in self._grouping.channels.norms:
            weight = getattr(self._module.get_submodule(name), "weight", None)
            if weight is not None and hasattr(self._module.get_submodule(name), "running_mean"):
                found[f"norm {name}"] = weight.detach().abs().cpu()
        return found

    def squares(self) -> dict[str, torch.Tensor]:
        """Return the sum of the squares of all weights of a channel, at every place."""
        found = {name: norm.square() for name, norm in self.filters(2).items()}
        found |= {name: scale.square() for name, scale in self.scales().items()}
        for name, layer in self._grouping.channels.layers.items():
            if layer.per_group is None:
                found[f"in {name}"] = self._weight(name).transpose(0, 1).flatten(1).square().sum(1)
        return found

    def sums(self, figures: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the sum of each unit's figures over all places, ``(units,)``."""
        return self._summed(figures, lambda figure: figure)

    def means(self, figures: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean of each unit's figures. It is NaN without any."""
        return self.sums(figures) / self._summed(figures, torch.ones_like)

    def gathered(self, of_units: torch.Tensor) -> list[torch.Tensor]:
        """Split figures of units into groups."""
        return list(torch.split(of_units, [len(group.units) for group in self._grouping.groups]))

    def _summed(self, figures: Mapping[str, torch.Tensor], of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(len(self._number))
        channels = self._grouping.channels
        for place, figure in figures.items():
            kind, name = place.split(" ", 1)
            layer = channels.layers.get(name)
            labels = channels.norms[name] if layer is None else layer.out if kind == "out" else layer.into
            numbers = [self._number.get(unit, -1) for unit in channels.labels.sets(labels).tolist()]
            index = torch.tensor(numbers, dtype=torch.int64)
            total.index_add_(0, index[index >= 0], of(figure[index >= 0]).float())
        return total

    def _weight(self, name: str) -> torch.Tensor:
        weight = self._module.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        return weight.detach().cpu()
