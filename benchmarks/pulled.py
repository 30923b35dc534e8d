"""``pull-expansions``: train on while the norms before depthwise convolutions are pulled towards zero.

In: a MobileNet. Does: what long trainings with decay do to ImageNet's. The norm behind a depthwise convolution undoes
what a channel before it has lost, so nothing holds such a channel up, and channels come to differ hundreds of times:
with one scale a tensor the small ones are rounded to nothing (Nagel et al. 2019, arXiv:1906.04721, figure 2). Out: the
same network with other weights. It exists to have something that int8 can break, for docs/design/recovery.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict, Field
from torch import nn

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.export.program import write_program, write_weights
from optimize.passes.base import Pass, register
from optimize.store.artifact import Artifact, Product
from optimize.training.config import Retraining
from optimize.training.loop import train


class PullExpansions(Retraining):
    """Settings of ``pull-expansions``: those of any training, and the pull."""

    model_config = ConfigDict(title="PullExpansions")

    strength: float = Field(
        default=0.02, gt=0, description="the gradient that is added for each scale and offset, against its sign"
    )


@dataclass(frozen=True)
class NormL1:
    """``strength · Σ (|γ| + |β|)`` over the norms named (of scales alone: Liu et al. 2017, arXiv:1708.06519)."""

    norms: tuple[str, ...]
    strength: float

    @torch.no_grad()
    def add(self, module: nn.Module) -> None:
        """See `Penalty`."""
        for name in self.norms:
            for parameter in module.get_submodule(name).parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.sign(), alpha=self.strength)


def expansions(module: nn.Module) -> Iterator[str]:
    """Names of the norms between a pointwise and a depthwise convolution, in the order of definition."""
    layers = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.Conv2d | nn.BatchNorm2d)]
    for (_, first), (name, norm), (_, last) in zip(layers, layers[1:], layers[2:], strict=False):
        match first, norm, last:
            case nn.Conv2d(kernel_size=(1, 1)), nn.BatchNorm2d(), nn.Conv2d(in_channels=wide, groups=groups):
                if wide == groups == norm.num_features:
                    yield name


def _apply(parent: Artifact, config: PullExpansions, context: Context, folder: Path) -> Product:
    module = parent.module()
    norms = tuple(expansions(module))
    if not norms:
        raise NotApplicableError("no norm stands between a pointwise and a depthwise convolution")
    result = train(module, context, config, penalty=NormL1(norms, config.strength))
    module.cpu().eval()
    write_weights(module, folder)
    file, file_format = write_program(module, context.example(), folder)
    return Product(file, file_format, parent.card.precision, notes=tuple(result.notes), training=(result.history,))


PULL_EXPANSIONS = register(
    Pass(
        name="pull-expansions",
        summary="train a MobileNet on until its channels differ as those of ImageNet's do",
        config=PullExpansions,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        data="training",
        libraries=("torch", "torchvision"),
        rebuild=lambda module, example: module,
    )
)
