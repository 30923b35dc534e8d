"""Answers of executions against those of what the integers mean: the parity certificate, from answers alone."""

from __future__ import annotations

from collections.abc import Mapping

from optimize.measure.accuracy import Answers, parity
from optimize.measure.statistics import paired_difference
from serve.runtime.card.certificate import Agreement, Certificate


def certificate(
    reference: Answers,
    others: Mapping[str, Answers],
    *,
    step: float | None,
    file: str,
    data: str,
    absent: Mapping[str, str],
    cpu: str,
    versions: Mapping[str, str],
) -> Certificate:
    """Compare what executions answered with what the reference did, on the same images.

    Args:
        reference: of torch's program of explicit quantizers around float operators.
        others: by execution; torch's kernels, ONNX Runtime, OpenVINO.
        step: scale of the answer's quantizer.
        file: SHA-256 of the reference program.
        data: fingerprint of the images.
        absent: why other executions were not compared.
        cpu: the processor.
        versions: of the libraries.
    """
    return Certificate(
        reference=file,
        step=step,
        images=len(reference.predicted),
        logits_of=len(reference.logits),
        data=data,
        agreements=tuple(agreement(name, reference, answers, step) for name, answers in others.items()),
        absent=dict(absent),
        cpu=cpu,
        versions=dict(versions),
    )


def agreement(execution: str, reference: Answers, answers: Answers, step: float | None) -> Agreement:
    """How near one execution's answers are to the reference's.

    ``steps`` is the largest difference of two logits over ``step``: how many integers of the answer's quantizer lie
    between them. It is a whole number but for float rounding where both answers are quantized by that step.
    """
    alike = parity(reference, answers, "reference")
    paired = paired_difference(reference.first.numpy(), answers.first.numpy())
    return Agreement(
        execution=execution,
        top1_agreement=alike.top1_agreement,
        sqnr_db=alike.sqnr_db,
        max_abs=alike.max_abs,
        steps=alike.max_abs / step if step is not None else None,
        delta=paired.delta,
        low=paired.low,
        high=paired.high,
        gained=paired.gained,
        lost=paired.lost,
    )
