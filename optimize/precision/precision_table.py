"""Tables of the results layer by layer, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from optimize.measure.rows import Skip
from optimize.precision.precision_records import Figure, Found, Sensitivity, Trial
from optimize.report.console import output
from optimize.report.number_format import NONE, number, points

_NAMED = 4


def sensitivity_heads(found: Sensitivity) -> tuple[str, ...]:
    """Return the heads of `sensitivity_rows`."""
    rest = ("95 %", "SQNR dB", "won ms")
    return ("layer", "weights", f"alone: {found.metric}", *rest, f"all but: {found.metric}", *rest)


def sensitivity_rows(found: Sensitivity) -> list[tuple[str, ...]]:
    """Return a line for each layer, after one for all layers together."""
    whole = (f"all {len(found.layers)} layers", f"{sum(layer.weights for layer in found.layers):,}")
    rows = [(*whole, *_cells(found.whole), *[""] * 4)]
    rows += [(layer.name, f"{layer.weights:,}", *_cells(layer.alone), *_cells(layer.all_but)) for layer in found.layers]
    return rows


def trial_rows(found: Found) -> list[tuple[str, ...]]:
    """Return a line for each trial."""
    return [
        (
            str(trial.number),
            _listed(trial.bits),
            points(trial.delta),
            number(trial.p50),
            f"{trial.speedup.value:.2f}×" if trial.speedup else NONE,
            _verdict(trial),
        )
        for trial in found.trials
    ]


def print_sensitivity(found: Sensitivity) -> None:
    """Print the table to standard output. A file or a pipe gets the whole, however long the lines."""
    _print(sensitivity_heads(found), sensitivity_rows(found))
    Console(soft_wrap=True).print(Text(caption(found)))


def print_search(found: Found) -> None:
    """Print the trials, and the reasons for the choice."""
    if found.trials:
        _print(("trial", "not int8", found.metric, "p50 ms", "to float", ""), trial_rows(found))
    console = Console(soft_wrap=True)
    for sentence in found.why:
        console.print(Text(sentence))


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with the first column left-aligned and the others right-aligned."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def sensitivity_markdown(found: Sensitivity) -> str:
    """Return the table with its caption, for a document."""
    return f"{markdown(sensitivity_heads(found), sensitivity_rows(found))}\n{caption(found)}\n"


def caption(found: Sensitivity) -> str:
    """Return the explanation of the figures."""
    return (
        f"{found.title}, {found.parent} by {found.runs_on} on {found.cpu}; {found.metric} in points from the float "
        f"graph's {found.score * 100:.2f} % on the same {found.images:,} images; SQNR of the logits; milliseconds that "
        f"one image takes less with the layer in int8 than with it in float (float graph: {number(found.p50, 'ms')}; "
        f"whole: {number(found.whole.p50, 'ms')})"
    )


def _cells(figure: Figure | Skip) -> tuple[str, str, str, str]:
    if isinstance(figure, Skip):
        return str(figure), "", "", ""
    difference = figure.difference
    return (
        points(difference.delta),
        f"{points(difference.low)} to {points(difference.high)}",
        NONE if figure.sqnr_db is None else f"{figure.sqnr_db:.1f}",
        f"{figure.won_ms:+.3f}".replace("-", "−"),
    )


def _verdict(trial: Trial) -> str:
    if trial.holds:
        return f"holds; {trial.skip}" if trial.skip else "holds"
    return str(trial.skip) if trial.skip else "loses too much"


def _listed(bits: dict[str, int]) -> str:
    names = [f"{name}:{wide}" if wide != 32 else name for name, wide in bits.items()]
    more = f" +{len(names) - _NAMED}" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) + more) or NONE


def _print(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    output().print(table)
