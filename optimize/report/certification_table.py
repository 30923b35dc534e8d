"""What `certify` prints: an artifact's layers by each engine, and its parity end to end."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from optimize.certify.layer_findings import LEAST_EQUAL, MOST_STEPS, Engine, LayerParity, Unable
from optimize.report.console import output
from optimize.report.number_format import NONE, count, plural
from optimize.report.parity_text import explained, heads, missing, rows
from optimize.tasks.base import Task
from serve.runtime.card.certificate import Certificate


def print_engines(engines: Sequence[Engine]) -> None:
    """Print each engine's layers, and the first layer that diverges."""
    for engine in engines:
        output().print(_layers(engine))
        typer.echo(f"{engine.execution}: {verdict(engine)}\n")


def print_parity(name: str, certificate: Certificate | None, task: Task) -> None:
    """Print the parity certificate end to end, or why there is none."""
    if certificate is None:
        typer.echo(
            f"{name} has no parity certificate end to end: no engine here computes its integers, or the run that made "
            "it did not measure it"
        )
        return
    table = _table(f"{name}, end to end", heads(task))
    for agreement in certificate.agreements:
        for row in rows(agreement):
            table.add_row(*map(Text, row), style="" if agreement.holds else "red")
    output().print(table)
    typer.echo(explained(certificate, task))
    for line in missing(certificate):
        typer.echo(f"not compared: {line}")


def verdict(engine: Engine) -> str:
    """Say which layer is the first to diverge, and why."""
    if engine.reason is not None:
        return f"not compared: {engine.reason}"
    apart = f"; {engine.apart}" if engine.apart else ""
    apart += f"; {plural(len(engine.unable), 'layer')} could not be run alone" if engine.unable else ""
    first = engine.first
    if first is None or first.cause is None:
        which = f"all {plural(len(engine.layers), 'layer')}{' that could be run' if engine.unable else ''}"
        return (
            f"{which} give the reference's integers: at least {100 * LEAST_EQUAL:g} % of each one's outputs, and none "
            f"more than {plural(MOST_STEPS, 'step')} off{apart}"
        )
    more = [layer for layer in engine.layers if not layer.holds][1:]
    others = f"; so do {count(len(more))} after it ({', '.join(_reasons(more))})" if more else ""
    which = f"layer {first.number} ({first.name}) is the first that diverges"
    return f"{which}: {first.cause.why}, {first.cause.said}{others}{apart}"


def _reasons(layers: Sequence[LayerParity]) -> list[str]:
    return list(dict.fromkeys(layer.cause.why for layer in layers if layer.cause is not None))


def _layers(engine: Engine) -> Table:
    table = _table(
        f"{engine.execution}, layer by layer", ("layer", "operators", "outputs", "equal %", "most off", "why")
    )
    entries: list[LayerParity | Unable] = [*engine.layers, *engine.unable]
    for layer in sorted(entries, key=lambda each: each.number):
        if isinstance(layer, Unable):
            reason = Text(f"could not be run alone: {layer.reason}")
            table.add_row(str(layer.number), Text(layer.name), NONE, NONE, NONE, reason, style="yellow")
            continue
        why = layer.cause.why if layer.cause else ""
        table.add_row(
            str(layer.number),
            Text(layer.name),
            count(layer.outputs),
            f"{100 * layer.equal:.4f}",
            count(layer.steps),
            why,
            style="" if layer.holds else "yellow" if why == "rounding" else "red",
        )
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=Text(title, style="bold"), title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if number < 1 or head in ("operators", "why") else "right")
    return table
