"""``ptq``: post-training static quantization to int8, torch.ao FX graph mode, backend x86."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from pydantic import Field

from optimize.context import Context
from optimize.passes.base import Pass, register
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import Choices, check_choices, overrides_note, resolve
from optimize.quantization.convert import choose, prepare, trace_calls, write_quantized
from optimize.quantization.gate import IMAGES, check_quantized
from optimize.quantization.targets import Observer, target_named
from optimize.store.artifact import Artifact, Product


class Ptq(Choices):
    """Settings of ``ptq``."""

    observer: Observer = Field(
        default="histogram",
        description="how activation ranges are found: histogram (least squared error), minmax (all that was seen), "
        "moving_average (the mean over batches of each batch's extremes, all batches of 32 weighing the same)",
    )
    images: int = Field(
        default=256, ge=1, description="training images that the ranges are calibrated on, stratified by class"
    )


def _apply(parent: Artifact, config: Ptq, context: Context, folder: Path) -> Product:
    target = target_named(config.target)
    example = context.example()
    traced, chosen = trace_calls(parent.module()), resolve(next(parent.line()).module, config)
    mapping = choose(traced, target.post_training(config.observer), chosen, target.observing)
    prepared = prepare(traced, mapping, example, target)
    overridden = overrides_note(prepared, chosen)
    prepared.to(context.device)
    calibrate(prepared, context, config.images)
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
