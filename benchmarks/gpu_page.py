"""The page that `benchmarks.gpu` writes of its figures."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

_METHOD = """\
The prepared images lie on the device, and the logits stay there. So only the network is timed. Latencies (p50, p99)
are of calls one by one, between CUDA events around each. For images a second, calls are launched one after the other.
The time runs to the end of the last. Inputs of four batches take turns.

Answers are compared with those that the same weights give in float32 on the CPU. Top-1 is the share of images with the
same best class. SQNR is the signal-to-noise ratio of the logits. Both are the worst of all batch sizes.

Networks of our engines have their batch norms folded, eager ones do not. Two ways are left out: the engine torchscript
on CUDA, and INT8 graphs by onnxruntime-tensorrt. The first opens what torch.export cannot write. The pipeline's passes
make the second."""

_RANDOM = """\
Some weights were not available. A network with random ones tells images apart by little, and its classifier was
centred on that little. So rounding shows more in its answers than in those of a trained network."""


def page(body: Mapping[str, Any], *, whole: bool) -> str:
    """Markdown of what a state holds.

    Args:
        body: facts, commands, weights, cells and JPEG rows, as `benchmarks.gpu` keeps them.
        whole: whether everything that was asked for was measured.
    """
    facts, cells = body["facts"], body["cells"]
    versions = ", ".join(f"`{name} {value}`" for name, value in facts.items() if name not in ("device", "processor"))
    made = ", ".join(f"`{command}`" for command in body["commands"])
    lines = [
        "# On a GPU",
        "",
        f"Made by {made} on {datetime.datetime.now(datetime.UTC).date()}. Device: {facts['device']}. "
        f"Processor: {facts['processor']}. Environment and settings: {versions}.",
        "",
        _METHOD,
    ]
    if facts["device"] == "the processor":
        lines += [
            "",
            "**These figures are of a processor, all in float32. They try the script out, and say nothing of a GPU.**",
        ]
    if "random" in body["weights"].values():
        lines += ["", _RANDOM]
    if not whole:
        lines += ["", "Not everything was measured: the time was up."]
    for model in dict.fromkeys(key.split("|")[0] for key in cells):
        weights = body["weights"].get(model, "")
        lines += ["", f"## {model}{f', {weights} weights' if weights else ''}", "", *_table(model, cells)]
    if body["jpeg"]:
        lines += ["", "## From JPEG bytes to JSON", "", *_jpeg_table(body["jpeg"])]
    failures = _failures({**cells, **body["jpeg"]})
    if failures:
        lines += ["", "## Not run", "", *failures]
    return "\n".join(lines) + "\n"


def _table(model: str, cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = {tuple(key.split("|")[1:]): cell for key, cell in cells.items() if key.split("|")[0] == model}
    done = {key: cell for key, cell in found.items() if "failed" not in cell}
    batches = sorted({int(batch) for _, batch in done})
    lines = [
        "Images a second by batch size. Below them: p50 / p99 in milliseconds.",
        "",
        f"| | {' | '.join(map(str, batches))} | top-1 | SQNR |",
        f"|---|{'---:|' * (len(batches) + 2)}",
    ]
    for way in dict.fromkeys(way for way, _ in done):
        row = [done.get((way, str(batch))) for batch in batches]
        shown = [
            "" if cell is None else f"{cell['images_s']:,.0f}<br>{cell['p50_ms']:.2f} / {cell['p99_ms']:.2f}"
            for cell in row
        ]
        taken = [cell for cell in row if cell is not None]
        top1 = min(cell["top1"] for cell in taken)
        noise = [cell["sqnr_db"] for cell in taken if cell["sqnr_db"] is not None]
        sqnr = f"{min(noise):.1f} dB" if noise else "equal"
        lines.append(f"| {way} | {' | '.join(shown)} | {top1:.2%} | {sqnr} |")
    return lines


def _jpeg_table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    done = {key: row for key, row in rows.items() if "failed" not in row}
    networks = ", ".join(dict.fromkeys(row["network"] for row in done.values()))
    lines = [
        f"Requests have one image each, so many at once. The network is run as {networks}.",
        "*In process* is the service that every server holds, from a request's bytes to those of its answer. Over",
        "HTTP, the load generator is a process of its own on the same machine. It takes part of the cores. Decoders on",
        "the CPU have a thread for each core, at most 8 in a process.",
        "",
        "Top-1 is the share of images with the class that the runtime's own decoder (cpu) leads to in process. Pixels",
        "are compared with that decoder's, prepared for the network, in levels of 255.",
        "",
        "| where, decoder | at once | images/s | p50 | p99 | top-1 | pixels differ by, mean | most |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for key, row in done.items():
        where, clients = key.split("|")
        lines.append(
            f"| {where} | {clients} | {row['images_s']:,.0f} | {row['p50_ms']:.2f} ms | {row['p99_ms']:.2f} ms | "
            f"{row['top1']:.2%} | {row['pixels_mean']:.3f} | {row['pixels_max']} |"
        )
    return lines


def _failures(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was not run and why, each way once where every batch size of every model has the same reason."""
    places: dict[tuple[str, str], list[str]] = {}
    for key, cell in cells.items():
        if "failed" in cell:
            *model, name, batch = key.split("|")
            places.setdefault((name, cell["failed"]), []).append(f"{' '.join(model)} {batch}".strip())
    total: dict[str, int] = {}
    for key in cells:
        name = key.split("|")[-2]
        total[name] = total.get(name, 0) + 1
    lines = []
    for (name, reason), where in places.items():
        which = "" if len(where) == total[name] else f" (batch of {', '.join(where)})"
        lines.append(f"- {name}{which}: {reason}")
    return lines
