"""Which artifact to deploy: one rule, said in a sentence, and why each other one was not chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optimize.measure.latency import LEVEL, Speed, compare
from optimize.measure.rows import Measured, Recommendation, Row
from optimize.measure.statistics import paired_interval


def recommend(rows: Sequence[Row], speeds: Mapping[str, Speed], max_drop: float) -> Recommendation:
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
    eligible: dict[str, tuple[Measured, int]] = {}
    for number, row in enumerate(rows):
        if row.measured is None or row.file is None:
            rejected[row.name] = str(row.skip)
            continue
        low = _low(row.measured)
        # The baseline is what the others are held against: it is always allowed.
        if number > 0 and low <= -max_drop:
            rejected[row.name] = f"its top-1 may be {-low * 100:.1f} points below the baseline's"
        else:
            eligible[row.name] = (row.measured, row.file.bytes)
    if not eligible:
        return Recommendation(name=None, rule=rule, rejected=rejected)
    fastest = min(eligible, key=lambda name: eligible[name][0].latency_ms.p50)
    level = []
    for name in eligible:
        ratio = compare(speeds[fastest], speeds[name])
        if name == fastest or not ratio.slower:
            level.append(name)
        else:
            rejected[name] = f"{1 / ratio.value:.2f} times the latency of {fastest}"

    def lowest(name: str) -> float:
        return _low(eligible[name][0])

    chosen = min(level, key=lambda name: (-lowest(name), eligible[name][1]))
    for name in level:
        if name != chosen:
            behind = (lowest(chosen) - lowest(name)) * 100
            why = f"its interval of top-1 begins {behind:.2f} points lower" if behind > 0 else "a larger file"
            rejected[name] = f"as fast as {chosen}, and {why}"
    return Recommendation(name=chosen, rule=rule, rejected=rejected)


def _low(measured: Measured) -> float:
    """Where the interval of the difference to the baseline begins; the baseline's as if it were another artifact's."""
    if (difference := measured.accuracy.difference) is not None:
        return difference.low
    return paired_interval(0, 0, measured.accuracy.images).low
