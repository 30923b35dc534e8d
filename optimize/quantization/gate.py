"""Checks that an int8 artifact still gives its source's answers. A broken artifact fails instead of scoring low."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from pydantic import Field

from optimize.errors import PassError
from optimize.measure.statistics import sqnr_db
from optimize.store.artifact import REFERENCE_FILE
from serve.common.config import Config
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program
from serve.runtime.model_files.script_file import load_script

#: Number of training images on which answers are compared.
IMAGES = 32

#: Torch's kernels are judged wrong if two things hold. They agree with exact arithmetic by less than the first figure
#: in dB. And exact arithmetic agrees with the float network by more dB than they do, by at least the second figure.
#: Ties that spread through a deep random network fall below the first (6 were seen) but not above the second. Products
#: that saturate in MobileNetV2 leave 8 dB where exact arithmetic has 33.
_KERNELS_AGREE, _KERNELS_LOSE = 10.0, 6.0


class Gate(Config):
    """The agreement with its source below which an int8 artifact counts as broken."""

    min_sqnr: float = Field(
        default=3.0,
        description="least signal-to-noise ratio of the logits in dB on 32 training images, against the float parent "
        "(ptq, dynamic) or the fake-quantized arithmetic (qat); 3 is half the signal's power, trained networks have "
        "15 to 40",
    )
    min_agreement: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="least share of those images with the same top-1 class; below it the stage fails",
    )


def check_answers(expected: torch.Tensor, found: torch.Tensor, gate: Gate, parties: str) -> str:
    """Compare two batches of logits ``(N, classes)``.

    Args:
        expected: logits of the artifact's source.
        found: logits of the artifact.
        gate: the limits.
        parties: what is compared, for the message, such as ``int8 against its float parent``.

    Returns:
        A note of the result.

    Raises:
        PassError: they agree too little, or ``found`` is not finite.
    """
    _require_finite(found, parties)
    same = int((expected.argmax(1) == found.argmax(1)).sum())
    ratio = sqnr(expected, found)
    spelled = "equal logits" if ratio == math.inf else f"SQNR {ratio:.1f} dB"
    note = f"{parties}: {spelled}, same top-1 on {same} of {len(found)} training images"
    if ratio < gate.min_sqnr or same < gate.min_agreement * len(found):
        raise PassError(
            f"{note}; this is broken (min_sqnr is {gate.min_sqnr:g} dB, min_agreement {gate.min_agreement:g})"
        )
    return note


def check_quantized(folder: Path, file: str, images: torch.Tensor, expected: torch.Tensor, gate: Gate) -> str:
    """Check that torch's kernels compute what an int8 program's integers mean, and that it answers as ``expected``.

    Args:
        folder: holds the program and its reference form.
        file: name of the packed program, or of the reference form if there is no other.
        images: normalised training images, ``float32 (N, C, H, W)``.
        expected: logits ``(N, classes)`` of the source in float arithmetic.
        gate: the limits.

    Returns:
        A note of the result.

    Raises:
        PassError: one of the two is not so.
    """
    with torch.no_grad():
        meant = load_program(folder / REFERENCE_FILE).module()(images)
    if file == REFERENCE_FILE:
        return check_answers(expected, meant, gate, "what the integers mean against float arithmetic")
    use_int8_kernels()
    with torch.no_grad():
        found = load_script(folder / file, torch.device("cpu"))(images)
    parties = "int8 against float arithmetic"
    _require_finite(found, parties)
    lost, kept = sqnr(expected, found), sqnr(expected, meant)
    if sqnr(meant, found) < _KERNELS_AGREE and kept > lost + _KERNELS_LOSE:
        raise PassError(
            f"torch's int8 kernels compute something else than these integers mean: SQNR {lost:.1f} dB where exact "
            f"arithmetic has {kept:.1f}"
        )
    return check_answers(expected, found, gate, parties)


def _require_finite(found: torch.Tensor, parties: str) -> None:
    if not found.isfinite().all():
        raise PassError(f"{parties}: logits are not finite on training images")


def sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return `sqnr_db`, with infinities for equal tensors and for noise without a signal."""
    if not expected.any():
        return -math.inf if found.any() else math.inf
    ratio = sqnr_db(expected.double().numpy(), found.double().numpy())
    return math.inf if ratio is None else ratio
