"""Whether an int8 artifact still answers as what it was made from: broken ones fail, not merely score low."""

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

#: Training images that answers are compared on.
IMAGES = 32

#: Torch's kernels compute something else than their integers mean where exact arithmetic agrees with them by less than
#: this many dB, and with the float network by so many more than they do. Ties that spread through a deep random
#: network come below the first (6 were seen) but not above the second; products that saturate in MobileNetV2 leave
#: 8 dB where exact arithmetic has 33.
_KERNELS_AGREE, _KERNELS_LOSE = 10.0, 6.0


class Gate(Config):
    """Below which agreement with what it was made from an int8 artifact is broken."""

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
        expected: of what the artifact was made from.
        found: of the artifact.
        gate: what is too little.
        parties: which two are compared, for the message, such as ``int8 against its float parent``.

    Returns:
        What was found, as a note.

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
    """Check an int8 program: torch's kernels compute what its integers mean, and they answer as ``expected``.

    Args:
        folder: holds the program and its reference form.
        file: the packed program's name; that of the reference form where there is no other.
        images: ``float32 (N, C, H, W)``, training images, normalised.
        expected: logits ``(N, classes)`` in float arithmetic, of what was quantized.
        gate: what is too little.

    Returns:
        What was found, as a note.

    Raises:
        PassError: one of the two does not hold.
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
    """`sqnr_db` with infinities for equal tensors, and for noise without a signal."""
    if not expected.any():
        return -math.inf if found.any() else math.inf
    ratio = sqnr_db(expected.double().numpy(), found.double().numpy())
    return math.inf if ratio is None else ratio
