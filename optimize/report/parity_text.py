"""Formats parity certificates: each engine's answers compared with the meaning of an INT8 artifact's integers."""

from __future__ import annotations

from collections.abc import Iterator

from optimize.measure.rows import Results, Row
from optimize.report.number_format import NONE, count, number, percent, points, signed, small
from optimize.tasks.base import Task, find_task
from serve.runtime.card.certificate import LEAST_AGREEMENT, Agreement, Certificate, OutputAgreement


def heads(task: Task) -> tuple[str, ...]:
    """Return the heads above a table of `rows`."""
    same, score = task.agreement.title, task.metric.title
    return ("execution", f"{same} %", "SQNR dB", "largest difference", f"Δ {score}", "95 %", "gained, lost")


def rows(agreement: Agreement) -> list[tuple[str, ...]]:
    """Return an agreement as text, under `heads`: a row, and another for each output behind the logits."""
    first = (
        agreement.execution,
        percent(agreement.agreement),
        _sqnr(agreement),
        _apart(agreement),
        points(agreement.delta),
        f"{points(agreement.low)} to {points(agreement.high)}",
        f"{signed(agreement.gained, '+')}, {signed(agreement.lost, '−')}",
    )
    others = [(f"{agreement.execution}, {each.output}", each) for each in agreement.others]
    return [first, *((name, NONE, _sqnr(each), _apart(each), NONE, NONE, NONE) for name, each in others)]


def explained(certificate: Certificate, task: Task) -> str:
    """Explain the figures in one sentence."""
    step = f"; a step is {small(certificate.step)}, the scale of the answer's quantizer" if certificate.step else ""
    packed = " torchscript ran the packed program that the graph was made from." if _is_of_graph(certificate) else ""
    return (
        f"Against torch's reference program (the same integers, in float arithmetic) on {count(certificate.images)} "
        f"validation images, logits on {count(certificate.logits_of)} of them{step}.{packed} Aim: the "
        f"{task.agreement.title} on at least {percent(LEAST_AGREEMENT)} % of the {task.counted}, and an "
        "interval that contains 0."
    )


def missing(certificate: Certificate) -> list[str]:
    """Name the executions that were not compared, and why."""
    return [f"{execution}: {reason}" for execution, reason in certificate.absent.items()]


def parity_lines(results: Results) -> Iterator[str]:
    """Yield a line for each certified artifact."""
    same = find_task(results.task).agreement.title
    for row in results.rows:
        if row.certificate is None:
            continue
        packed = f" (on {_program(row, results)})" if _is_of_graph(row.certificate) else ""
        said = [
            f"{entry.execution}{packed if _is_torchs(entry.execution) else ''} {percent(entry.agreement)} % {same}, "
            f"SQNR {_sqnr(entry)} dB, at most {_apart(entry)} apart, {points(entry.delta)} points"
            f"{''.join(f', {o.output} SQNR {_sqnr(o)} dB and at most {_apart(o)} apart' for o in entry.others)}"
            f"{'' if entry.holds else ' (NOT within the aim)'}"
            for entry in row.certificate.agreements
        ]
        yield f"{row.name} against what its integers mean, on {count(row.certificate.images)} images: {'; '.join(said)}"


def _program(graph: Row, results: Results) -> str | None:
    """Return the artifact whose packed program a graph was made from: its parent, or the parent graph's parent."""
    rows = {row.name: row for row in results.rows}
    found = rows.get(graph.parent or "")
    while found is not None and found.certificate is not None and _is_of_graph(found.certificate):
        graph, found = found, rows.get(found.parent or "")
    return graph.parent


def _is_of_graph(certificate: Certificate) -> bool:
    """Return whether engines other than torch's kernels were to be compared. If so, torch's ran another artifact."""
    named = {*(entry.execution for entry in certificate.agreements), *certificate.absent}
    return any(_is_torchs(name) for name in named) and not all(_is_torchs(name) for name in named)


def _is_torchs(execution: str) -> bool:
    return execution.partition("[")[0] == "torchscript"


def _sqnr(agreement: Agreement | OutputAgreement) -> str:
    return "exact" if agreement.sqnr_db is None and agreement.max_abs == 0 else number(agreement.sqnr_db)


def _apart(agreement: Agreement | OutputAgreement) -> str:
    if agreement.steps is None:
        return small(agreement.max_abs) if agreement.max_abs else NONE
    return f"{number(agreement.steps)} steps"
