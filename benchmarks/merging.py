"""What int8 loses on a merged RepVGG, and what helps: ``examples/merging.yaml`` on the digits, as a page.

``python -m benchmarks.merging --write docs/design/merging.md``. What was made before comes from the store.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.below import add_option, tell
from optimize.listener import Silent
from optimize.measure.rows import Report, Row
from optimize.report.number_format import NONE, percent, points
from optimize.run.job import Job
from optimize.run.pipeline import run

RECIPE: Final = Path("examples/merging.yaml")
MODEL: Final = "examples/repvgg.py:repvgg"
#: What the stages of the recipe are, in the order of the table.
TITLES: Final = {
    "baseline": "float",
    "merge": "float, merged",
    "branches-tensor": "branches, one scale a tensor",
    "branches-channel": "branches, a scale for each channel",
    "merged-tensor": "merged, one scale a tensor",
    "merged-tensor-corrected": "merged, one scale a tensor, biases corrected",
    "equalized-tensor": "merged, equalized, one scale a tensor",
    "merged-channel": "merged, a scale for each channel",
    "merged-channel-histogram": "merged, a scale for each channel, `observer: histogram`",
    "equalized-channel": "merged, equalized, a scale for each channel",
    "equalized-channel-corrected": "merged, equalized, a scale for each channel, biases corrected",
}


def page(report: Report) -> str:
    """The tables of a run of the recipe, and the facts that they depend on."""
    rows = {row.name: row for row in report.rows}
    return "\n".join([*_facts(report), "", *_table(rows), "", *_ranges(rows), ""])


def _facts(report: Report) -> Iterator[str]:
    baseline = report.rows[0]
    measured = baseline.measured
    assert measured is not None
    versions = ", ".join(f"{name} {report.versions[name]}" for name in ("torch", "torchvision"))
    yield (
        f"Made by `python -m benchmarks.merging` on {report.created:%Y-%m-%d}: {report.model} on {report.data.name}, "
        f"trained on {report.data.train:,} images for {baseline.config['epochs']} epochs. {report.machine.cpu}, "
        f"{versions}. Activations by `observer: minmax`, unless the row says otherwise. Top-1 on "
        f"{measured.accuracy.images:,} images. Differences are paired, with 95 % intervals. SQNR: of the logits, to "
        "those of the float network that was quantized."
    )


def _table(rows: dict[str, Row]) -> Iterator[str]:
    yield "| | top-1 | difference to float | SQNR | file |"
    yield "|---|---:|---:|---:|---:|"
    for name, title in TITLES.items():
        row = rows[name]
        if row.measured is None or row.file is None:
            yield f"| {title} | not made: {row.skip} | | | |"
            continue
        accuracy, parity = row.measured.accuracy, row.measured.parity
        difference = accuracy.difference
        change = NONE
        if difference is not None:
            change = f"{points(difference.delta)} [{points(difference.low)}, {points(difference.high)}]"
        ratio = f"{parity.sqnr_db:.1f} dB" if parity and parity.sqnr_db is not None else NONE
        size = f"{row.file.bytes / 1e3:,.0f} kB"
        yield f"| {title} | {percent(accuracy.score)} | {change} | {ratio} | {size} |"


def _ranges(rows: dict[str, Row]) -> Iterator[str]:
    """How far weights reach, in the largest branch and merged, and after equalization."""
    merged: dict[str, list[tuple[str, float, float]]] = {}
    for effect in rows["merge"].effects:
        merged.setdefault(effect.figure, []).append((effect.layer, effect.before, effect.after))
    for figure, entries in merged.items():
        before = statistics.median(alone for _, alone, _ in entries)
        after = statistics.median(whole for _, _, whole in entries)
        yield f"{figure[0].upper()}{figure[1:]}, in each block's 3x3 branch and merged:"
        yield ""
        yield "| layer | 3x3 branch | merged |"
        yield "|---|---:|---:|"
        for layer, alone, whole in entries:
            yield f"| {layer} | {alone:.3g} | {whole:.3g} |"
        yield f"| median | {before:.3g} | {after:.3g} |"
        yield ""
    effects = rows["equalize"].effects
    if effects:
        before, after = (statistics.median(getattr(effect, side) for effect in effects) for side in ("before", "after"))
        yield f"Equalized, the median of all layers goes from {before:.3g} to {after:.3g} ({effects[0].figure})."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe and write the page below the mark of the file, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=Path("model_store"))
    add_option(parser)
    options = parser.parse_args(arguments)
    job = Job(model=MODEL, data="digits", recipe=RECIPE, store=options.store, device="cpu", measure="cpu")
    tell(page(run(job, Silent()).report), options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
