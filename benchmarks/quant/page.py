"""The page of what is known: a table for each subject, what it says of ours beside the peers, what was not made."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.quant.record import RowRecord, SubjectRecord
from benchmarks.quant.ways import DEFAULTS, FLOAT
from optimize.report.number_format import percent, points
from optimize.statistics import PairedDifference, RatioInterval, paired_difference, ratio_interval

#: What engines are called in titles.
TITLES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "inductor": "Inductor", "exported": "ATen"}


def page(records: Sequence[SubjectRecord], picture: str) -> str:
    """What stands below the page's mark: all subjects.

    Args:
        records: one for each subject.
        picture: the plot's file, beside the page.
    """
    return "\n".join([f"![differences of top-1, and latency]({picture})", "", *_sections(records)])


def _sections(records: Sequence[SubjectRecord]) -> Iterator[str]:
    for record in records:
        yield from (f"## {record.title}", "", *facts(record), "", *table(record), "", *verdict(record), "")
        if unmade := [row for row in record.rows if row.engine is None]:
            yield "Not made:"
            yield ""
            yield from (f"- {row.name}: {row.reason}" for row in unmade)
            yield ""
        if absent := [(row, *each) for row in record.rows if row.engine for each in row.absent.items()]:
            yield from (f"- {row.name} does not run in {TITLES[engine]}: {why}" for row, engine, why in absent)
            yield ""


def facts(record: SubjectRecord) -> Iterator[str]:
    """What the figures depend on, in a sentence or two."""
    made = [row for row in record.rows if row.engine is not None]
    images = made[0].answers.images if made else 0
    libraries = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    yield (
        f"`{record.words}`, {record.created:%Y-%m-%d}: {record.cpu} ({', '.join(record.isa)}), {record.cores} cores, "
        f"{libraries}. Ranges on {record.calibration} training images, top-1 on {images:,} evaluation images."
    )
    if record.timed is not None:
        timed = record.timed
        running = "" if timed.running is None else f" When it began, {timed.running:.1f} processes were running."
        yield f"Timed on {timed.taken:%Y-%m-%d}, {timed.rounds} rounds of {timed.seconds:g} s in turns.{running}"
    else:
        yield "Nothing was timed yet."


def engines_of(record: SubjectRecord) -> list[str]:
    """The engines that answered, in the order of their titles."""
    found = {engine for row in record.rows for engine in row.answered}
    return [engine for engine in TITLES if engine in found]


def table(record: SubjectRecord) -> Iterator[str]:
    """A line for each way, ours bold; the top-1 that differences are of is that of the engine which stands first."""
    engines, peer = engines_of(record), best_peer(record)
    against = f"against {peer.name}" if peer is not None else "against the best peer"
    titles = [
        "",
        *(f"top-1, {TITLES[engine]}" for engine in engines),
        "against float, points",
        f"{against}, points",
        "MB",
        "quantized in, s",
        *(f"{TITLES[engine]}, ms" for engine in engines),
    ]
    yield f"| {' | '.join(titles)} |"
    yield f"|---|{'---:|' * (len(titles) - 1)}"
    floats = record.row(FLOAT)
    for row in (row for row in record.rows if row.engine is not None):
        cells = [
            f"**{row.name}**" if row.ours else row.name,
            *(percent(row.answered[engine].top1) if engine in row.answered else "" for engine in engines),
            _points(_against(row, floats)) if row.name != FLOAT else "",
            _points(_against(row, peer)) if row.ours else "",
            f"{row.bytes / 1e6:.2f}",
            "" if row.made_s is None else f"{row.made_s:.1f}",
            *(f"{statistics.median(row.medians[engine]):.3f}" if engine in row.medians else "" for engine in engines),
        ]
        yield f"| {' | '.join(cells)} |"


def best_peer(record: SubjectRecord) -> RowRecord | None:
    """The peers' row with the highest top-1; None where there is none."""
    made = [row for row in record.rows if not row.ours and row.name != FLOAT and row.engine is not None]
    return max(made, key=lambda row: row.answers.top1, default=None)


def verdict(record: SubjectRecord) -> Iterator[str]:
    """What the table says of ours beside the peers, in sentences."""
    peer, ours = best_peer(record), [row for row in record.rows if row.ours and row.engine is not None]
    if peer is None or not ours:
        yield "There is nothing to compare."
        return
    differences = {row.name: paired_difference(peer.answers.right, row.answers.right) for row in ours}
    below = [name for name, found in differences.items() if found.high < 0]
    above = [name for name, found in differences.items() if found.low > 0]
    level = [name for name in differences if name not in (*below, *above)]
    said = [f"Of the peers, {peer.name} has the highest top-1. Each of ours is compared with it on the same images."]
    said += [
        f"The interval {what} 0 for {', '.join(names)}."
        for what, names in (("lies above", above), ("holds", level), ("lies below", below))
        if names
    ]
    yield " ".join(said)
    for engine in engines_of(record):
        if (found := against_fastest(record, engine)) is not None:
            rival, own, ratio = found
            yield (
                f"In {TITLES[engine]} the default of `ptq` is {own.name}. It is {ratio.median:.2f} times as fast "
                f"[{ratio.low:.2f}, {ratio.high:.2f}] as {rival.name}, the fastest peer."
            )


def against_fastest(record: SubjectRecord, engine: str) -> tuple[RowRecord, RowRecord, RatioInterval] | None:
    """The fastest peer and our default in an engine, and how many times as fast ours is.

    Not the fastest of ours: they are many, of almost equal graphs, and the luckiest would be flattered by being picked.
    """
    timed = [row for row in record.rows if engine in row.medians and row.name != FLOAT]
    own = next((row for row in timed if row.name in DEFAULTS), None)
    peers = [row for row in timed if not row.ours]
    if own is None or not peers:
        return None
    rival = min(peers, key=lambda row: statistics.median(row.medians[engine]))
    return rival, own, ratio_interval(rival.medians[engine], own.medians[engine])


def _against(row: RowRecord, other: RowRecord | None) -> PairedDifference | None:
    if other is None or other.engine is None:
        return None
    return paired_difference(other.answers.right, row.answers.right)


def _points(found: PairedDifference | None) -> str:
    return "" if found is None else f"{points(found.delta)} [{points(found.low)}, {points(found.high)}]"
