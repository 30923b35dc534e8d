"""Compares the answers of executions with those of the reference program: the parity certificate."""

from __future__ import annotations

from collections.abc import Mapping

from optimize.measure.accuracy import Answers, parity
from optimize.tasks.base import Task
from serve.runtime.card.certificate import Agreement, Certificate, OutputAgreement


def certificate(
    reference: Answers,
    others: Mapping[str, Answers],
    *,
    task: Task,
    steps: Mapping[str, float | None],
    file: str,
    data: str,
    absent: Mapping[str, str],
    cpu: str,
    versions: Mapping[str, str],
) -> Certificate:
    """Compare the executions' answers with the reference's on the same images.

    Args:
        reference: the answers of torch's program of explicit quantizers around float operators.
        others: the answers of torch's kernels, ONNX Runtime and OpenVINO, by execution.
        task: what the network is for.
        steps: names of the outputs, the logits first, with the scale of their quantizer. None if there is none.
        file: SHA-256 of the reference program.
        data: fingerprint of the images.
        absent: why other executions were not compared.
        cpu: the processor.
        versions: versions of the libraries.
    """
    return Certificate(
        reference=file,
        step=next(iter(steps.values())),
        images=reference.images,
        logits_of=len(reference.outputs[0]),
        data=data,
        agreements=tuple(agreement(name, reference, answers, steps, task) for name, answers in others.items()),
        absent=dict(absent),
        cpu=cpu,
        versions=dict(versions),
    )


def agreement(
    execution: str, reference: Answers, answers: Answers, steps: Mapping[str, float | None], task: Task
) -> Agreement:
    """Measure how near one execution's answers are to the reference's.

    ``steps`` is the largest difference of two logits divided by their step: the number of the output quantizer's steps
    between them. If that quantizer produced both answers, it is a whole number, apart from float rounding.

    Args:
        execution: the execution's name.
        reference: the reference's answers.
        answers: the execution's answers.
        steps: see `certificate`.
        task: see `certificate`.
    """
    alike = parity(reference, answers, "reference", task, tuple(steps))
    step, *other_steps = steps.values()
    paired = task.difference(reference.evidence, answers.evidence)
    return Agreement(
        execution=execution,
        agreements=alike.agreements,
        sqnr_db=alike.sqnr_db,
        max_abs=alike.max_abs,
        steps=_steps(alike.max_abs, step),
        delta=paired.delta,
        low=paired.low,
        high=paired.high,
        gained=paired.gained,
        lost=paired.lost,
        others=tuple(
            OutputAgreement(each.output, each.sqnr_db, each.max_abs, _steps(each.max_abs, step))
            for each, step in zip(alike.others, other_steps, strict=True)
        ),
    )


def _steps(largest: float, step: float | None) -> float | None:
    return largest / step if step is not None else None
