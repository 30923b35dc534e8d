"""How often the interval of a ratio of speeds holds the ratio: whole comparisons, again and again.

The page is docs/benchmarks/intervals.md.

``python -m benchmarks.intervals RUN/ARTIFACT …`` compares the artifacts as ``optimize compare`` does, in new processes
each time. The interval of each comparison is held against the ratio of all the others together: the geometric mean of
theirs. On a quiet machine, nineteen of twenty should hold it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.below import add_option, tell
from benchmarks.commands import command
from benchmarks.here import begun, here

REPEATS: Final = 16


@dataclass(frozen=True)
class Told:
    """The ratio that one comparison told of a pair: how much faster it is than another, and the interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One comparison: the share of the cores that others took, and the ratios by what is compared with what."""

    others: float | None
    ratios: Mapping[str, Told]


def held(told: Sequence[Told]) -> list[bool]:
    """Whether each interval holds the geometric mean of the other comparisons' ratios; of two at least."""
    found = []
    for number, one in enumerate(told):
        rest = statistics.geometric_mean(other.value for place, other in enumerate(told) if place != number)
        found.append(one.low <= rest <= one.high)
    return found


def measure(store: Path, names: Sequence[str], repeats: int) -> Iterator[Comparison]:
    """Compare the artifacts so many times, at batch 1."""
    from optimize.listener import SILENT
    from optimize.measure.timing import Timing
    from optimize.report.table_rows import lines
    from optimize.run.recommendation.rule import Recommend
    from optimize.run.run_comparison import compare_runs

    for number in range(1, repeats + 1):
        results = compare_runs(
            store, names, timing=Timing(batch_sizes=(1,)), rule=Recommend(), devices=("cpu",), listener=SILENT
        )
        measured = {line.pair.id: line.measured.speedup for line in lines(results) if line.pair and line.measured}
        ratios = {
            f"{pair} against {results.yardstick}": Told(ratio.value, ratio.low, ratio.high)
            for pair, ratio in measured.items()
            if pair != results.yardstick
        }
        print(f"{number} of {repeats}", file=sys.stderr, flush=True)
        yield Comparison(results.measurement.others, ratios)


def page(comparisons: Sequence[Comparison], words: Sequence[str], when: str) -> str:
    """What stands below the mark of docs/benchmarks/intervals.md."""
    by_pair: dict[str, list[Told]] = {}
    for comparison in comparisons:
        for pair, one in comparison.ratios.items():
            by_pair.setdefault(pair, []).append(one)
    others = [comparison.others for comparison in comparisons if comparison.others is not None]
    lines = [
        f"Made by `{command('benchmarks.intervals', words)}` on {when}: "
        f"{here('torch', 'onnxruntime-gpu', 'openvino', isa=False)}.",
        "",
        "| ratio | comparisons | lowest to highest | all together | interval, high of low, median | hold it |",
        "|---|---:|---|---:|---:|---:|",
    ]
    every: list[bool] = []
    for pair, told in by_pair.items():
        if len(told) < 2:
            continue
        every += (holds := held(told))
        values = [ratio.value for ratio in told]
        cells = (
            pair,
            str(len(told)),
            f"{min(values):.3f} … {max(values):.3f}",
            f"{statistics.geometric_mean(values):.3f}",
            f"{statistics.median(ratio.high / ratio.low for ratio in told):.3f}",
            f"{sum(holds)} of {len(told)}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"{sum(every)} of {len(every)} intervals hold the ratio of the others, {sum(every) / len(every):.1%}.",
    ]
    if others:
        lines.append(
            f"Other processes took {min(others):.1%} to {max(others):.1%} of the cores "
            f"(median: {statistics.median(others):.1%})."
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write the table."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", metavar="RUN/ARTIFACT")
    parser.add_argument("--store", type=Path, default=Path("model_store"))
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"comparisons ({REPEATS})")
    add_option(parser)
    options = parser.parse_args(words)
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {options.repeats}")
    when = begun()
    tell(page(list(measure(options.store, options.artifacts, options.repeats)), words, when), options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
