"""Checks that an int8 artifact still gives its source's answers. A broken artifact fails instead of scoring low."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import Field

from optimize.errors import PassError
from optimize.statistics import sqnr_db
from optimize.store.artifact import REFERENCE_FILE
from optimize.tasks.base import Task
from serve.common.config import Config
from serve.runtime.card.card import LOGITS
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program
from serve.runtime.model_files.script_file import load_script
from serve.runtime.outputs import Answer, as_outputs

#: Number of training images on which answers are compared.
IMAGES = 32

#: Torch's kernels are judged wrong if two things hold. They agree with exact arithmetic by less than the first figure
#: in dB. And exact arithmetic agrees with the float network by more dB than they do, by at least the second figure.
#: Ties that spread through a deep random network fall below the first (6 were seen) but not above the second. Products
#: that saturate in MobileNetV2 leave 8 dB where exact arithmetic has 33.
_KERNELS_AGREE, _KERNELS_LOSE = 10.0, 6.0


class DisagreementError(PassError):
    """An int8 artifact gives other answers than its source."""


class Gate(Config):
    """The agreement with its source below which an int8 artifact counts as broken."""

    min_sqnr: float = Field(
        default=3.0,
        description="lowest allowed signal-to-noise ratio of each output in dB on 32 training images, against the "
        "float parent (ptq, dynamic) or the fake-quantized arithmetic (qat). Trained networks have 15 to 40",
    )
    min_agreement: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="lowest allowed share of those images with the same answer; for class maps, the lowest share of "
        "an image's pixels, and the lowest mIoU of the answers against each other",
    )


def check_answers(
    expected: Answer, found: Answer, gate: Gate, parties: str, *, task: Task, names: Sequence[str] = (LOGITS,)
) -> str:
    """Compare the outputs for a batch.

    Args:
        expected: outputs of the artifact's source.
        found: outputs of the artifact.
        gate: the limits.
        parties: what is compared, for the message, such as ``int8 against its float parent``.
        task: what the network is for.
        names: names of the outputs.

    Returns:
        A note of the result.

    Raises:
        DisagreementError: they agree too little.
        PassError: ``found`` is not finite.
    """
    _require_finite(found, parties)
    alike = task.likeness(as_outputs(expected), as_outputs(found))
    ratios = dict(zip(names, each_sqnr(expected, found), strict=True))
    note = f"{parties}: {_spelled(ratios)}, {alike.said}"
    if min(ratios.values()) < gate.min_sqnr or alike.share < gate.min_agreement:
        raise DisagreementError(
            f"{note}; this is broken (min_sqnr is {gate.min_sqnr:g} dB, min_agreement {gate.min_agreement:g})"
        )
    return note


def _spelled(ratios: Mapping[str, float]) -> str:
    """Return the ratio of each output as text, with the names of several."""
    if len(ratios) > 1:
        return ", ".join(f"{name} {'equal' if r == math.inf else f'SQNR {r:.1f} dB'}" for name, r in ratios.items())
    (ratio,) = ratios.values()
    return "equal logits" if ratio == math.inf else f"SQNR {ratio:.1f} dB"


def check_quantized(
    folder: Path,
    file: str,
    images: torch.Tensor,
    expected: Answer,
    gate: Gate,
    *,
    task: Task,
    names: Sequence[str] = (LOGITS,),
) -> str:
    """Check that torch's kernels compute what an int8 program's integers mean, and that it answers as ``expected``.

    Args:
        folder: holds the program and its reference form.
        file: name of the packed program, or of the reference form if there is no other.
        images: normalised training images, ``float32 (N, C, H, W)``.
        expected: outputs of the source in float arithmetic.
        gate: the limits.
        task: what the network is for.
        names: names of the outputs.

    Returns:
        A note of the result.

    Raises:
        PassError: one of the two is not so.
    """
    with torch.no_grad():
        meant = load_program(folder / REFERENCE_FILE).module()(images)
    if file == REFERENCE_FILE:
        return check_answers(
            expected, meant, gate, "what the integers mean against float arithmetic", task=task, names=names
        )
    use_int8_kernels()
    with torch.no_grad():
        found = load_script(folder / file, torch.device("cpu"))(images)
    parties = "int8 against float arithmetic"
    _require_finite(found, parties)
    for lost, kept, alike in zip(
        each_sqnr(expected, found), each_sqnr(expected, meant), each_sqnr(meant, found), strict=True
    ):
        if alike < _KERNELS_AGREE and kept > lost + _KERNELS_LOSE:
            raise PassError(
                f"torch's int8 kernels compute wrong results for these integers: SQNR {lost:.1f} dB, but exact "
                f"arithmetic has {kept:.1f}"
            )
    return check_answers(expected, found, gate, parties, task=task, names=names)


def _require_finite(found: Answer, parties: str) -> None:
    if not all(output.isfinite().all() for output in as_outputs(found)):
        raise PassError(f"{parties}: logits are not finite on training images")


def sqnr(expected: Answer, found: Answer) -> float:
    """Return the least ratio of `each_sqnr`."""
    return min(each_sqnr(expected, found))


def each_sqnr(expected: Answer, found: Answer) -> list[float]:
    """Return `sqnr_db` of each output, with infinities for equal outputs and for noise without a signal."""
    return [_sqnr(*pair) for pair in zip(as_outputs(expected), as_outputs(found), strict=True)]


def _sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    if not expected.any():
        return -math.inf if found.any() else math.inf
    ratio = sqnr_db(expected.double().numpy(), found.double().numpy())
    return math.inf if ratio is None else ratio
