"""``qat-lowbit``: training with fewer than 8 bits, run by int8 kernels.

It starts from a float module or from more bits.

Training rounds the weights and inputs of layers (`optimize.quantization.lowbit`). Shortcuts, sums, pools, and the first
and the last layer stay int8. They are float in training and are calibrated on the trained network. The trained float
weights are stored beside the program. A later ``qat-lowbit`` with fewer bits starts from them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ConfigDict, Field
from torch import fx, nn

from optimize.context import Context
from optimize.export.program import write_weights
from optimize.passes.base import Pass, gradients_lost, register, zeros_are_meant
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import check_choices, overrides_note, resolve
from optimize.quantization.convert import choose, prepare, trace_calls, write_quantized
from optimize.quantization.gate import IMAGES, check_quantized
from optimize.quantization.lowbit import execution_kind
from optimize.quantization.lowbit.bit_settings import LowBitTraining, low_layers
from optimize.quantization.lowbit.network import Quantized, settle, start_network
from optimize.quantization.lowbit.prepared import lay_codes, lay_grids
from optimize.quantization.observer_choice import Observer
from optimize.quantization.observers import watched
from optimize.quantization.ranges import MEANING
from optimize.quantization.rewrites.batch_norms import turn_signs
from optimize.quantization.targets import target_named
from optimize.store.artifact import Artifact, Product
from optimize.training.config import TrainingConfig, by_optimizer
from optimize.training.loop import train
from serve.runtime.device.cpu_integers import WEIGHT_MAX
from serve.runtime.errors import UserError


class QatLowbit(TrainingConfig, LowBitTraining):
    """Settings of ``qat-lowbit``."""

    model_config = ConfigDict(title="QatLowbit")

    epochs: int = Field(default=8, ge=1, description="number of passes over the training images")
    learning_rate: float = Field(
        default_factory=by_optimizer(sgd=0.01, adamw=1e-4),
        gt=0,
        description="peak learning rate, also for learned steps and bounds; by default 0.01 for sgd and 0.0001 for "
        "adamw",
    )
    images: int = Field(
        default=256,
        ge=1,
        description="number of training images that initialize the input grids and calibrate int8 ranges afterwards",
    )
    observer: Observer = Field(default="histogram", description=f"how the int8 ranges are found: {MEANING}")


def _apply(parent: Artifact, config: QatLowbit, context: Context, folder: Path) -> Product:
    target, example = target_named(config.target), context.example()
    build = next(parent.line()).module
    chosen = resolve(build, config)
    traced = trace_calls(parent.module(), example)
    turn_signs(traced)
    layers = low_layers(traced, chosen, config, build)
    network = start_network(traced, layers, config, context, config.images)
    result = train(network, context, config, from_start=True, keep_zeros=zeros_are_meant(parent))
    network.cpu()
    settled = settle(network, traced)
    write_weights(settled.module, folder)
    mapping = choose(traced, target.post_training(config.observer), chosen, target.observing)
    prepared = prepare(_on_grids(settled), mapping, example, target)
    lay_codes(prepared, settled.codes)
    lay_grids(prepared, settled.grids, target)
    calibrate(prepared.to(context.device), context, context.calibration(config.images))
    product = write_quantized(prepared.cpu(), example, target, folder)
    images = context.example(IMAGES)
    with torch.no_grad():
        expected = network(images)
    way: execution_kind.Way = "executed" if target.packed else "simulated"
    return dataclasses.replace(
        product,
        precision=execution_kind.precision(config.label, product.precision),
        notes=(
            execution_kind.note(
                config.label, len(layers), way, max((each.bits for each in settled.codes.values()), default=8)
            ),
            *product.notes,
            *overrides_note(watched(prepared).values(), chosen),
            check_quantized(
                folder, product.file, images, expected, config, task=context.task, names=parent.card.outputs
            ),
            result.kept,
            *result.notes,
            *gradients_lost(parent, traced, example),
        ),
        training=(result.history,),
    )


def _check(build: Callable[[], nn.Module], config: QatLowbit) -> None:
    """Check the config as `check_choices` does, and that all x86 CPUs can sum the integers (`WEIGHT_MAX`).

    Only DoReFa's 7 bits exceed them.

    Raises:
        UserError: as `check_choices`, or the sum of two products would not fit into 16 bits.
    """
    check_choices(build, config)
    target = target_named(config.target)
    wide = config.weight_quantizer == "dorefa" and config.weight_bits == 7
    if wide and config.activation_bits == 8 and target.packed and target.weight_max <= WEIGHT_MAX:
        raise UserError(
            f"dorefa of 7 bits has integers up to 127, and target {target.name} cannot sum their products with "
            "8-bit activations: set weight_bits to at most 6, or activation_bits to at most 7"
        )


def _on_grids(settled: Quantized) -> fx.GraphModule:
    """Return the trained network with its weights rounded."""
    module = copy.deepcopy(settled.module)
    for name, codes in settled.codes.items():
        module.get_submodule(name).weight.data = codes.value
    return module


QAT_LOWBIT = register(
    Pass(
        name="qat-lowbit",
        summary="training with 1 to 7 bits (LSQ, PACT, DoReFa, ternary, binary); int8 kernels run it",
        config=QatLowbit,
        accepts=frozenset({"module", "lowbit"}),
        yields="lowbit",
        apply=_apply,
        check=_check,
        data="training",
        rebuild=trace_calls,
    )
)
