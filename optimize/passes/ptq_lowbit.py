"""``ptq-lowbit``: post-training static quantization with fewer than 8 bits, run by int8 kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic import Field, model_validator
from torch import fx

from optimize.context import Context
from optimize.passes.base import Pass, register
from optimize.quantization.choices import check_choices, resolve
from optimize.quantization.convert import trace_calls
from optimize.quantization.lowbit import execution_kind
from optimize.quantization.lowbit.bit_settings import LowBits, low_layers
from optimize.quantization.lowbit.prepared import choose_bits
from optimize.quantization.observer_choice import Observer
from optimize.quantization.ranges import Granularity, WeightObserver
from optimize.quantization.static import Static, fx_front_end, observing, quantize
from optimize.quantization.targets import target_named
from optimize.store.artifact import Artifact, Product


class PtqLowbit(LowBits, Static):
    """Settings of ``ptq-lowbit``."""

    weight_observer: WeightObserver = Field(
        default="mse", description="how weight ranges are found: minmax (all of it), percentile (99.99), mse"
    )
    min_sqnr: float = Field(
        default=0.0,
        description="lowest allowed signal-to-noise ratio of the logits in dB on 32 training images, against the "
        "float parent. Usual values are 8 to 15 at 4 bits, and often below 3 at fewer; 0 means as much noise "
        "as signal",
    )

    @model_validator(mode="after")
    def _rounds_to_neighbours(self) -> PtqLowbit:
        if self.weight_bits == 1 and self.rounding == "adaround":
            raise ValueError("rounding adaround needs weight_bits 2 to 8: 1 bit has no value between -1 and 1")
        return self


def _apply(parent: Artifact, config: PtqLowbit, context: Context, folder: Path) -> Product:
    target, example = target_named(config.target), context.example()
    build = next(parent.line()).module
    chosen = resolve(build, config)
    layers = low_layers(trace_calls(parent.module(), example, chosen.in_float), chosen, config, build)
    usual = observing(parent.module, config, chosen, example)

    def weight(layer: str) -> tuple[WeightObserver, Granularity]:
        return chosen.weight_observer(layer) or config.weight_observer, chosen.granularity(layer) or config.weights

    def observed(observer: Observer) -> fx.GraphModule:
        prepared = usual(observer)
        choose_bits(prepared, layers, config, weight, target)
        return prepared

    front = fx_front_end(config, observed, example)
    product = quantize(parent, config, chosen, context, folder, front=front)
    way: execution_kind.Way = "executed" if target.packed else "simulated"
    return dataclasses.replace(
        product,
        precision=execution_kind.precision(config.label, product.precision),
        notes=(
            execution_kind.note(config.label, len(layers), way, max(config.weight_bits, 2)),  # -1 and 1
            *product.notes,
        ),
    )


PTQ_LOWBIT = register(
    Pass(
        name="ptq-lowbit",
        summary="static quantization to 1 to 7 bits, calibrated on training images; int8 kernels run it",
        config=PtqLowbit,
        accepts=frozenset({"module"}),
        yields="quantized",
        apply=_apply,
        check=check_choices,
        data="calibration",
    )
)
