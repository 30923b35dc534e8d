"""Says how to add a better float graph, which is only a reference, to the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from optimize.measure.latency import Speed, falls_behind, level, typical
from optimize.measure.rows import FLOAT_GRAPHS, Row
from optimize.report.number_format import times


def missing_graph(
    chosen: str,
    costs: Sequence[float],
    rows: Sequence[Row],
    speeds: Mapping[str, Speed],
    *,
    costs_of: Callable[[Speed], list[float]],
    better: str,
) -> list[str]:
    """Say what to add to the recipe if a float graph that is only a reference is clearly better.

    Args:
        chosen: id of the recommended pair.
        costs: the costs of its rounds, lower is better.
        rows: artifacts of the report, the baseline first.
        speeds: the speeds of pairs by id, and of references by name.
        costs_of: returns the same costs of a reference.
        better: the words between the ratio and the recommended pair, such as "as fast as".

    Returns:
        One sentence, or none.
    """
    found = {name: costs_of(speeds[name]) for name in FLOAT_GRAPHS if name in speeds}
    remedy = _remedy(rows)
    if not found or remedy is None:
        return []
    best = min(found, key=lambda name: typical(found[name]))
    if not falls_behind(level(found[best], costs)):
        return []
    ratio = level(costs, found[best])
    won, low, high = (times(value).removesuffix("×") for value in (ratio.value, ratio.low, ratio.high))
    return [
        f"{remedy.format(engine=FLOAT_GRAPHS[best])}: the float graph, which is only the reference “{best}” here and "
        f"cannot be recommended, is {won} times ({ratio.coverage * 100:.1f} % interval {low} to {high}) {better} "
        f"{chosen}."
    ]


def _remedy(rows: Sequence[Row]) -> str | None:
    """Say how to make the float graph a candidate. None if its stage exists and was skipped for a reason."""
    graphs = [row for row in rows if row.operation == "onnx"]
    if any(row.pairs for row in graphs):
        return "Measure the artifact of the stage `onnx` with {engine}, too (`measure: executions`)"
    if graphs:
        return None
    fused = next((row.name for row in rows if row.operation == "fuse" and row.parent == rows[0].name), "baseline")
    return f"Add a stage `onnx` to the recipe (`pass: onnx`, `from: {fused}`)"
