"""``ptq``: post-training static quantization to int8, by torch.ao's FX graph mode or torchao's PT2E."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import fx, nn

from optimize.context import Context
from optimize.errors import PassError
from optimize.passes.base import Pass, register
from optimize.quantization.choices import Chosen, check_choices, resolve
from optimize.quantization.convert import trace_calls, write_reference
from optimize.quantization.gate import DisagreementError
from optimize.quantization.lowering.integer_biases import round_biases
from optimize.quantization.observer_choice import Observer
from optimize.quantization.pt2e import (
    Watching,
    installed,
    left_in_float,
    prepare_program,
    program_form,
    simulated_program,
    watched_layers,
    weighted_layers,
)
from optimize.quantization.ranges import Granularity, WeightObserver
from optimize.quantization.refusal_advice import advice
from optimize.quantization.static import FrontEnd, Static, fx_front_end, observing, quantize
from optimize.quantization.targets import target_named
from optimize.store.artifact import Artifact, Product
from serve.runtime.errors import UserError


class Ptq(Static):
    """Settings of ``ptq``."""

    front_end: Literal["fx", "pt2e"] = Field(
        default="fx",
        description="front end that inserts the quantizers: fx (torch.ao graph mode, deprecated by torch) or pt2e "
        "(its successor in torchao; needs the extra pt2e). The integers are the same. pt2e has no "
        "program for torch's own kernels, no target tensorrt, no adaround and no bias_correction",
    )


def _fx(load: Callable[[], nn.Module], config: Ptq, chosen: Chosen, example: torch.Tensor) -> FrontEnd:
    return fx_front_end(config, observing(load, config, chosen, example), example)


def _pt2e(load: Callable[[], nn.Module], config: Ptq, chosen: Chosen, example: torch.Tensor) -> FrontEnd:
    target = target_named(config.target)

    def weight(layer: str) -> tuple[WeightObserver, Granularity]:
        return chosen.weight_observer(layer) or config.weight_observer, chosen.granularity(layer) or config.weights

    def observed(observer: Observer) -> fx.GraphModule:
        traced = trace_calls(load(), example, chosen.in_float)
        return prepare_program(traced, Watching(target.observer, observer, weight, chosen), example, target)

    def write(prepared: fx.GraphModule, folder: Path) -> Product:
        form = program_form(prepared, example)
        round_biases(form)
        product = write_reference(form, example, target, folder, "PT2E has no program for torch's kernels")
        return dataclasses.replace(product, notes=(*product.notes, *left_in_float(prepared)))

    return FrontEnd(observed, simulated_program, watched_layers, weighted_layers, write)


def check(build: Callable[[], nn.Module], config: Ptq) -> None:
    """Refuse a config that this machine, the model or the front end cannot run.

    Raises:
        UserError: see `check_choices`. Or ``front_end: pt2e`` with an unsupported option, or without torchao.
    """
    check_choices(build, config)
    if config.front_end == "fx":
        return
    asked = {
        "target: tensorrt": not target_named(config.target).packed,
        "rounding: adaround": config.rounding == "adaround",
        "bias_correction: true": config.bias_correction,
    }
    if wanted := [words for words, wants in asked.items() if wants]:
        raise UserError(f"ptq.front_end: pt2e has no {' and no '.join(wanted)}; front_end: fx has")
    if not installed():
        raise UserError("ptq.front_end: pt2e needs torchao, which is not installed: install the extra pt2e")


def _apply(parent: Artifact, config: Ptq, context: Context, folder: Path) -> Product:
    chosen = resolve(next(parent.line()).module, config)
    front = (_fx if config.front_end == "fx" else _pt2e)(parent.module, config, chosen, context.example())
    try:
        return quantize(parent, config, chosen, context, folder, front=front)
    except DisagreementError as error:
        if config.front_end != "fx":
            raise
        raise PassError(f"{error}; {advice(parent, config, context)}") from None


PTQ = register(
    Pass(
        name="ptq",
        summary="static quantization to int8, calibrated on training images",
        config=Ptq,
        accepts=frozenset({"module"}),
        yields="quantized",
        apply=_apply,
        check=check,
        more_libraries=lambda config: ("torchao",) if config.front_end == "pt2e" else (),
        data="calibration",
    )
)
