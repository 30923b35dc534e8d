"""Static quantization without training: training images calibrate the observers, and the result is converted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from torch import fx, nn

from optimize.context import Context
from optimize.data.loading import Loader
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import Choices, Chosen, overrides_note, weights_note
from optimize.quantization.convert import choose, prepare, trace_calls, write_quantized
from optimize.quantization.gate import IMAGES, check_quantized
from optimize.quantization.observer_choice import AUTO, AnyObserver, Observer
from optimize.quantization.observer_trials import best_observer
from optimize.quantization.observers import watched
from optimize.quantization.ranges import MEANING
from optimize.quantization.recovery.layerwise import Recovery, choose_weights, recover
from optimize.quantization.simulate import simulated, weighted
from optimize.quantization.targets import target_named
from optimize.store.artifact import Artifact, Product
from optimize.store.layer_effects import write_effects


class Static(Choices, Recovery):
    """The settings of quantization by calibration."""

    observer: AnyObserver = Field(
        default="histogram",
        description=f"how activation ranges are found: {MEANING}. auto tries all of them on three quarters of the "
        "calibration images and compares the logits on the rest with the float network's",
    )
    images: int = Field(default=256, ge=1, description="number of training images for calibration, stratified by class")
    seed: int | None = Field(
        default=None, ge=0, description="seed for the choice of those images; by default the run's seed"
    )


def observing(
    load: Callable[[], nn.Module], config: Static, chosen: Chosen, example: torch.Tensor
) -> Callable[[Observer], fx.GraphModule]:
    """Return a function that makes a new network with observers, as the settings say, with each call.

    Args:
        load: gives the float network, in eval mode. It is called each time, so that no second network stays in memory.
        config: the settings. Their observer is not used, as it may be ``auto``.
        chosen: the settings' patterns, resolved for the model.
        example: an input, ``float32 (N, C, H, W)``.

    Returns:
        A function from the name of an activation observer to the uncalibrated network.
    """
    target = target_named(config.target)

    def observed(observer: Observer) -> fx.GraphModule:
        traced = trace_calls(load(), example, chosen.in_float)
        mapping = choose(traced, target.post_training(observer), chosen, target.observing)
        model = prepare(traced, mapping, example, target)
        choose_weights(model, config, chosen, target.weight_max)
        return model

    return observed


def calibrating(config: Static, context: Context) -> Loader:
    """Return the training images on which ranges are calibrated."""
    seed = context.seed if config.seed is None else config.seed
    return dataclasses.replace(context, seed=seed).calibration(config.images)


def observer_of(
    config: Static,
    observed: Callable[[Observer], fx.GraphModule],
    module: nn.Module,
    context: Context,
    shown: Loader,
    *,
    simulate: Callable[[fx.GraphModule], fx.GraphModule] = simulated,
) -> tuple[Observer, str]:
    """Return the observer of activations: the configured one, or the choice of ``auto``.

    Args:
        config: the settings.
        observed: see `observing`.
        module: the float network, in eval mode.
        context: preprocessing and device.
        shown: see `calibrating`.
        simulate: turns a calibrated network into one that rounds as its integers will.

    Returns:
        Its name, and a note of what ``auto`` tried. The note is empty without ``auto``.
    """
    if config.observer != AUTO:
        return config.observer, ""
    return best_observer(observed, module, context, shown, simulate)


@dataclass(frozen=True)
class FrontEnd:
    """The steps in which the front ends differ, from an observer's name to the written network.

    Attributes:
        observed: makes a new uncalibrated network with observers.
        simulate: turns a calibrated network into one that rounds as its integers will.
        watched: gives for each observer the name of the layer whose output it sees.
        layers: gives the names of the layers with weights that will be quantized.
        write: writes a calibrated network, on the CPU, into a folder.
    """

    observed: Callable[[Observer], fx.GraphModule]
    simulate: Callable[[fx.GraphModule], fx.GraphModule]
    watched: Callable[[fx.GraphModule], Iterable[str]]
    layers: Callable[[fx.GraphModule], Iterable[str]]
    write: Callable[[fx.GraphModule, Path], Product]


def fx_front_end(config: Static, observed: Callable[[Observer], fx.GraphModule], example: torch.Tensor) -> FrontEnd:
    """Return the front end of torch.ao's FX graph mode.

    Args:
        config: the settings.
        observed: see `observing`.
        example: an input, ``float32 (N, C, H, W)``.
    """
    target = target_named(config.target)
    return FrontEnd(
        observed=observed,
        simulate=simulated,
        watched=lambda prepared: watched(prepared).values(),
        layers=weighted,
        write=lambda prepared, folder: write_quantized(prepared, example, target, folder),
    )


def quantize(
    parent: Artifact, config: Static, chosen: Chosen, context: Context, folder: Path, *, front: FrontEnd
) -> Product:
    """Calibrate a network with observers, improve it as the settings say, write it and check it.

    Args:
        parent: the float module.
        config: the settings.
        chosen: the settings' patterns, resolved for the model.
        context: data, preprocessing, device.
        folder: where to write.
        front: makes the network with observers, and writes it.

    Raises:
        NotApplicableError: there is nothing to quantize.
        PassError: the written artifact gives other answers.
    """
    shown, images = calibrating(config, context), context.example(IMAGES)
    module = parent.module()
    with torch.no_grad():
        expected = module(images)
    observer, tried = observer_of(config, front.observed, module, context, shown, simulate=front.simulate)
    del module  # it would be a second copy of all weights
    prepared = front.observed(observer)
    overridden = (*overrides_note(front.watched(prepared), chosen), *weights_note(front.layers(prepared), chosen))
    prepared.to(context.device)
    calibrate(prepared, context, shown)
    write_effects(recover(prepared, context, shown, config), folder)
    product = front.write(prepared.cpu(), folder)
    note = check_quantized(folder, product.file, images, expected, config, task=context.task, names=parent.card.outputs)
    said = (tried,) if tried else ()
    return dataclasses.replace(product, notes=(*product.notes, *said, *overridden, note))
