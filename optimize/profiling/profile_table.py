"""Profiles as tables for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from optimize.profiling.profile_records import Layer, Profile, Profiled
from optimize.report.console import output
from optimize.report.number_format import NONE, number, plural, size

HEADS = ("layer", "what", "precision", "ms", "time %", "MACs", "weights", "read", "written", "of peak %", "of copy %")


def rows(found: Profile) -> list[tuple[str, ...]]:
    """Return a line for each layer in order of execution, and a last line for the sum."""
    whole = found.layers_ms or 1.0
    lines = [
        (
            layer.name,
            layer.kind,
            layer.precision or NONE,
            number(layer.ms),
            f"{100 * layer.ms / whole:.1f}",
            amount(layer.macs),
            size(layer.weights),
            size(layer.read),
            size(layer.written),
            _share(found.of_peak(layer)),
            _share(found.of_copy(layer)),
        )
        for layer in found.layers
    ]
    sums = (_sum(found.layers, part) for part in ("weights", "read", "written"))
    layers = plural(len(found.layers), "layer")
    macs = amount(found.macs) if any(layer.macs is not None for layer in found.layers) else NONE
    return [*lines, (f"all {layers}", "", "", number(found.layers_ms), "100.0", macs, *map(size, sums), "", "")]


def caption(found: Profiled, one: Profile) -> str:
    """Explain the figures and what they are compared with."""
    said = [
        f"{found.title}, {found.artifact} by {one.runs_on} ({one.provider}) on {found.cpu}, "
        f"{plural(one.execution.cores, 'thread')}, batch {found.batch}: "
        f"a call takes {number(one.call_ms, 'ms')} when nothing looks into it, its layers together "
        f"{number(one.layers_ms, 'ms')} ({one.note or f'medians of {one.calls} calls'})."
    ]
    said += [
        f"Peak in {peak.precision}: "
        + (f"{peak.macs_per_s / 1e9:,.0f} GMACs a second, by {peak.how}." if peak.macs_per_s else f"none, {peak.how}.")
        for peak in one.peaks
    ]
    said.append(f"Copying memory moves {one.copy_bytes_per_s / 1e9:.1f} GB a second, read and written together.")
    if one.left_macs:
        said.append(f"{amount(one.left_macs)} of the MACs belong to no layer that the engine names.")
    return " ".join(said)


def print_profiled(found: Profiled) -> None:
    """Print to standard output. A file or a pipe gets everything, with lines of any length."""
    console = Console(soft_wrap=True)
    for one in found.profiles:
        table = Table(box=None, pad_edge=False)
        for place, head in enumerate(HEADS):
            table.add_column(head, justify="left" if place < 3 else "right")
        for row in rows(one):
            table.add_row(*map(Text, row))
        output().print(table)
        console.print(Text(f"{caption(found, one)}\n"))
    for name, reason in found.unable.items():
        console.print(Text(f"{name}: {reason}"))


def markdown(found: Profiled) -> str:
    """Return the tables and their explanations for a document."""
    parts = []
    for one in found.profiles:
        lines = [HEADS, ["---"] * 3 + ["---:"] * (len(HEADS) - 3), *rows(one)]
        table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        parts.append(f"## {one.runs_on}\n\n{caption(found, one)}\n\n{table}\n")
    parts += [f"{name}: {reason}\n" for name, reason in found.unable.items()]
    return "\n".join([f"# {found.title}: {found.artifact}\n", *parts])


def amount(macs: int | None) -> str:
    """Format MACs in millions or thousands. A dash if they are unknown."""
    if macs is None:
        return NONE
    if macs == 0:
        return "0"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if macs >= scale:
            return f"{macs / scale:.2f} {unit}"
    return str(macs)


def _share(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.1f}"


def _sum(layers: Iterable[Layer], part: str) -> int | None:
    known: Sequence[int] = [value for layer in layers if (value := getattr(layer, part)) is not None]
    return sum(known) if known else None
