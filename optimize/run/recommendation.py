"""Which artifact to deploy: one rule, said in a sentence, and why each other one was not chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimize.measure.latency import LEVEL, Speed, compare


@dataclass(frozen=True)
class Recommendation:
    """The chosen artifact's name (None if none was measured), the rule, and the reason against each other one."""

    name: str | None
    rule: str
    rejected: dict[str, str]


def recommend(rows: Sequence[Mapping[str, Any]], speeds: Mapping[str, Speed], max_drop: float) -> Recommendation:
    """Choose among the report's rows.

    Args:
        rows: artifacts of the report, the baseline first.
        speeds: their times, from one measurement in turns.
        max_drop: loss of top-1 (fraction) that the 95 % interval against the baseline must exclude.
    """
    rule = (
        f"among the artifacts whose top-1 is, with 95 % confidence, less than {max_drop * 100:g} points below the "
        f"baseline's, those that are level with the fastest at batch 1 (within {(1 - LEVEL) * 100:.0f} %); of these "
        "the one whose interval of top-1 begins highest, and of equals the smallest file"
    )
    rejected: dict[str, str] = {}
    eligible: list[Mapping[str, Any]] = []
    for number, row in enumerate(rows):
        if row["latency_ms"] is None:
            rejected[row["name"]] = row["skipped"] or "not measured"
        # The baseline is what the others are held against: it is always allowed.
        elif number > 0 and row["top1_delta_ci95"][0] <= -max_drop:
            rejected[row["name"]] = (
                f"its top-1 may be {-row['top1_delta_ci95'][0] * 100:.1f} points below the baseline's"
            )
        else:
            eligible.append(row)
    if not eligible:
        return Recommendation(None, rule, rejected)
    fastest = min(eligible, key=lambda row: row["latency_ms"]["p50"])
    level = []
    for row in eligible:
        ratio = compare(speeds[fastest["name"]], speeds[row["name"]])
        if row is fastest or not ratio["slower"]:
            level.append(row)
        else:
            rejected[row["name"]] = f"{1 / ratio['speedup']:.2f} times the latency of {fastest['name']}"
    chosen = min(level, key=lambda row: (-row["top1_delta_ci95"][0], row["bytes"]))
    for row in level:
        if row is not chosen:
            behind = (chosen["top1_delta_ci95"][0] - row["top1_delta_ci95"][0]) * 100
            why = f"its interval of top-1 begins {behind:.2f} points lower" if behind > 0 else "a larger file"
            rejected[row["name"]] = f"as fast as {chosen['name']}, and {why}"
    return Recommendation(chosen["name"], rule, rejected)
