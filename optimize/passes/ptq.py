"""``ptq``: post-training static quantization to int8, torch.ao FX graph mode, backend x86."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import fx, nn

from optimize.context import Context
from optimize.data.loading import Loader
from optimize.passes.base import Pass, register
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import Choices, Chosen, check_choices, overrides_note, resolve
from optimize.quantization.convert import choose, prepare, trace_calls, write_quantized
from optimize.quantization.gate import IMAGES, check_quantized
from optimize.quantization.ranges import MEANING, Observer
from optimize.quantization.recovery import Recovery, choose_weights, recover
from optimize.quantization.targets import target_named
from optimize.quantization.trying import best_observer
from optimize.store.artifact import Artifact, Product
from optimize.store.effects import write_effects


class Ptq(Choices, Recovery):
    """Settings of ``ptq``."""

    observer: Observer | Literal["auto"] = Field(
        default="histogram",
        description=f"how activation ranges are found: {MEANING}; auto: the one of them with which the logits are "
        "nearest to the float network's, tried on three of four of the calibration images and judged on the others",
    )
    images: int = Field(
        default=256, ge=1, description="training images that the ranges are calibrated on, stratified by class"
    )
    seed: int | None = Field(default=None, ge=0, description="which images those are; by default the run's seed")


def observing(
    module: nn.Module, config: Ptq, chosen: Chosen, example: torch.Tensor
) -> Callable[[Observer], fx.GraphModule]:
    """What makes a network with observers, as its settings want it; a new one with each call.

    Args:
        module: the float network, in eval mode.
        config: the settings, of which the observer is not read: it may be ``auto``.
        chosen: what their patterns mean for the model.
        example: ``float32 (N, C, H, W)``.

    Returns:
        Given the name of an observer of activations, the network, not calibrated.
    """
    target, traced = target_named(config.target), trace_calls(module, example, chosen.in_float)

    def observed(observer: Observer) -> fx.GraphModule:
        mapping = choose(traced, target.post_training(observer), chosen, target.observing)
        model = prepare(traced, mapping, example, target)
        choose_weights(model, config)
        return model

    return observed


def calibrating(config: Ptq, context: Context) -> Loader:
    """The training images that ranges are calibrated on."""
    seed = context.seed if config.seed is None else config.seed
    return dataclasses.replace(context, seed=seed).calibration(config.images)


def observer_of(
    config: Ptq,
    observed: Callable[[Observer], fx.GraphModule],
    module: nn.Module,
    context: Context,
    shown: Loader,
) -> tuple[Observer, str]:
    """Which observer the activations have: that of the settings, or what ``auto`` comes to.

    Args:
        config: the settings.
        observed: see `observing`.
        module: the float network, in eval mode.
        context: preprocessing and device.
        shown: see `calibrating`.

    Returns:
        Its name, and a note of what ``auto`` tried, empty where it was not asked for.
    """
    if config.observer != "auto":
        return config.observer, ""
    return best_observer(observed, module, context, shown)


def _apply(parent: Artifact, config: Ptq, context: Context, folder: Path) -> Product:
    target = target_named(config.target)
    example = context.example()
    chosen = resolve(next(parent.line()).module, config)
    observed = observing(parent.module(), config, chosen, example)
    shown = calibrating(config, context)
    observer, tried = observer_of(config, observed, parent.module(), context, shown)
    prepared = observed(observer)
    overridden = (tried, *overrides_note(prepared, chosen)) if tried else overrides_note(prepared, chosen)
    prepared.to(context.device)
    calibrate(prepared, context, shown)
    write_effects(recover(prepared, context, shown, config), folder)
    product = write_quantized(prepared.cpu(), example, target, folder)
    images = context.example(IMAGES)
    with torch.no_grad():
        expected = parent.module()(images)
    note = check_quantized(folder, product.file, images, expected, config)
    return dataclasses.replace(product, notes=(*product.notes, *overridden, note))


PTQ = register(
    Pass(
        name="ptq",
        summary="torch.ao static quantization to int8, calibrated on training images",
        config=Ptq,
        accepts=frozenset({"module"}),
        yields="quantized",
        apply=_apply,
        check=check_choices,
        data="calibration",
    )
)
