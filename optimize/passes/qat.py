"""``qat``: quantization-aware training to int8 from a float or fused module, with torch.ao's FX graph mode.

The schedule follows Krishnamoorthi 2018 (arXiv:1806.08342, section 3.2). Weights adapt while the ranges still move.
Then the ranges are frozen, and batch norms can be frozen too. If no epoch is better on the held-out images, the network
stays as it was calibrated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ConfigDict, Field, field_validator, model_validator
from torch import fx, nn
from torch.ao.nn.intrinsic.qat import freeze_bn_stats
from torch.ao.quantization.observer import ObserverBase

from optimize.context import Context
from optimize.passes.base import Learner, Pass, gradients_lost, register, zeros_are_meant
from optimize.quantization.calibration import start_ranges
from optimize.quantization.choices import (
    Choices,
    Chosen,
    Override,
    check_choices,
    of_activations,
    overrides_note,
    resolve,
)
from optimize.quantization.convert import choose, prepare, trace_calls, write_quantized
from optimize.quantization.gate import IMAGES, check_quantized
from optimize.quantization.graph.fused_names import nodes_in
from optimize.quantization.observer_choice import Observer
from optimize.quantization.observers import activations, observe, watched
from optimize.quantization.pixel_ties import part_from_ties
from optimize.quantization.rewrites.batch_norms import lift_factors
from optimize.quantization.targets import target_named
from optimize.store.artifact import Artifact, Product
from optimize.training.config import TrainingConfig, by_optimizer
from optimize.training.loop import train


class Qat(TrainingConfig, Choices):
    """Settings of ``qat``."""

    model_config = ConfigDict(title="Qat")

    epochs: int = Field(default=3, ge=1, description="number of passes over the training images")
    learning_rate: float = Field(
        default_factory=by_optimizer(sgd=0.002, adamw=2e-5),
        gt=0,
        description="peak learning rate; by default 0.002 for sgd and 0.00002 for adamw. Fused networks have no "
        "norms and diverge at much higher rates",
    )
    freeze_norms_at: int = Field(
        default_factory=lambda others: others.get("epochs", 3),
        ge=0,
        description="epoch, from 0, at which batch-norm statistics freeze; by default never",
    )
    freeze_observers_at: int = Field(
        default_factory=lambda others: min(2, others.get("epochs", 2)),
        ge=0,
        description="epoch, from 0, at which activation ranges freeze; by default 2, or never if there are fewer",
    )
    images: int = Field(
        default=256,
        ge=1,
        description="number of training images that calibrate the ranges before the first step",
    )
    observer: Observer = Field(
        default="moving-average",
        description="how the initial ranges are found, as in ptq",
    )
    range_horizon: int = Field(
        default=100,
        ge=1,
        description="number of steps that an activation range averages over, with exponential decay",
    )

    @field_validator("overrides")
    @classmethod
    def _of_activations(cls, overrides: dict[str, Override]) -> dict[str, Override]:
        of_activations(overrides, "qat uses one scale per output channel")
        return overrides

    @model_validator(mode="after")
    def _freezes_in_time(self) -> Qat:
        if self.freeze_observers_at > self.epochs:
            raise ValueError(
                f"freeze_observers_at={self.freeze_observers_at} comes after the last of {self.epochs} epochs; "
                f"use {self.epochs} for never"
            )
        return self


def _prepared(
    module: nn.Module, config: Qat, chosen: Chosen, example: torch.Tensor
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Return the network for training, and the names that it has for the nodes of ``module``."""
    target = target_named(config.target)
    # Traced in eval mode and trained afterwards: see `trace`.
    traced = trace_calls(module, example, chosen.in_float).train()
    lift_factors(traced)
    mapping = choose(traced, target.quantization_aware(config.range_horizon), chosen)
    prepared = prepare(traced, mapping, example, target)
    return prepared, nodes_in(prepared, traced)


def _learner(module: nn.Module, config: Qat, build: Callable[[], nn.Module], example: torch.Tensor) -> Learner:
    return _prepared(module, config, resolve(build, config), example)


def _apply(parent: Artifact, config: Qat, context: Context, folder: Path) -> Product:
    target = target_named(config.target)
    example = context.example()
    chosen = resolve(next(parent.line()).module, config)
    prepared, nodes = _prepared(parent.module(), config, chosen, example)
    overridden = overrides_note(watched(prepared).values(), chosen)
    prepared.to(context.device).eval()

    def observer_of(name: str) -> ObserverBase:
        return target.observer(chosen.observer(name) or config.observer)

    start_ranges(prepared, context, config.images, observer_of)
    ranges = activations(prepared)

    def set_mode(module: nn.Module, epoch: int, training: bool) -> None:
        # Observers also run in eval mode: the held-out images must not move the ranges. Those of weights always run,
        # because a weight's range is the range of its current values.
        observe(ranges, training and epoch < config.freeze_observers_at)
        if training and epoch >= config.freeze_norms_at:
            module.apply(freeze_bn_stats)
            for layer in module.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.eval()  # norms that no convolution absorbed

    zeros = zeros_are_meant(parent)
    result = train(prepared, context, config, set_mode=set_mode, from_start=True, keep_zeros=zeros, nodes=nodes)
    part_from_ties(prepared.cpu(), example)
    product = write_quantized(prepared, example, target, folder)
    images = context.example(IMAGES)
    with torch.no_grad():
        expected = prepared(images)
    notes = (
        *overridden,
        check_quantized(folder, product.file, images, expected, config, task=context.task, names=parent.card.outputs),
        result.kept,
        *result.notes,
        *gradients_lost(parent, prepared, example),
    )
    return dataclasses.replace(product, notes=(*product.notes, *notes), training=(result.history,))


QAT = register(
    Pass(
        name="qat",
        summary="torch.ao quantization-aware training to int8",
        config=Qat,
        accepts=frozenset({"module"}),
        yields="quantized",
        apply=_apply,
        learner=_learner,
        check=check_choices,
        data="training",
    )
)
