"""The one training loop: for the baseline and for quantization-aware training.

The best epoch is chosen on images held out of the training split, never on those that accuracy is
reported on: choosing on them would flatter the result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field, field_validator
from torch import nn

from optimize.context import Context
from optimize.data.augment import augment
from optimize.data.loading import Loader, loader
from optimize.data.records import Augmentation, ImageData
from optimize.data.splits import hold_out
from optimize.errors import PassError
from serve.config import Config
from serve.runtime.errors import UserError
from serve.runtime.images import normalise


class TrainingConfig(Config):
    """Settings of a training run: SGD with Nesterov momentum, warm-up then cosine (one cycle)."""

    model_config = ConfigDict(title="Training")  # as users know it

    epochs: int = Field(default=8, ge=1, description="passes over the training images")
    batch_size: int = Field(default=64, ge=2, description="images per step")
    learning_rate: float = Field(default=0.05, gt=0, description="peak learning rate, reached after the warm-up")
    warm_up: float = Field(default=0.2, ge=0, lt=1, description="share of all steps in which the rate rises")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(default=5e-4, ge=0, description="of weights; norms and biases have none")
    augment: Literal["data", "none", "shift", "shift+flip"] | bool = Field(
        default="data", description="random changes of the training images; data: what suits the data set"
    )
    skip_unreadable: float = Field(
        default=0.01, ge=0, le=1, description="share of the training images that may be unreadable, and are left out"
    )
    holdout: float = Field(
        default=0.1, gt=0, lt=0.5, description="share of the training images that the best epoch is chosen on"
    )

    @field_validator("augment", mode="before")
    @classmethod
    def _in_words(cls, value: object) -> object:
        """A truth value as a word, so that what means the same is the same."""
        return {True: "data", False: "none"}[value] if isinstance(value, bool) else value

    def augmentation(self, data: ImageData) -> Augmentation:
        """What is done to the training images of ``data``."""
        return data.augment if self.augment == "data" or isinstance(self.augment, bool) else self.augment


@dataclass(frozen=True)
class Epoch:
    """One epoch: mean training loss (nats) and top-1 on the held-out images (fraction)."""

    loss: float
    held_out_top1: float


@dataclass(frozen=True)
class TrainingResult:
    """What a training run did; the module is left with the weights of epoch ``best``.

    Attributes:
        epochs: one after the other.
        best: number of the kept one, from 0; None: no epoch was better than the module as it came, and that is kept.
        held_out_top1: of what is kept, on the held-out images (fraction).
        held_out_images: how many there are.
        notes: the images that could not be read.
    """

    epochs: tuple[Epoch, ...]
    best: int | None
    held_out_top1: float
    held_out_images: int
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> str:
        """Which epoch was kept and how good it is, as a note."""
        which = "best of {} epochs: {}" if self.best is not None else "no better after any of {} epochs, kept {}"
        number = str(self.best + 1) if self.best is not None else "as it was before them"
        return (
            f"{which.format(len(self.epochs), number)}, "
            f"top-1 {self.held_out_top1:.4f} on {self.held_out_images} held-out images"
        )


def train(
    module: nn.Module,
    context: Context,
    config: TrainingConfig,
    *,
    set_mode: Callable[[nn.Module, int, bool], None] | None = None,
    from_start: bool = False,
) -> TrainingResult:
    """Train ``module`` in place on ``context.device`` and leave it there in eval mode, at its best epoch.

    Args:
        module: maps ``float32 (N, C, H, W)`` to logits ``(N, classes)``.
        context: data, device and seed.
        config: see `TrainingConfig`.
        set_mode: called after the module was put into training mode (True) or eval mode (False), with the
            epoch's number from 0, for modules with more modes than those two.
        from_start: whether the module as it comes is kept where no epoch is better: for one that is trained already.

    Raises:
        PassError: the loss became NaN or infinite.
        UserError: no class has two training images.
    """
    device = context.device
    module.to(device)
    fit, held = hold_out(context.data.train, config.holdout, context.seed)
    if not len(held):
        raise UserError(
            f"{context.data.name}: has one training image a class, so that none can be held out to choose the best "
            "epoch on; training needs a class with at least two"
        )
    unreadable: dict[str, Any] = {
        "skip_unreadable": config.skip_unreadable,
        "remedy": f"at most {config.skip_unreadable:.2%} may be, to be left out of training (skip_unreadable)",
        "said": context.listener.said,
    }
    batches = loader(
        fit,
        context.preprocessing,
        batch_size=config.batch_size,
        device=device,
        shuffle=True,
        seed=context.seed,
        **unreadable,
    )
    validation = loader(
        held, context.preprocessing, batch_size=256, device=device, scratch=context.scratch, **unreadable
    )
    kind = config.augmentation(context.data)
    optimizer = torch.optim.SGD(
        _groups(module, config.weight_decay),
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
    )
    steps = config.epochs * len(batches)
    # A rise of exactly one step is divided by its length of 0 in OneCycleLR (torch 2.11 to 2.14).
    warm_up = config.warm_up if config.warm_up * (steps + 1) != 1 else 0.0
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=steps + 1, pct_start=warm_up, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(context.seed)
    history: list[Epoch] = []
    best_state: dict[str, torch.Tensor] = {}
    best, reached = None, -1.0

    def held_out(number: int) -> float:
        module.eval()
        if set_mode is not None:
            set_mode(module, number, False)
        return top1(module, validation, context)

    if from_start:
        reached, best_state = held_out(0), copy.deepcopy(module.state_dict())
    for number in range(config.epochs):
        module.train()
        if set_mode is not None:
            set_mode(module, number, True)
        total = torch.zeros((), device=device)
        count = 0
        for step, (pixels, labels) in enumerate(batches.epoch(number), start=1):
            images = pixels.to(device, non_blocking=True)
            images = augment(images, kind, generator)
            inputs = normalise(images, context.preprocessing, device, torch.float32)
            loss = nn.functional.cross_entropy(module(inputs), labels.to(device, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(labels)
            count += len(labels)
            context.listener.progressed((number * len(batches) + step) / steps, f"epoch {number + 1}/{config.epochs}")
        mean = (total / count).item()
        if not torch.isfinite(torch.tensor(mean)):
            raise PassError(
                f"training diverged: the loss is {mean} in epoch {number + 1}; "
                f"lower learning_rate (it is {config.learning_rate:g})"
            )
        history.append(Epoch(mean, held_out(number)))
        # The later of two equal epochs has seen more; what was trained already is left only for something better.
        if history[-1].held_out_top1 > reached or (best is not None and history[-1].held_out_top1 == reached):
            best, reached = number, history[-1].held_out_top1
            best_state = copy.deepcopy(module.state_dict())
    module.load_state_dict(best_state)
    module.eval()
    notes = tuple(
        f"of the {title} images, {part.note()}"
        for title, part in (("training", batches), ("held-out", validation))
        if part.left_out
    )
    return TrainingResult(tuple(history), best, reached, len(held), notes)


def top1(module: nn.Module, batches: Loader, context: Context) -> float:
    """Share of images that ``module``, in eval mode, classifies right."""
    right = count = 0
    with torch.no_grad():
        for images, labels in batches:
            logits = module(normalise(images, context.preprocessing, context.device, torch.float32))
            right += int((logits.argmax(1).cpu() == labels).sum())
            count += len(labels)
    return right / count


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weights with decay; vectors (norms, biases) without."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
